"""The Kubernetes manifests: valid by the schemas of several releases, restricted, and consistent with the program and each other."""

import tomllib
from fnmatch import fnmatch
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.deploy.dockerfile import image
from tests.deploy.manifests import (
    KUBECTL,
    KUBERNETES,
    RELEASES,
    RENDERED,
    containers,
    documents,
    of_kind,
    pod_template,
    rendered,
    written,
)
from tests.deploy.settings_named import require_command, require_setting_variable, require_settings
from tests.platform.web.route_table import SCOPES

from loraplex.platform.config import Settings

CUSTOM = {"ServiceMonitor"}
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""What the restricted pod security standard allows."""
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl")
WRITTEN = written()
SET = of_kind(WRITTEN["base/stateful_set.yaml"], "StatefulSet")[0]
JOB = of_kind(WRITTEN["migrate/job.yaml"], "Job")[0]


def settings_of_pods() -> dict[str, str]:
    """The variables of the generated map."""
    (generated,) = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())[
        "configMapGenerator"
    ]
    return dict(line.split("=", 1) for line in generated["literals"])


def container(name: str) -> dict[str, Any]:
    return next(each for each in containers(pod_template(SET)["spec"]) if each["name"] == name)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("file", WRITTEN)
def test_every_object_is_valid_by_the_schema(file: str, release: str) -> None:
    for each in WRITTEN[file]:
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, release, strict=True)


@needs_kubectl
@pytest.mark.parametrize("folder", RENDERED)
def test_every_rendered_object_is_valid_and_in_the_namespace(folder: str) -> None:
    objects = rendered(folder)
    for each in objects:
        kubernetes_validate.validate(each, RELEASES[-1], strict=True)
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "loraplex"
    workloads = of_kind(objects, "StatefulSet") + of_kind(objects, "Job")
    for each in (
        container for workload in workloads for container in containers(pod_template(workload)["spec"])
    ):
        assert each["image"].startswith("registry.example.com/loraplex:")
        assert each["resources"]["limits"]["memory"]
        assert each["resources"]["requests"]["cpu"]


@needs_kubectl
def test_only_the_engine_gets_the_gpu() -> None:
    (workload,) = of_kind(rendered("overlays/cuda"), "StatefulSet")
    with_gpu = {
        each["name"]
        for each in containers(pod_template(workload)["spec"])
        if "nvidia.com/gpu" in each["resources"]["limits"]
    }
    assert with_gpu == {"engine"}
    assert "-cuda" in container_image(workload)


@needs_kubectl
def test_four_engines_have_a_gpu_and_a_socket_each_and_the_gateway_attaches_them_all() -> None:
    (workload,) = of_kind(rendered("overlays/four-engines"), "StatefulSet")
    pod = pod_template(workload)["spec"]
    engines = [each for each in pod["initContainers"] if each["name"].startswith("engine")]
    sockets = {each["args"][each["args"].index("--engine") + 1] for each in engines}
    assert sockets == {f"ipc:///run/loraplex/engine/{number}.sock" for number in range(4)}
    (first,) = (each for each in engines if each["name"] == "engine")
    for each in engines:
        require_command(each["args"])
        assert each["resources"]["limits"]["nvidia.com/gpu"] == 1 and each["restartPolicy"] == "Always"
        for shared in ("image", "securityContext", "volumeMounts", "env", "envFrom", "resources"):
            assert each[shared] == first[shared], (each["name"], shared)
    (gateway,) = pod["containers"]
    require_command(gateway["args"])
    pattern = gateway["args"][gateway["args"].index("--engine") + 1]
    assert all(fnmatch(each, pattern) for each in sockets)


def container_image(workload: dict[str, Any]) -> str:
    return str(pod_template(workload)["spec"]["initContainers"][0]["image"])


@pytest.mark.parametrize("workload", [SET, JOB], ids=lambda each: each["kind"])
def test_a_pod_keeps_the_restricted_standard_and_a_read_only_root(workload: dict[str, Any]) -> None:
    (namespace,) = WRITTEN["base/namespace.yaml"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    pod = pod_template(workload)["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == image("cpu").uid
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for volume in pod["volumes"]:
        assert set(volume) - {"name"} <= VOLUMES
    for each in containers(pod):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_commands_settings_and_secrets_are_those_of_the_program() -> None:
    for each in (*containers(pod_template(SET)["spec"]), *containers(pod_template(JOB)["spec"])):
        require_command(each["args"])
    variables = settings_of_pods()
    for name in variables:
        require_setting_variable(name)
    require_settings({name.lower().removeprefix("loraplex_"): value for name, value in variables.items()})
    # A network of the base would let others than the ingress controller write client addresses.
    assert variables["LORAPLEX_TRUSTED_PROXIES"] == ""
    (secret,) = WRITTEN["secret.example.yaml"]
    values = tomllib.loads(secret["stringData"]["loraplex.toml"])
    assert set(values) <= set(Settings.model_fields)
    assert set(values.values()) == {""}


def test_gateway_and_engine_share_a_socket_and_the_engine_ends_last() -> None:
    gateway, engine = container("gateway"), container("engine")
    address = gateway["args"][gateway["args"].index("--engine") + 1]
    assert address == engine["args"][engine["args"].index("--engine") + 1]
    mounts = {each["name"]: each for each in gateway["volumeMounts"]}
    assert pod_template(SET)["spec"]["shareProcessNamespace"] is True
    assert address.startswith(f"ipc://{mounts['sockets']['mountPath']}/")
    assert engine["restartPolicy"] == "Always"
    assert engine in pod_template(SET)["spec"]["initContainers"]
    assert "secrets" not in {each["name"] for each in engine["volumeMounts"]}
    for name in ("data", "models"):
        paths = {
            each["mountPath"]
            for one in (gateway, engine)
            for each in one["volumeMounts"]
            if each["name"] == name
        }
        assert len(paths) == 1
        assert paths <= set(image("cpu").listed("VOLUME"))
    assert settings_of_pods()["LORAPLEX_DATA_DIR"].startswith(mounts["data"]["mountPath"] + "/")


def test_probes_and_times_leave_streams_their_drain() -> None:
    gateway, settings = container("gateway"), settings_of_pods()
    ports = {each["name"]: each["containerPort"] for each in gateway["ports"]}
    flags = dict(zip(gateway["args"][1::2], gateway["args"][2::2], strict=True))
    assert ports == {"http": int(flags["--port"]), "metrics": int(flags["--metrics-port"])}
    probes = {name: gateway[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/startupz", "liveness": "/livez", "readiness": "/readyz"}
    assert (
        probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
        > Settings().engine_start_timeout_s
    )
    paused = int(gateway["lifecycle"]["preStop"]["exec"]["command"][-1])
    grace = pod_template(SET)["spec"]["terminationGracePeriodSeconds"]
    assert grace >= paused + Settings().drain_grace_s + float(settings["LORAPLEX_DRAIN_S"]) + 10


def test_every_selector_finds_the_pods() -> None:
    labels = pod_template(SET)["metadata"]["labels"]
    selectors = [SET["spec"]["selector"]["matchLabels"]]
    selectors += [each["spec"]["selector"] for each in WRITTEN["base/services.yaml"]]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in WRITTEN["base/disruption_budget.yaml"]]
    spread = pod_template(SET)["spec"]["topologySpreadConstraints"]
    selectors += [each["labelSelector"]["matchLabels"] for each in spread]
    assert {each["topologyKey"] for each in spread} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }
    for selector in selectors:
        assert selector.items() <= labels.items()
    assert selectors[0] == labels
    job = pod_template(JOB)["metadata"]["labels"]
    assert not selectors[0].items() <= job.items()


def test_nothing_is_open_that_no_policy_names() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in WRITTEN["base/network_policies.yaml"]}
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ports = {
        (port["port"], next(iter(source["namespaceSelector"]["matchLabels"].values())))
        for rule in policies["ingress-to-gateways"]["ingress"]
        for port in rule["ports"]
        for source in rule["from"]
    }
    assert ports == {("http", "ingress-nginx"), ("metrics", "monitoring")}
    (rule,) = policies["egress-to-internet"]["egress"]
    (block,) = [each["ipBlock"] for each in rule["to"]]
    assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"} <= set(block["except"])
    assert rule["ports"] == [{"port": 443}]
    labels = pod_template(JOB)["metadata"]["labels"]
    assert policies["egress-to-stores"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert not policies["egress-to-internet"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_autoscaler_reads_what_the_adapter_serves() -> None:
    (scaler,) = WRITTEN["base/autoscaler.yaml"]
    assert scaler["spec"]["scaleTargetRef"]["kind"] == SET["kind"]
    (metric,) = scaler["spec"]["metrics"]
    (adapter,) = documents((KUBERNETES / "monitoring" / "prometheus_adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert rule["seriesQuery"].startswith("vllm:num_requests_waiting{")
    (monitor,) = WRITTEN["monitoring/service_monitor.yaml"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    (scraped,) = [
        each
        for each in WRITTEN["base/services.yaml"]
        if wanted.items() <= each["metadata"].get("labels", {}).items()
    ]
    assert [each["name"] for each in scraped["spec"]["ports"]] == [monitor["spec"]["endpoints"][0]["port"]]


def test_the_ingress_leads_to_every_route_of_tenants_and_to_none_of_operators() -> None:
    (ingress,) = WRITTEN["ingress/ingress.yaml"]
    (rule,) = ingress["spec"]["rules"]
    paths = {each["path"]: each["pathType"] for each in rule["http"]["paths"]}
    prefixes = [path for path, kind in paths.items() if kind == "Prefix"]
    for route in (entry.split()[1] for entry in SCOPES):
        reached = any(route.startswith(f"{prefix}/") for prefix in prefixes)
        assert reached is not route.startswith("/operator"), route
    assert paths["/"] == paths["/favicon.ico"] == "Exact"
    assert not any(path.startswith(("/metrics", "/readyz", "/operator")) for path in paths)
