"""S1, S4 and S10: product code neither unpickles nor evaluates anything, and none of its guards is an `assert`.

Invariant: the linter's configuration refuses each construct below, so no such line reaches the product unseen.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = ("adapters", "engine", "grammar", "migrations", "platform", "tenants")
REFUSED: Final = {
    "import pickle": "TID251",
    "import cloudpickle": "TID251",
    "import dill": "TID251",
    "import jsonpickle": "TID251",
    "import joblib": "TID251",
    "import marshal": "TID251",
    "import shelve": "TID251",
    "from pickle import loads": "TID251",
    "torch.load('weights.bin')": "TID251",
    "yaml.load('!!python/object/apply:os.system [id]')": "S506",
    "eval('1')": "S307",
    "exec('1')": "S102",
    "subprocess.run('id', shell=True)": "S602",
    "os.system('id')": "S605",
    "assert request.is_allowed": "S101",
    "hashlib.md5(b'')": "S324",
    "httpx.get('https://example.com', verify=False)": "S501",
    "tarfile.open('adapter.tar').extractall('.')": "S202",
    "jinja2.Environment(autoescape=False)": "S701",
}
HEAD: Final = "import hashlib, os, subprocess, tarfile\nimport httpx, jinja2, torch, yaml\n"
MAKES_CODE: Final = {"compile", "__import__", "eval", "exec", "breakpoint"}


def product_files() -> list[Path]:
    return [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("folder", PRODUCT)
def test_s01_the_linter_refuses_what_runs_bytes(folder: str) -> None:
    command = (sys.executable, "-m", "ruff", "check", "--output-format", "json", "--no-cache")
    name = ("--stdin-filename", f"{folder}/example.py", "-")
    source = HEAD + "\n".join(REFUSED)
    ended = subprocess.run(
        (*command, *name), input=source, check=False, capture_output=True, text=True, cwd=ROOT
    )
    found = {(each["location"]["row"], each["code"]) for each in json.loads(ended.stdout)}
    first = HEAD.count("\n") + 1
    missing = [line for row, line in enumerate(REFUSED, first) if (row, REFUSED[line]) not in found]
    assert missing == []


def test_s10_no_call_makes_code_of_a_text() -> None:
    """The linter does not see `compile` and `__import__` without their module."""
    files = product_files()
    assert len(files) > 500
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKES_CODE
    ]
    assert calls == []


def test_s04_no_rule_is_silenced_in_the_product() -> None:
    """A `noqa` of these rules would be a decision: it is made in pyproject.toml, or not at all."""
    silenced = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in product_files()
        for line in path.read_text().splitlines()
        if "noqa" in line and any(code in line for code in {*REFUSED.values(), "noqa:S", "noqa: S"})
    ]
    assert silenced == []
