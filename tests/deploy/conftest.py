"""The wheel, built from what `deploy/Dockerfile` copies."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.dockerfile import stages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a folder that has the files of the image's first stage only."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for copied in (each.text.split() for each in stages()["wheel"][1] if each.name == "COPY"):
        *names, place = copied
        for name in names:
            _copy(ROOT / name, source / place / ("" if (ROOT / name).is_dir() else Path(name).name))
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), "-t"]
    for kind in ("sdist", "wheel"):
        subprocess.run([*command, kind], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = target.glob("*.whl")
    return built


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
