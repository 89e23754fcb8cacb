"""S20: Ray unpickles what its ports get, so it is joined with tokens alone, without a dashboard, and imported by one folder."""

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from loraplex.platform.config import load_settings
from loraplex.platform.server.serve import _require_role_settings
from loraplex.platform.startup_errors import SettingsError

ROOT: Final = Path(__file__).parents[2]
RAY: Final = ROOT / "deploy" / "ray"


def test_s20_only_its_own_folder_imports_ray() -> None:
    """Ray listens on every address and unpickles what arrives: who does not scale out by it has none of it."""
    imports = re.compile(r"^\s*(?:import|from) ray\b", re.MULTILINE)
    importing = {
        path.relative_to(ROOT).parts[:2]
        for folder in ("adapters", "engine", "grammar", "migrations", "platform", "tenants")
        for path in (ROOT / folder).rglob("*.py")
        if imports.search(path.read_text())
    }
    assert importing <= {("platform", "ray")}


@pytest.mark.parametrize("mode", [None, "", "disabled", "TOKEN"])
def test_s20_no_cluster_without_tokens_is_joined(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    settings = load_settings({"role": "gateway", "engine": ("ray://loraplex",)})
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    _require_role_settings(settings)
    monkeypatch.delenv("RAY_AUTH_MODE")
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(SettingsError, match="needs the environment variable RAY_AUTH_MODE=token"):
        _require_role_settings(settings)


def test_s20_clusters_are_started_with_tokens_and_without_a_dashboard() -> None:
    commands = re.findall(r"^ray start --head.*$", (RAY / "README.md").read_text(), re.MULTILINE)
    assert commands and all("--include-dashboard=false" in each for each in commands)
    assert "export RAY_AUTH_MODE=token" in (RAY / "README.md").read_text()
    for file in RAY.glob("*.yaml"):
        for document in yaml.safe_load_all(file.read_text()):
            if document.get("kind") == "RayCluster":
                check_cluster(document["spec"])
            elif document.get("kind") == "StatefulSet":
                check_pod(document["spec"]["template"]["spec"])


def check_cluster(spec: dict[str, Any]) -> None:
    """Hold every container of a cluster to tokens, and its head to no dashboard."""
    head = spec["headGroupSpec"]
    assert head["rayStartParams"]["include-dashboard"] == "false"
    for group in (head, *spec["workerGroupSpecs"]):
        check_pod(group["template"]["spec"])


def check_pod(pod: dict[str, Any]) -> None:
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        values = {each["name"]: each.get("value") for each in container["env"]}
        assert values["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" in values, container["name"]
