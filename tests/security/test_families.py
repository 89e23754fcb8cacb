"""The table of families is complete and names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
README: Final = Path(__file__).parent / "README.md"
FAMILIES: Final = [f"S{number}" for number in range(1, 21)]


def rows() -> dict[str, list[str]]:
    """Family -> its tests."""
    text = README.read_text()
    table = text[text.index("<!-- families: checked -->") : text.index("<!-- families: end -->")]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| S")]
    return {cells[0].split()[0]: re.findall(r"`(tests/[\w/.]+::\w+)`", cells[2]) for cells in lines}


@cache
def functions_of(path: Path) -> set[str]:
    """The names of the functions of a file, those of classes too."""
    tree = ast.parse(path.read_text())
    return {each.name for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_family_has_a_test_that_exists() -> None:
    found = rows()
    assert list(found) == FAMILIES
    assert [family for family, tests in found.items() if not tests] == []
    named = [(family, *test.split("::")) for family, tests in found.items() for test in tests]
    missing = [
        (family, path, name)
        for family, path, name in named
        if not (ROOT / path).is_file() or name not in functions_of(ROOT / path)
    ]
    assert missing == []
