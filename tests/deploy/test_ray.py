"""The Serve config and the manifest of `deploy/ray`, as Ray and this repository's code read them."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from tests.deploy.manifests import RELEASES

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


def pods(cluster: list[dict[str, Any]]) -> list[dict[str, Any]]:
    spec = cluster[0]["spec"]
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


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


def test_every_node_asks_for_the_token_and_none_runs_a_dashboard(cluster: list[dict[str, Any]]) -> None:
    for pod in pods(cluster):
        for container in pod["containers"]:
            names = {each["name"]: each for each in container["env"]}
            assert names["RAY_AUTH_MODE"]["value"] == "token"
            assert "secretKeyRef" in names["RAY_AUTH_TOKEN"]["valueFrom"]
    assert cluster[0]["spec"]["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"


def test_every_container_is_unprivileged(cluster: list[dict[str, Any]]) -> None:
    for pod in pods(cluster):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("release", RELEASES)
def test_pods_and_network_policies_are_valid_by_the_schema(
    cluster: list[dict[str, Any]], release: str
) -> None:
    # Pods of a RayCluster have Kubernetes' own schema.
    spec = cluster[0]["spec"]
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    objects = [{"apiVersion": "v1", "kind": "PodTemplate", "template": each} for each in templates]
    for each in [*objects, *cluster[1:]]:
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
    cluster: list[dict[str, Any]], application: dict[str, Any]
) -> None:
    gateways = cluster[0]["spec"]["workerGroupSpecs"][1]
    assert gateways["rayStartParams"]["num-cpus"] == "0"
    (_, container) = gateways["template"]["spec"]["containers"]
    assert f"ray://{application['name']}" in container["args"]


def test_a_gateway_has_its_ray_node_until_it_has_drained(cluster: list[dict[str, Any]]) -> None:
    pod = cluster[0]["spec"]["workerGroupSpecs"][1]["template"]["spec"]
    node, gateway = pod["containers"]
    kept = int(node["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert kept >= Settings().drain_grace_s + Settings().drain_s + 10
    assert pod["terminationGracePeriodSeconds"] > kept + 10
    startup = gateway["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > Settings().engine_start_timeout_s


def test_no_probe_is_left_to_the_operator_whose_ask_the_dashboard(cluster: list[dict[str, Any]]) -> None:
    for pod in pods(cluster):
        node = pod["containers"][0]
        for name in ("readinessProbe", "livenessProbe"):
            assert node[name]["httpGet"]["port"] == 52365


def test_the_guide_names_every_secret_map_and_claim() -> None:
    written = (FOLDER / "raycluster.yaml").read_text()
    guide = (FOLDER / "README.md").read_text()
    referred = r"(?:secretRef: { |secretKeyRef: { |configMap: { )name: ([\w-]+)|claimName: ([\w-]+)"
    names = {one or other for one, other in re.findall(referred, written)}
    assert names == {"loraplex-ray", "loraplex", "loraplex-s3", "loraplex-serve", "loraplex-models"}
    assert all(f"`{name}`" in guide for name in names)


def test_rays_ports_are_open_to_the_cluster_alone(cluster: list[dict[str, Any]]) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in cluster if each["kind"] == "NetworkPolicy"}
    (rule,) = policies["loraplex-ray"]["ingress"]
    assert list(rule["from"][0]) == ["podSelector"]
    (http,) = policies["loraplex-http"]["ingress"]
    assert [port["port"] for port in http["ports"]] == ["http"]
