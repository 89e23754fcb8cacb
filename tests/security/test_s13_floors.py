"""S7, S9 and S13: no release with a published flaw is installed of what parses forms, requests, templates and grammars."""

import tomllib
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"
FLAWED: Final = {"jinja2": "3.1.5", "python-multipart": "0.0.26", "starlette": "0.49.0", "xgrammar": "0.1.31"}
"""The last release with a flaw: CVE-2025-27516, CVE-2026-42561, CVE-2025-62727, CVE-2026-25048."""


@pytest.mark.parametrize("name", FLAWED)
def test_s13_no_flawed_release_is_allowed(name: str) -> None:
    requirements = map(Requirement, tomllib.loads(PROJECT.read_text())["project"]["dependencies"])
    (specifier,) = (each.specifier for each in requirements if each.name == name)
    assert not specifier.contains(FLAWED[name])
