"""The commands of README.md from the first request on, pasted into a shell in a new directory beside the running demo."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from tests.end_to_end.live_server import RUN, LiveServer, environment

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "\n## First request\n"
"""What stands above it installs, starts the demo and runs the tests."""
ADDRESS = "http://127.0.0.1:8000"
PASTED = ("bash", "-euo", "pipefail", "-c")
"""Unlike a reader's shell it ends at the first command that fails."""


def blocks(language: str, demo: LiveServer) -> str:
    """All blocks of a language, one after the other, with the address of this demo."""
    _, _, text = (ROOT / "README.md").read_text().partition(BEFORE)
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "\n".join(found).replace(ADDRESS, demo.url)


def output_of(command: Sequence[str], folder: Path, settings: dict[str, str]) -> str:
    """Run a command in `folder` to its end, with status 0."""
    ran = subprocess.run(
        command,
        check=False,
        cwd=folder,
        env=environment({}) | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture
def checkout(demo: LiveServer, tmp_path: Path) -> Iterator[Path]:
    """A new directory with what the commands name: the bundled adapters, and the demo's data. What they make is removed."""
    (tmp_path / "platform").symlink_to(ROOT / "platform")
    (tmp_path / ".loraplex").symlink_to(demo.data_dir)
    command = tmp_path / "bin" / "loraplex"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{RUN}" "$@"\n')
    command.chmod(0o755)
    yield tmp_path
    remove(demo)


def remove(demo: LiveServer) -> None:
    """Delete what the commands make."""
    access = demo.access
    with plane(demo, "tenant", access.tenants[0].admin_key) as admin:
        deleted = ["adapters/captain/aliases/production", "adapters/captain"]
        for kind, name in (("webhooks", "url"), ("keys", "name")):
            listed = admin.get(kind).raise_for_status().json()["data"]
            made = [each for each in listed if each[name] in {"https://example.com/hooks", "app"}]
            deleted += [f"{kind}/{each['id']}" for each in made]
        for path in deleted:
            admin.delete(path).raise_for_status()
    with plane(demo, "operator", access.operator_key) as operator:
        listed = operator.get("tenants").raise_for_status().json()["data"]
        (studio,) = (each["id"] for each in listed if each["name"] == "studio")
        operator.delete(f"tenants/{studio}").raise_for_status()


def plane(demo: LiveServer, name: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"{demo.url}/{name}/v1/", headers={"Authorization": f"Bearer {key}"})


def with_command(folder: Path) -> dict[str, str]:
    """The path on which `loraplex` is found."""
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def test_every_command_runs_as_it_stands(demo: LiveServer, checkout: Path) -> None:
    output = output_of((*PASTED, blocks("bash", demo)), checkout, with_command(checkout))
    # curl ends with status 0 whatever is answered. One request is there to be refused.
    refused = re.findall(r'{"error":{"message":"([^"]*)', output)
    assert len(refused) == 1 and "tokens_per_day of the adapter is 10" in refused[0], refused
    assert "Rome" in output and '"state":"ready"' in output and "<!doctype html>" in output.lower()
    assert output.endswith("The recomputed invoice agrees in every digit.\n")


def test_the_python_programs_run_as_they_stand(demo: LiveServer, tmp_path: Path) -> None:
    program, settings = blocks("python", demo), {"KEY": demo.access.tenants[0].api_key}
    output = output_of((sys.executable, "-c", program), tmp_path, settings)
    assert "Rome" in output and re.search(r"name=.* country=.* sights=\[", output), output
