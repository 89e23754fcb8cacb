"""The Serve config and the manifest of `deploy/ray`, as Ray and this repository's code read them."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from tests.deploy.dockerfile import image
from tests.deploy.manifests import RELEASES
from tests.deploy.settings_named import require_command

from loraplex.platform.config import Settings, load_settings
from loraplex.platform.engines.process import STOP_GRACE_S
from loraplex.platform.ray.deployment import DEPLOYMENT, ROUTER, EngineArguments, build, engine_deployment
from loraplex.platform.ray.router import CONTROL_CALLS

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"


@pytest.fixture(scope="module")
def application() -> dict[str, Any]:
    schema = ServeDeploySchema.model_validate(yaml.safe_load((FOLDER / "serve.yaml").read_text()))
    found: dict[str, Any] = schema.applications[0].model_dump(exclude_unset=True)
    return found


@pytest.fixture(scope="module")
def cluster() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "raycluster.yaml").read_text()))


def templates(cluster: list[dict[str, Any]]) -> list[dict[str, Any]]:
    spec = cluster[0]["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@pytest.fixture(scope="module")
def gateways() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "gateways.yaml").read_text()))


@pytest.fixture(scope="module")
def pods(cluster: list[dict[str, Any]], gateways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["spec"] for each in (*templates(cluster), gateways[0]["spec"]["template"])]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_the_application_is_built_from_the_arguments_of_the_config(application: dict[str, Any]) -> None:
    assert application["import_path"] == f"{build.__module__}:{build.__name__}"
    assert [each["name"] for each in application["deployments"]] == [DEPLOYMENT]
    build(EngineArguments.model_validate(application["args"]))


def test_a_replaced_replica_has_time_for_its_streams(application: dict[str, Any]) -> None:
    settings, deployment = load_settings(application["args"]["settings"]), application["deployments"][0]
    assert deployment["graceful_shutdown_timeout_s"] >= settings.drain_s + STOP_GRACE_S
    assert (
        engine_deployment({"drain_s": 60})._deployment_config.graceful_shutdown_timeout_s == 60 + STOP_GRACE_S
    )


def test_a_replica_takes_its_rows_and_a_small_queue(application: dict[str, Any]) -> None:
    settings, deployment = load_settings(application["args"]["settings"]), application["deployments"][0]
    places = deployment["max_ongoing_requests"] - CONTROL_CALLS
    assert settings.max_num_seqs < places <= 2 * settings.max_num_seqs
    assert (
        engine_deployment({"max_num_seqs": 8})._deployment_config.max_ongoing_requests == 16 + CONTROL_CALLS
    )


def test_the_router_is_imported_and_not_copied() -> None:
    # Ray pickles by value what the module that the config names defines.
    config = engine_deployment({})._deployment_config.request_router_config
    assert config.request_router_class == ROUTER
    assert len(config.get_serialized_request_router_cls() or b"") in range(1, 200)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        EngineArguments.model_validate({"unknown": 1})


def test_every_node_asks_for_the_token_and_none_runs_a_dashboard(
    cluster: list[dict[str, Any]], pods: list[dict[str, Any]]
) -> None:
    for pod in pods:
        for container in containers(pod):
            names = {each["name"]: each for each in container["env"]}
            assert names["RAY_AUTH_MODE"]["value"] == "token"
            assert "secretKeyRef" in names["RAY_AUTH_TOKEN"]["valueFrom"]
    assert cluster[0]["spec"]["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"


def test_every_container_is_unprivileged(pods: list[dict[str, Any]]) -> None:
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            # What Ray, compilers and Python write: nothing of the root.
            written = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
            assert {"/tmp", dict(image("cpu").environment)["HOME"]} <= written


@pytest.mark.parametrize("release", RELEASES)
def test_pods_and_network_policies_are_valid_by_the_schema(
    cluster: list[dict[str, Any]], gateways: list[dict[str, Any]], release: str
) -> None:
    # Pods of a RayCluster have Kubernetes' own schema.
    objects = [{"apiVersion": "v1", "kind": "PodTemplate", "template": each} for each in templates(cluster)]
    for each in [*objects, *cluster[1:], *gateways]:
        kubernetes_validate.validate(each, release, strict=True)


def test_groups_have_the_fields_of_a_ray_cluster(cluster: list[dict[str, Any]]) -> None:
    # Of KubeRay's `RayClusterSpec`, whose schema no package contains.
    spec = cluster[0]["spec"]
    assert spec.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert spec["headGroupSpec"].keys() == {"rayStartParams", "template"}
    for group in spec["workerGroupSpecs"]:
        counts = {"minReplicas", "replicas", "maxReplicas"}
        assert group.keys() == {"groupName", "rayStartParams", "template", *counts}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(each, str) for each in group["rayStartParams"].values())


def test_gateways_offer_ray_no_cpu_and_reach_the_application(
    cluster: list[dict[str, Any]], gateways: list[dict[str, Any]], application: dict[str, Any]
) -> None:
    pod = gateways[0]["spec"]["template"]["spec"]
    (node,), (gateway,) = pod["initContainers"], pod["containers"]
    head = f"{cluster[0]['metadata']['name']}-head-svc:6379"
    assert node["command"] == ["ray", "start", f"--address={head}", "--num-cpus=0", "--block"]
    require_command(gateway["args"])
    assert f"ray://{application['name']}" in gateway["args"]


def test_a_gateway_has_its_ray_node_until_it_has_drained(gateways: list[dict[str, Any]]) -> None:
    pod = gateways[0]["spec"]["template"]["spec"]
    (node,), (gateway,) = pod["initContainers"], pod["containers"]
    assert node["restartPolicy"] == "Always" and "startupProbe" in node
    assert {each["name"] for each in node["volumeMounts"]} <= {
        each["name"] for each in gateway["volumeMounts"]
    }
    stopping = int(gateway["lifecycle"]["preStop"]["exec"]["command"][-1])
    drained = stopping + Settings().drain_grace_s + Settings().drain_s
    assert pod["terminationGracePeriodSeconds"] >= drained + 20
    startup = gateway["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > Settings().engine_start_timeout_s


def test_a_gateways_journal_outlives_its_pod(gateways: list[dict[str, Any]]) -> None:
    gateway_set = gateways[0]["spec"]
    (gateway,) = gateway_set["template"]["spec"]["containers"]
    mounts = {each["name"]: each["mountPath"] for each in gateway["volumeMounts"]}
    claimed = [mounts[each["metadata"]["name"]] for each in gateway_set["volumeClaimTemplates"]]
    data_dir = gateway["args"][gateway["args"].index("--data-dir") + 1]
    assert any(data_dir.startswith(f"{path}/") for path in claimed)
    assert gateway_set["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Retain",
        "whenScaled": "Retain",
    }


def test_metrics_are_not_at_the_port_of_clients(
    cluster: list[dict[str, Any]], gateways: list[dict[str, Any]]
) -> None:
    (gateway,) = gateways[0]["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in gateway["ports"]}
    assert gateway["args"][gateway["args"].index("--metrics-port") + 1] == str(ports["metrics"])
    services = {each["metadata"]["name"]: each["spec"] for each in gateways if each["kind"] == "Service"}
    assert [each["targetPort"] for each in services["loraplex"]["ports"]] == ["http"]
    assert gateways[0]["spec"]["serviceName"] in services
    labels = gateways[0]["spec"]["template"]["metadata"]["labels"]
    assert all(each["selector"] == labels for each in services.values())


def test_no_probe_is_left_to_the_operator_whose_ask_the_dashboard(cluster: list[dict[str, Any]]) -> None:
    for template in templates(cluster):
        node = template["spec"]["containers"][0]
        for name in ("readinessProbe", "livenessProbe"):
            assert node[name]["httpGet"]["port"] == 52365


def test_the_guide_names_every_secret_map_and_claim() -> None:
    written = "".join((FOLDER / name).read_text() for name in ("raycluster.yaml", "gateways.yaml"))
    guide = (FOLDER / "README.md").read_text()
    referred = r"(?:secretRef: { |secretKeyRef: { |configMap: { )name: ([\w-]+)|claimName: ([\w-]+)"
    names = {one or other for one, other in re.findall(referred, written)}
    assert names == {"loraplex-ray", "loraplex", "loraplex-s3", "loraplex-serve", "loraplex-models"}
    assert all(f"`{name}`" in guide for name in names)


def test_rays_ports_are_open_to_the_cluster_alone(cluster: list[dict[str, Any]]) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in cluster if each["kind"] == "NetworkPolicy"}
    (rule,) = policies["loraplex-ray"]["ingress"]
    assert list(rule["from"][0]) == ["podSelector"]
    http, metrics = policies["loraplex-http"]["ingress"]
    assert [port["port"] for port in http["ports"]] == ["http"]
    assert [port["port"] for port in metrics["ports"]] == ["metrics"] and metrics["from"]


def test_nothing_leaves_a_pod_that_no_policy_names(
    cluster: list[dict[str, Any]], gateways: list[dict[str, Any]]
) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in cluster if each["kind"] == "NetworkPolicy"}
    everyone = {"app.kubernetes.io/name": "loraplex"}
    assert policies["loraplex-ray"]["podSelector"]["matchLabels"] == everyone
    assert policies["loraplex-ray"]["policyTypes"] == ["Ingress", "Egress"]
    assert policies["loraplex-ray"]["egress"] == [{"to": [{"podSelector": {"matchLabels": everyone}}]}]
    pods = [*templates(cluster), gateways[0]["spec"]["template"]]
    assert all(everyone.items() <= each["metadata"]["labels"].items() for each in pods)
    stores = policies["loraplex-stores"]
    assert stores["podSelector"]["matchLabels"] == pods[-1]["metadata"]["labels"]
    assert [each["port"] for each in stores["egress"][0]["ports"]] == [5432, 6379]
    (names,) = policies["loraplex-names"]["egress"]
    assert {each["port"] for each in names["ports"]} == {53}
    internet = policies["loraplex-internet"]
    of = {each["key"]: each["values"] for each in internet["podSelector"]["matchExpressions"]}
    assert of["app.kubernetes.io/component"] == ["gateway", "engine"]
    (rule,) = internet["egress"]
    (block,) = [each["ipBlock"] for each in rule["to"]]
    assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"} <= set(block["except"])
    assert rule["ports"] == [{"port": 443}]
