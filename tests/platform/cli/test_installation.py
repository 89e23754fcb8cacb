"""A command on a data directory without an installation says so and makes nothing. Every command of the tree is asked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner, Result

from loraplex.platform.cli import tenant
from loraplex.platform.cli.main import main

MAKE_ONE: Final = {"serve", "migrate", "restore"}
BEFORE_THERE_IS_ONE: Final = {"doctor"}
"""Asked on purpose where there is none; `test_doctor.py` checks that nothing is made."""
NO_INSTALLATION: Final = (1, "no installation there")
# `plan` is about a model, `tour` about the demo. Exit code 1 of a drill means a broken promise.
OTHERS: Final = {
    "decision": (1, "no server runs on the data directory"),
    "engine": (1, "no server runs on the data directory"),
    "plan": (1, "base_model.json is missing"),
    "drill": (2, "no installation there"),
    "tour": (1, "no demo in"),
    "chat": (2, "has no demo.json, so give --key"),
    "logs": (1, "`loraplex serve` writes it"),
}
VALUES: Final = {
    "name": "acme",
    "tenant": "acme",
    "email": "ada@example.com",
    "month": "2026-01",
    "currency": "USD",
    "invoice_id": str(uuid4()),
    "examples": __file__,
}
"""Of required parameters, by name; others are 1."""
OPTIONS: Final = {
    "user create": ["--operator"],
    **{f"key {name}": ["--operator"] for name in ("create", "list", "rotate", "revoke")},
    "tenant delete": ["--yes"],
    "adapter alias": ["1"],
    "decision calibrate": ["--adapter", "acme@1"],
}
"""Needed beside the required parameters."""


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below one, with its name as typed."""
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    context: Any = None
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), *path, name)


ROOT: Final = get_command(main)
ON_A_DATA_DIRECTORY: Final = {
    " ".join(path): command
    for path, command in commands(ROOT)
    if path[0] not in MAKE_ONE | BEFORE_THERE_IS_ONE
    and any(each.name == "data_dir" for each in command.params)
}


def run(name: str, data_dir: Path, given: Path) -> Result:
    """Run a command with what it requires. `given`: a folder for its arguments that are one."""
    arguments = [*name.split()]
    for each in ON_A_DATA_DIRECTORY[name].params:
        if each.required:
            value = str(given) if each.name == "folder" else VALUES.get(each.name, "1")
            arguments += [value] if each.param_type_name == "argument" else [each.opts[0], value]
    return CliRunner().invoke(main, [*arguments, *OPTIONS.get(name, ()), "--data-dir", str(data_dir)])


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working directory too."""
    for variable in ("DATABASE_URL", "REDIS_URL", "LORAPLEX_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "given"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_the_tree_is_walked() -> None:
    assert isinstance(ROOT, TyperGroup) and len(ON_A_DATA_DIRECTORY) > 40
    assert {"backup", "usage reconcile", "drill disk-full"} <= ON_A_DATA_DIRECTORY.keys()


@pytest.mark.parametrize("name", ON_A_DATA_DIRECTORY)
def test_without_an_installation_a_command_says_so_and_makes_nothing(name: str, given: Path) -> None:
    code, words = OTHERS.get(name.split()[0], NO_INSTALLATION)
    for wrong in (given.parent / "wrong", given):
        result = run(name, wrong, given)
        output = " ".join(result.output.split())
        assert result.exit_code == code, (wrong, result.output, result.exception)
        assert words in output and str(wrong) in output
        assert sorted(given.parent.rglob("*")) == [given]


def test_with_a_database_of_its_own_a_command_makes_no_folder_either(
    given: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("LORAPLEX_PUBLIC_URL", "https://llm.example.com")
    monkeypatch.setitem(VALUES, "tenant", "bolt")
    assert CliRunner().invoke(tenant.app, ("create", "bolt")).exit_code == 0
    refused = set()
    for name in ON_A_DATA_DIRECTORY:
        result = run(name, given.parent / "wrong", given)
        if NO_INSTALLATION[1] in result.output:
            refused.add(name)
        else:
            assert not isinstance(result.exception, OSError), (name, result.output)
        assert sorted(given.parent.rglob("*")) == [given], (name, result.output)
    # The files beside the database: adapters, journals, what a fault is made in.
    drills = {name for name in ON_A_DATA_DIRECTORY if name.startswith("drill ")}
    assert refused == {"adapter push", "adapter delete", "backup"} | drills
