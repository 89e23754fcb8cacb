"""What the documents say about names is checked here: settings, commands, files, the test command and the constraints."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from loraplex.platform.cli.main import COMMANDS
from loraplex.platform.config import Settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SETTINGS_DOCUMENT = ROOT / "platform" / "README.md"
FOLDERS = ("adapters", "deploy", "engine", "grammar", "migrations", "platform", "tenants", "tests")
DOCUMENTS = [README, *(ROOT / folder / "README.md" for folder in FOLDERS)]
ALL_DOCUMENTS = [README, *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
SETTINGS_BEGIN, SETTINGS_END = "<!-- settings: checked -->", "<!-- settings: end -->"
FAULTS_BEGIN, FAULTS_END = "<!-- faults: checked -->", "<!-- faults: end -->"
SIZES = ((1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
NOT_FILES = ("loraplex.toml", "__init__.py")
TEXT_TYPES = (str, Path, SecretStr)


def settings_rows() -> list[tuple[str, str, str]]:
    """(name, allowed, default) of every setting, as `SETTINGS_DOCUMENT` lists them."""
    return [
        (f"`{name}`", allowed(name, field), shown(name, field.default))
        for name, field in Settings.model_fields.items()
    ]


def allowed(name: str, field: FieldInfo) -> str:
    """What a setting may be, from its type and bounds."""
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if get_origin(field.annotation) in (tuple, dict):
        return {
            "engine": "`ipc://` addresses, or `ray://APP`",
            "trusted_proxies": "networks",
            "oidc_allowed_domains": "domains",
            "allowed_origins": "origins",
            "tier_default_max_tokens": "`tier=tokens`",
        }[name]
    if all(isinstance(kind, str) for kind in kinds):
        return ", ".join(map(str, kinds))
    if kinds == [bool]:
        return "true, false"
    if kinds[0] in TEXT_TYPES:
        return {str: "text", Path: "path", SecretStr: "text, hidden"}[kinds[0]]
    bounds: dict[str, Any] = {}
    for constraint in field.metadata:
        for bound in ("ge", "gt", "le"):
            if hasattr(constraint, bound):
                bounds[bound] = getattr(constraint, bound)
    low = f"above {shown(name, bounds['gt'])}" if "gt" in bounds else shown(name, bounds["ge"])
    return f"{low} to {shown(name, bounds['le'])}"


def shown(name: str, value: Any) -> str:
    if value in (None, (), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes") and value:
        return next(f"{value // unit} {label}" for unit, label in SIZES if value % unit == 0)
    return f"{value:g}" if isinstance(value, float) else str(value)


def written_rows() -> list[tuple[str, ...]]:
    text = SETTINGS_DOCUMENT.read_text()
    table = text[text.index(SETTINGS_BEGIN) + len(SETTINGS_BEGIN) : text.index(SETTINGS_END)].strip()
    return [tuple(cell.strip() for cell in line.strip("|").split("|")[:3]) for line in table.splitlines()[2:]]


def test_the_settings_table_is_that_of_the_code() -> None:
    assert written_rows() == settings_rows()


def test_every_test_of_the_table_of_faults_exists() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text[text.index(FAULTS_BEGIN) : text.index(FAULTS_END)])
    assert named
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def test_every_command_of_the_readme_exists() -> None:
    called = {
        name for piece in code(README.read_text()) for name in re.findall(r"\bloraplex ([\w-]+)", piece)
    }
    assert called
    assert called <= set(COMMANDS)


def test_every_command_is_in_the_readme() -> None:
    text = README.read_text()
    for name in COMMANDS:
        assert f"loraplex {name}" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    for name in re.findall(r"`([\w./-]+\.(?:py|md|txt|toml|mako|jsonl))`", text):
        if name not in NOT_FILES:
            assert (document.parent / name).is_file() or (ROOT / name).is_file(), name
    for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)*/)`", text):
        assert (document.parent / name).is_dir() or (ROOT / name).is_dir(), name


@pytest.mark.parametrize("document", ALL_DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_any_document_names_exists(document: Path) -> None:
    folders = [folder for folder in document.parents if folder.is_relative_to(ROOT)]
    for name in re.findall(r"`((?:[\w.-]+/)+\w+\.py)`", document.read_text()):
        assert any((folder / name).is_file() for folder in folders), name


@pytest.mark.parametrize("document", ALL_DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_the_constraints_pin_every_dependency_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    pins = dict(line.lower().split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    for requirement in wanted:
        match = re.match(r"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)(?:,<([\d.]+))?", requirement)
        assert match is not None, requirement
        pin = pins.get(match[1].lower()) or pins[match[1].lower().replace("-", "_")]
        assert numbers(pin) >= numbers(match[2]), requirement
        assert match[3] is None or numbers(pin) < numbers(match[3]), requirement


def test_torch_is_pinned_without_a_local_suffix() -> None:
    pin = re.search(r"^torch==[\d.]+$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pin is not None
    assert f"uv pip install {pin[0]} --torch-backend=cpu" in README.read_text()


def test_continuous_integration_reads_the_test_command_from_the_readme() -> None:
    marked = README.read_text().split("\n<!-- test command -->\n\n```bash\n")
    assert len(marked) == 2
    assert "&& pytest -n 3" in marked[1].splitlines()[0]
    assert "/^<!-- test command -->$/" in (ROOT / ".ci" / "run").read_text()


def code(text: str) -> list[str]:
    """Blocks and spans of code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return blocks + re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
