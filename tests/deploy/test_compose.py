"""`compose.yaml`: valid by its specification, hardened, complete, and consistent with settings, secrets and monitoring."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from compose_spec import PyCompose
from tests.deploy.compose_file import DEPLOY, interpolated, seconds, services
from tests.deploy.dockerfile import image
from tests.deploy.settings_named import require_command, require_setting_variable, require_settings

from loraplex.platform.config import Settings
from loraplex.platform.datastores.embedded.binaries import find_postgres
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.tenants.database import ROLES

COMPOSE = DEPLOY / "compose"
OWN = ("engine", "gateway-1", "gateway-2", "migrate")
SERVICES = services()
HARDENED = ("read_only", "cap_drop", "security_opt", "init", "tmpfs", "stop_grace_period", "pids_limit")


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `create_secrets.sh` writes."""
    folder = tmp_path_factory.mktemp("compose") / "secrets"
    subprocess.run(["sh", str(COMPOSE / "create_secrets.sh"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml", "compose.engines.yaml"])
def test_the_file_is_valid_by_the_specification(name: str) -> None:
    merged = yaml.safe_load(interpolated(name, LORAPLEX_MODEL="/models/tiny"))
    parsed = PyCompose.from_yaml(yaml.safe_dump(merged))
    assert "engine" in parsed.service_names()


def test_four_engines_have_a_gpu_and_a_socket_each_and_the_gateways_attach_them_all() -> None:
    found = yaml.safe_load(interpolated("compose.engines.yaml", LORAPLEX_MODEL="/models/tiny"))["services"]
    engines = {name: service for name, service in found.items() if name.startswith("engine")}
    sockets = {service["command"][4] for service in engines.values()}
    assert sockets == {f"ipc:///run/loraplex/engine/{number}.sock" for number in range(4)}
    for service in engines.values():
        require_command(service["command"])
        assert service["command"][4].removeprefix("ipc://") in service["healthcheck"]["test"][-1]
        assert {name: service[name] for name in HARDENED} == {
            name: SERVICES["engine"][name] for name in HARDENED
        }
        assert service["volumes"] == SERVICES["engine"]["volumes"]
        for variable in service["environment"]:
            require_setting_variable(variable)
    devices = [
        device["device_ids"]
        for service in engines.values()
        for device in service["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert devices == [["0"], ["1"], ["2"], ["3"]]
    for name in ("gateway-1", "gateway-2"):
        require_command(found[name]["command"])
        assert all(fnmatch(each, found[name]["command"][4]) for each in sockets)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    if name != "migrate":
        assert service["deploy"]["resources"]["limits"]["memory"]
        assert "healthcheck" in service or name.startswith("gateway")
    for port in service.get("ports", ()):
        assert name == "proxy" or port.startswith("127.0.0.1:")


def test_what_a_service_waits_for_ends_or_has_a_health_check() -> None:
    conditions = {
        (name, other, each["condition"])
        for name, service in SERVICES.items()
        for other, each in service.get("depends_on", {}).items()
    }
    assert ("gateway-1", "migrate", "service_completed_successfully") in conditions
    assert ("migrate", "postgres", "service_healthy") in conditions
    for _, other, condition in conditions:
        if condition == "service_healthy":
            assert "healthcheck" in SERVICES[other] or image("cpu").all("HEALTHCHECK")


@pytest.mark.parametrize("name", OWN)
def test_commands_variables_and_paths_are_those_of_the_program_and_the_image(name: str) -> None:
    service = SERVICES[name]
    # The server does not wait for processes that lost their parent.
    assert service["init"] is True
    require_command(service["command"])
    for variable in service.get("environment", {}):
        require_setting_variable(variable)
    require_settings(
        {
            key.lower().removeprefix("loraplex_"): value
            for key, value in service.get("environment", {}).items()
        }
    )
    volumes = {each.split(":")[1] for each in service.get("volumes", ())}
    assert volumes <= {*image("cpu").listed("VOLUME"), "/run/loraplex"}
    assert seconds(service["stop_grace_period"]) > Settings().drain_grace_s + Settings().drain_s + 10


def test_gateways_trust_the_address_of_the_proxy_and_nothing_else() -> None:
    (trusted,) = {
        SERVICES[name]["environment"]["LORAPLEX_TRUSTED_PROXIES"] for name in ("gateway-1", "gateway-2")
    }
    address = SERVICES["proxy"]["networks"]["edge"]["ipv4_address"]
    assert trusted == f"{address}/32"
    stores = {name for name, service in SERVICES.items() if "stores" in service["networks"]}
    assert stores == {"gateway-1", "gateway-2", "migrate", "postgres", "valkey"}
    assert (
        yaml.safe_load(interpolated("compose.yaml", LORAPLEX_MODEL="x"))["networks"]["stores"]["internal"]
        is True
    )


@pytest.mark.parametrize("domain", ["localhost", "llm.example.com"])
def test_gateways_know_the_name_that_the_proxy_serves(domain: str) -> None:
    variables = {} if domain == "localhost" else {"LORAPLEX_DOMAIN": domain}
    found = yaml.safe_load(interpolated("compose.yaml", LORAPLEX_MODEL="x", **variables))["services"]
    assert found["proxy"]["environment"]["LORAPLEX_DOMAIN"] == domain
    for name in ("gateway-1", "gateway-2"):
        assert found[name]["environment"]["LORAPLEX_PUBLIC_URL"] == f"https://{domain}"


def test_the_secrets_are_private_random_and_kept(secrets: Path) -> None:
    declared: dict[str, Any] = yaml.safe_load(interpolated("compose.yaml", LORAPLEX_MODEL="x"))["secrets"]
    names = {Path(each["file"]).name for each in declared.values()}
    assert names == {path.name for path in secrets.iterdir()}
    assert secrets.stat().st_mode & 0o777 == 0o700
    written = {name: (secrets / name).read_text() for name in names}
    settings = tomllib.loads(written["loraplex.toml"])
    require_settings(settings)
    assert len(settings["secret"]) == 64
    assert written["postgres_server"] in settings["database_url"]
    assert written["valkey_auth"].split()[1] in settings["redis_url"]
    assert len({written["postgres_server"], written["postgres_superuser"], settings["secret"]}) == 3
    subprocess.run(["sh", str(COMPOSE / "create_secrets.sh"), str(secrets)], check=True, capture_output=True)
    assert written == {name: (secrets / name).read_text() for name in names}


def test_no_secret_is_in_an_environment_or_a_command() -> None:
    for name, service in SERVICES.items():
        for variable in service.get("environment", {}):
            assert not re.search(r"PASSWORD$|SECRET|DATABASE_URL|REDIS_URL", variable), (name, variable)
        assert "requirepass" not in " ".join(service.get("command", ()))


def test_the_database_script_makes_the_role_that_a_server_needs(
    embedded_services: EmbeddedServices, secrets: Path
) -> None:
    """Run by psql on a real server, where the roles of row-level security exist already."""
    script = (COMPOSE / "create_database.sql").read_text()
    for role in ROLES:
        assert f"CREATE ROLE {role} NOLOGIN NOSUPERUSER" in script
    script = re.sub(r"^CREATE ROLE app_.*\n", "", script, flags=re.MULTILINE)
    script = script.replace("/run/secrets", str(secrets)).replace("loraplex_server", "composed_server")
    script = script.replace("DATABASE loraplex", "DATABASE composed")
    psql = find_postgres().dump.with_name("psql")
    subprocess.run(
        [psql, "-v", "ON_ERROR_STOP=1", "-q", embedded_services.database_url],
        input=script,
        text=True,
        check=True,
    )
    with psycopg.connect(embedded_services.database_url, autocommit=True) as connection:
        rights = connection.execute(
            "SELECT rolsuper, rolcreaterole, rolcreatedb, rolbypassrls, rolcanlogin FROM pg_roles WHERE rolname = 'composed_server'"
        ).fetchone()
        connection.execute("DROP DATABASE composed")
        connection.execute("DROP ROLE composed_server")
    assert rights == (False, False, False, False, True)


def test_valkey_keeps_its_counters_and_evicts_none() -> None:
    lines = dict(
        line.split(maxsplit=1)
        for line in (COMPOSE / "valkey.conf").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert lines["appendonly"] == "yes"
    assert lines["maxmemory-policy"] == "noeviction"
    assert lines["include"] == "/run/secrets/valkey_auth"


def test_prometheus_reaches_every_gateway_and_knows_the_rules() -> None:
    written = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    original = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert written["rule_files"] == original["rule_files"]
    ports = {name: SERVICES[name]["command"][-1] for name in ("gateway-1", "gateway-2")}
    (scraped,) = written["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"{name}:{port}" for name, port in ports.items()]}]
    assert scraped["job_name"] == original["scrape_configs"][0]["job_name"]
    mounted = " ".join(SERVICES["prometheus"]["volumes"])
    assert all(f"./prometheus/{name}" in mounted for name in written["rule_files"])


def test_every_mounted_file_exists() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
