"""How large what travels is: files of git and of carried folders, each once."""

import subprocess
from pathlib import Path

from tests.benchmarks.gpu.travel import MIB, sizes, verdict


def test_what_travels_is_measured(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    for name, size in (
        *(("engine/a.py", 100), ("tests/b.bin", 3 * MIB), ("README.md", 10)),
        *((".gitignore", 7), ("ignored/cache", 50 * MIB), ("new.py", 5), ("wheels/x.whl", 2 * MIB)),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(bytes(size))
    (root / ".gitignore").write_text("ignored")
    (root / "link").symlink_to(root / "ignored/cache")
    for command in (["init", "-q"], ["add", "engine", "tests"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    tree = {"engine": 100, "tests": 3 * MIB, "README.md": 10, ".gitignore": 7, "new.py": 5}
    assert sizes(root, []) == tree | {"wheels": 2 * MIB}
    parts = sizes(root, [root / "wheels", tmp_path / "tree" / "ignored"])
    assert parts.total() == sum(tree.values()) + 52 * MIB
    assert verdict(parts, 64) == (True, "55.0 MiB travel, of 64")
    may_travel, text = verdict(parts, 8)
    assert not may_travel and text.startswith("55.0 MiB would travel, at most 8 may; the largest parts: ")
    assert "ignored 50.0, tests 3.0, " in text
