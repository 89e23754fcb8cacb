"""The services of `compose.yaml` as containers: their commands, user, volumes and read-only root, without a container engine.

PostgreSQL and Valkey are the embedded ones, since the volume of secrets has no addresses.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.deploy.compose_file import services
from tests.deploy.container import Contained, Container, can_run
from tests.deploy.dockerfile import image
from tests.platform.conftest import build_tokenizer
from tests.platform.server.serve_process import script, until

pytestmark = pytest.mark.skipif(not can_run(), reason="needs root, namespaces and setpriv")
MODEL, SCRIPT = "/models/tiny", "/models/script.json"
SECRETS = "/etc/loraplex/loraplex.toml"
CHAT = """
import json, sys, urllib.request
body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
headers = {"authorization": "Bearer " + sys.argv[1], "content-type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@dataclass(frozen=True)
class Composed:
    """The running services."""

    engine: Contained
    gateway: Contained


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Composed]:
    folder = tmp_path_factory.mktemp("containers")
    build_tokenizer().save_pretrained(folder / "tiny")
    (folder / "script.json").write_bytes(msgspec.json.encode(script()))
    (folder / "loraplex.toml").write_text(f'secret = "{"s" * 32}"\n')
    files = {MODEL: folder / "tiny", SCRIPT: folder / "script.json", SECRETS: folder / "loraplex.toml"}
    for path in (folder / "loraplex.toml", folder / "script.json"):
        path.chmod(0o444)
    built = image("cpu")
    volumes = [*built.listed("VOLUME"), "/run/loraplex"]
    container = Container.prepared(folder, wheel, built, volumes, files)
    with ExitStack() as stack:
        engine = stack.enter_context(_started(container, "engine", {"LORAPLEX_FAKE_ENGINE": SCRIPT}))
        with _started(container, "migrate", {}) as migrate:
            assert migrate.process.wait(180) == 0, migrate.output
        gateway = stack.enter_context(_started(container, "gateway-1", {}))
        until(lambda: _is_ready(gateway), within_s=180)
        yield Composed(engine, gateway)


def _started(container: Container, service: str, more: dict[str, str]) -> Any:
    """The service as the Compose file has it."""
    written = services()[service]
    mounts = [each.split(":") for each in written.get("volumes", ())]
    read_only = [path for _, path, *mode in mounts if mode == ["ro"]]
    return container.running(written["command"], written.get("environment", {}) | more, read_only)


def _is_ready(gateway: Contained) -> bool:
    assert gateway.process.poll() is None, gateway.output
    return "Serving tiny" in gateway.output and gateway.execute(*image("cpu").health_check).returncode == 0


def test_a_gateway_answers_a_tenant_through_its_engine(composed: Composed) -> None:
    created = composed.gateway.execute("loraplex", "tenant", "create", "acme", "--json")
    assert created.returncode == 0, created.stderr
    answered = composed.gateway.execute("python", "-c", CHAT, json.loads(created.stdout)["api_key"])
    assert answered.returncode == 0, answered.stderr + composed.gateway.output
    assert json.loads(answered.stdout)["usage"]["completion_tokens"] == 8


def test_the_health_check_of_the_engine_finds_its_socket(composed: Composed) -> None:
    command = services()["engine"]["healthcheck"]["test"]
    assert command[0] == "CMD"
    assert composed.engine.execute(*command[1:]).returncode == 0
    assert composed.engine.process.poll() is None


@pytest.mark.parametrize("name", ["engine", "gateway"])
def test_it_runs_without_root_capabilities_and_a_writable_root(composed: Composed, name: str) -> None:
    contained: Contained = getattr(composed, name)
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{contained.pid}/status").read_text().splitlines()
    )
    assert set(status["Uid"].split()) == {str(image("cpu").uid)}
    assert {int(status[each], 16) for each in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    assert status["NSpid"].split()[-1] == "1"
    for path in ("/", "/etc/loraplex", "/opt", "/var/lib" if name == "gateway" else "/var/lib/loraplex"):
        assert "Read-only file system" in contained.execute("touch", f"{path}/x").stderr
    module = contained.execute("python", "-c", "import loraplex.engine as e; print(e.__file__)")
    assert module.stdout.startswith("/opt/loraplex/")


def test_the_first_process_forwards_the_signal_and_ends_with_success(composed: Composed) -> None:
    for contained in (composed.gateway, composed.engine):
        os.kill(contained.pid, signal.SIGTERM)
        assert contained.process.wait(60) == 0, contained.output
    assert "draining" in composed.gateway.output
