"""The Kubernetes objects of `deploy/kubernetes`: as written, and as `kubectl kustomize` renders an overlay."""

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

KUBERNETES: Final = Path(__file__).parents[2] / "deploy" / "kubernetes"
RELEASES: Final = ("1.30", "1.34", "1.37")
RENDERED: Final = ("overlays/cpu", "overlays/cuda", "overlays/four-engines", "migrate")
KUBECTL: Final = shutil.which("kubectl")
NOT_OBJECTS: Final = ("kustomization.yaml", "engine.yaml", "engines.yaml", "prometheus_adapter.yaml")


def documents(text: str) -> list[dict[str, Any]]:
    """Every document of a text."""
    return [document for document in yaml.safe_load_all(text) if document is not None]


def written() -> dict[str, list[dict[str, Any]]]:
    """File -> its objects; patches and settings of kustomize are none."""
    return {
        str(path.relative_to(KUBERNETES)): documents(path.read_text())
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        if path.name not in NOT_OBJECTS
    }


@cache
def rendered(folder: str) -> list[dict[str, Any]]:
    """The objects of an overlay. Needs kubectl."""
    assert KUBECTL is not None
    command = [KUBECTL, "kustomize", str(KUBERNETES / folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return documents(result.stdout)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def pod_template(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]
    return found


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Containers and sidecars of a pod's `spec`."""
    yield from pod.get("initContainers", ())
    yield from pod["containers"]
