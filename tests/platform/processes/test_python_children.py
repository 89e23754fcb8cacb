"""No Python process that loraplex starts imports modules from the working directory."""

import ast
import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.platform.engines.process import MODULE
from loraplex.platform.processes.child_process import module_command, python_command, spawn_child
from loraplex.platform.processes.environment import engine_environment, foreign_environment

ROOT = Path(__file__).parents[3]
PACKAGES = ("adapters", "engine", "grammar", "migrations", "platform", "tenants")
COMMANDS = Path("platform/processes/child_process.py")
# The interpreter's option -I implies -P.
ISOLATED = Path("platform/datastores/embedded/child.py")


def sources(*words: str) -> Iterator[tuple[Path, ast.Module]]:
    """The product's files that have one of the words."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            text = file.read_text()
            if any(word in text for word in words):
                yield file.relative_to(ROOT), ast.parse(text)


def interpreters(tree: ast.Module) -> list[str]:
    """What follows each `sys.executable` of a command; those in texts are no commands."""
    texts = {node for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for node in ast.walk(text)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List):
            names = [ast.unparse(each) for each in node.elts]
            found += [names[i + 1] for i, name in enumerate(names) if name == "sys.executable"]
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) == "sys.executable"]
    assert len(found) == len([node for node in used if node not in texts])
    return found


def test_one_function_makes_the_command_of_every_python_child() -> None:
    found = {file: options for file, tree in sources("executable") if (options := interpreters(tree))}
    assert found == {COMMANDS: ["'-P'"], ISOLATED: ["'-I'"]}
    constants = {
        file
        for file, tree in sources('"-m"', "multiprocessing")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ("-m", "multiprocessing")
    }
    assert constants == {COMMANDS}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a module that leaves a trace when it is imported."""
    (tmp_path / "msgspec.py").write_text("open('trace', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", [None, "", os.pathsep, f".{os.pathsep}sub"])
async def test_children_and_grandchildren_import_nothing_from_the_working_directory(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    if path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", path)
    (hostile / "sub").mkdir()
    (hostile / "sub" / "msgspec.py").write_text("open('trace', 'w').close()\n")
    for environment in (foreign_environment(), engine_environment()):
        child = await spawn_child("json.tool", environment=environment)
        program = (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import msgspec'], check=True)"
        )
        grandchild = await asyncio.create_subprocess_exec(*python_command("-c", program), env=environment)
        assert await grandchild.wait() == 0
        child.kill()
        await child.wait()
    assert not (hostile / "trace").exists()


def test_absolute_folders_of_the_operator_stay_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("", "/opt/site", ".", "src", "/srv/lib")))
    assert foreign_environment()["PYTHONPATH"] == os.pathsep.join(("/opt/site", "/srv/lib"))
    monkeypatch.setenv("PYTHONPATH", ".")
    assert "PYTHONPATH" not in foreign_environment()


def test_a_signal_ends_an_engine_process_at_once_while_it_starts() -> None:
    engine = subprocess.Popen(module_command(MODULE), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == -signal.SIGTERM
    finally:
        engine.kill()
        engine.wait()
