"""The two packaging facts that break silently: `platform/` stays a namespace portion, and the links match the folders."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"adapters", "engine", "grammar", "migrations", "platform", "tenants"}


def test_platform_has_no_init() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_standard_library_platform_wins_at_the_root() -> None:
    command = [sys.executable, "-c", "import platform; print(platform.system())"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip()


def test_links_match_the_folders() -> None:
    links = {
        link.name: link.readlink() for link in (ROOT / ".src" / "loraplex").iterdir() if link.is_symlink()
    }
    assert links == {name: Path("../..") / name for name in PACKAGES}
