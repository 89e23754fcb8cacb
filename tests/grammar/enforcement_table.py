"""The table of `schema_enforcement.md`: what `loraplex grammar check` says of the JSON Schema Test Suite.

Written again by `python -m tests.grammar.enforcement_table`, in the root of the repository.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from loraplex.platform.cli import grammar

SUITE = Path(__file__).with_name("json_schema_test_suite") / "draft2020-12"
TABLE = Path(__file__).with_name("schema_enforcement.md")
COLUMNS = ("tests", "right", "let through", "valid refused", "schema refused")


@dataclass(frozen=True, slots=True)
class Group:
    """A schema of the suite with its tests."""

    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]


def groups() -> Iterator[Group]:
    """In the order of the files' names."""
    for path in sorted(SUITE.glob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            yield Group(path.stem, group["description"], group["schema"], group["tests"])


def check_line(group: Group) -> str:
    """What the command reads: documents are compact, their keys in the order of the test."""
    documents = [json.dumps(test["data"], ensure_ascii=False, separators=(",", ":")) for test in group.tests]
    return json.dumps({"schema": group.schema, "documents": documents})


def verdicts(folder: Path) -> list[tuple[Group, dict[str, Any]]]:
    """Each group with the command's line for it."""
    listed = list(groups())
    jsonl = folder / "suite.jsonl"
    jsonl.write_text("\n".join(map(check_line, listed)), "utf-8")
    result = CliRunner().invoke(grammar.app, ["check", "--jsonl", str(jsonl)])
    if result.exit_code != 0:
        raise RuntimeError(result.output)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return list(zip(listed, lines, strict=True))


def outcomes(group: Group, verdict: dict[str, Any]) -> Counter[str]:
    """How many of the group's tests fall into each column."""
    counts = Counter(tests=len(group.tests))
    if verdict["enforcement"] == "refused":
        counts["schema refused"] += len(group.tests)
        return counts
    for test, accepted in zip(group.tests, verdict["accepted"], strict=True):
        if accepted == test["valid"]:
            counts["right"] += 1
        else:
            counts["let through" if accepted else "valid refused"] += 1
    return counts


def totals(found: list[tuple[Group, dict[str, Any]]]) -> Counter[str]:
    """Over all files."""
    return sum((outcomes(*each) for each in found), Counter[str]())


def render(found: list[tuple[Group, dict[str, Any]]]) -> str:
    """The whole text of `schema_enforcement.md`."""
    per_file: dict[str, Counter[str]] = {}
    held: dict[str, Counter[str]] = {}
    for group, verdict in found:
        per_file.setdefault(group.file, Counter()).update(outcomes(group, verdict))
        held.setdefault(group.file, Counter())[verdict["enforcement"]] += 1
    kinds = ("full", "validated", "refused")
    lines = [
        "# How the JSON Schema Test Suite is enforced",
        "",
        "Made by `loraplex grammar check` from `json_schema_test_suite/`, written by `python -m tests.grammar.enforcement_table`,",
        "held equal by `test_check.py`. Each test is a document; `full`, `validated` and `refused` count schemas.",
        "",
        f"| file | {' | '.join(COLUMNS)} | {' | '.join(kinds)} |",
        "|---|" + "---:|" * (len(COLUMNS) + len(kinds)),
    ]
    for file, counts in per_file.items():
        cells = [str(counts[column]) for column in COLUMNS] + [str(held[file][kind]) for kind in kinds]
        lines.append(f"| {file} | {' | '.join(cells)} |")
    both, schemas = totals(found), sum(held.values(), Counter[str]())
    cells = [str(both[column]) for column in COLUMNS] + [str(schemas[kind]) for kind in kinds]
    lines += [f"| **all** | {' | '.join(cells)} |", "", *_explained(found)]
    return "\n".join(lines) + "\n"


def _explained(found: list[tuple[Group, dict[str, Any]]]) -> Iterator[str]:
    yield "Valid documents that are refused, since the grammar writes one spelling or one order of properties:"
    yield ""
    for group, verdict in found:
        for test, accepted in zip(group.tests, verdict["accepted"], strict=True):
            if verdict["enforcement"] != "refused" and test["valid"] and not accepted:
                yield f"- {group.file}: {group.description}: {test['description']}"
    yield ""
    yield "Schemas that are refused: no document satisfies them, they refer outside of themselves, or name an unknown dialect:"
    yield ""
    for group, verdict in found:
        if verdict["enforcement"] == "refused":
            yield f"- {group.file}: {group.description}"


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        TABLE.write_text(render(verdicts(Path(folder))), "utf-8")
