"""What the documents say about names is checked here: settings, commands, files, classes, the test command, constraints.

A sentence that an edit cut in two, or put into another one, is found as well, where its marks are plain.
"""

import importlib
import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from loraplex.platform.cli.main import COMMANDS
from loraplex.platform.config import Settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FOLDERS = ("adapters", "deploy", "engine", "grammar", "migrations", "platform", "tenants", "tests")
DOCUMENTS = [README, *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
FAULTS_BEGIN, FAULTS_END = "<!-- faults: checked -->", "<!-- faults: end -->"
ELSEWHERE = (
    *("loraplex.toml", "compose/secrets/loraplex.toml", "journal/", "digests.txt"),  # of an installation
    *("FREEZE.txt", "gpu.jsonl", "DIR/gpu.jsonl", "../results/gpu-TIME.jsonl"),  # of a run on a card
    *("tenants/notes/", "platform/web/notes/"),  # of an example
)
"""Files and folders that a document names and the repository does not have."""
EACH_FOLDER = ("__init__.py", "conftest.py")
EACH_ROOM = ("tables.py", "records.py", "queries.py", "rows.py", "use_cases.py", "routes.py", "pages.py")
FOREIGN = {"InferencePool", "bmm", "DecodeStream", "stripe_customer_id"}
"""Names of other programs, which no file of the repository has."""
SOURCES = (".py", ".lua", ".toml", ".yaml", ".yml", ".html", ".mako", ".conf", ".service")
BEGINNINGS = "The|It|This|These|They|An|If|When|Where|Each|Every|So|But|In|Its|What|Who"


def test_the_page_of_settings_is_written_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    build = importlib.import_module("deploy.guide.build_settings")
    assert build.PAGE.read_text() == build.page(), "run python -m deploy.guide.build_settings"
    assert set(build.NOTES) <= set(Settings.model_fields)


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
def test_every_file_and_folder_a_document_names_exists(document: Path) -> None:
    """Paths begin at the root, at the document's folder, or, in the operator's guide, at `deploy`."""
    begins = {ROOT, document.parent, *(each for each in document.parents if each.name == "deploy")}
    begins |= {ROOT / "deploy" / "kubernetes"} if document.name == "kubernetes.md" else set()
    for name in re.findall(r"`([\w./-]+(?:\.(?:py|lua|md|txt|toml|mako|jsonl)|/))`", document.read_text()):
        if name not in (*ELSEWHERE, *EACH_FOLDER, *EACH_ROOM) and not name.startswith("/"):
            assert any((begin / name).exists() for begin in begins), name


def test_every_class_member_and_setting_that_a_document_names_exists() -> None:
    """`CamelCase`, `module.name` and `a_name`, word by word: each is in a file of the product or its tests."""
    known = set(FOREIGN)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SOURCES:
                known |= set(re.findall(r"\w+", path.read_text()))
    for document in DOCUMENTS:
        for name in re.findall(r"`([a-zA-Z_]\w*(?:\.[a-zA-Z_]\w*)*)`", prose(document)):
            file = re.search(r"\.(?:py|lua|md|txt|toml|jsonl?|html)$", name)
            metric = name.startswith("loraplex_")  # put together where they are rendered
            if not (file or metric) and re.fullmatch(r"\w+\.[\w.]+|[A-Z][a-z]+[A-Z]\w*|[a-z]\w*_\w*", name):
                assert known.issuperset(name.split(".")), f"{document.relative_to(ROOT)}: {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_is_cut_or_spliced(document: Path) -> None:
    found = list(splices(prose(document)))
    assert not found, found


@pytest.mark.parametrize(
    "text",
    [
        "Servers run with a user of their own,\n\npasswords and sockets.",
        "The id is a HMAC (of the tenant, `a.py`: access log \N{MIDDLE DOT} `b.py`).",
        "The client waits for its first event The server answers.",
        "- One (two.\n- Three.",
        "A `name without an end.",
    ],
)
def test_a_cut_or_spliced_sentence_is_found(text: str) -> None:
    assert list(splices(text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_section(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        path, _, section = target.partition("#")
        if "://" not in target:
            file = document.parent / path if path else document
            assert file.exists(), target
            assert not section or section in sections(file), target


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


def prose(document: Path) -> str:
    """The text of a document without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def sections(document: Path) -> set[str]:
    """The names by which links lead to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def splices(text: str) -> Iterator[str]:
    """Yield the beginnings of what no author writes: in tables, lists and paragraphs."""
    pieces = [each.strip() for each in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )|\n(?=\|)", text)]
    for piece in pieces:
        words = re.sub(r"`[^`]*`", "`", piece)
        whole = all(words.count(opened) == words.count(closed) for opened, closed in ("()", "[]"))
        fragment = not piece.startswith("|") and " \N{MIDDLE DOT} " in piece
        begun = not piece.startswith("#") and re.search(rf"[a-z,]\s+(?:{BEGINNINGS})\s", words)
        if piece.count("`") % 2 or not whole or fragment or begun:
            yield piece[:100]
    for before, after in pairwise(re.split(r"\n\s*\n", text)):
        unended = not re.match(r"[|#<!]| *(?:[-*]|\d+\.) ", before) and re.search(r"[a-z,]$", before)
        if unended and after[:1].islower():
            yield f"{before[-50:]} / {after[:50]}"


def code(text: str) -> list[str]:
    """Blocks and spans of code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return blocks + re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
