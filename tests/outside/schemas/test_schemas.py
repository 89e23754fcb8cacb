"""Schemas as tools write them are read as their authors meant: no invalid document is let through, and valid ones are.

`jsonschema`, another implementation, judges the documents by the rewritten schema, and by the meant one where there is one.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import pydantic.v1
import pytest
from jsonschema import Draft202012Validator
from openai import pydantic_function_tool
from pydantic import BaseModel, Field
from pydantic_ai import Tool
from tests.grammar.grammar_walks import Walks
from tests.outside.schemas.slipped_schemas import document, slipped_schema

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.check import Case, Checker
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.json_schema.dialect import to_newest


@dataclass(frozen=True, slots=True)
class Recorded:
    """A schema as `tool` writes it, the keywords that are `read` in another form, and documents."""

    tool: str
    schema: Any
    enforcement: str
    read: list[str]
    valid: list[Any]
    invalid: list[Any]


RECORDED: Final = [
    Recorded(**json.loads(line))
    for line in (Path(__file__).parent / "recorded.jsonl").read_text("utf-8").splitlines()
]


class Older(pydantic.v1.BaseModel):
    number: float = pydantic.v1.Field(gt=0, lt=10)
    pair: tuple[str, int]
    kind: Literal["a", "\x7f"]
    maybe: str | None = None


class Newer(BaseModel):
    number: float = Field(gt=0, lt=10)
    pair: tuple[str, int]
    kind: Literal["a", "\x7f"]
    maybe: str | None = None


def search(number: int, pair: tuple[str, int], kind: Literal["a", "\x7f"] = "a") -> str:
    """Search."""
    return f"{number} {pair} {kind}"


MADE: Final[dict[str, tuple[Callable[[], Any], list[str]]]] = {
    "pydantic 1": (Older.schema, ["items"]),
    "pydantic 2": (Newer.model_json_schema, []),
    "pydantic 2, serialization": (lambda: Newer.model_json_schema(mode="serialization"), []),
    "openai": (lambda: pydantic_function_tool(Newer)["function"].get("parameters"), []),
    "pydantic-ai": (lambda: Tool(search).tool_def.parameters_json_schema, []),
}


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker(byte_vocabulary())


@pytest.fixture(scope="module")
def walks() -> Walks:
    return Walks(byte_vocabulary())


def check(checker: Checker, recorded: Recorded) -> None:
    slips: set[str] = set()
    judge = Draft202012Validator(to_newest(recorded.schema, param="schema", slips=slips))
    assert sorted(slips) == recorded.read
    documents = [*recorded.valid, *recorded.invalid]
    expected = [True] * len(recorded.valid) + [False] * len(recorded.invalid)
    assert [judge.is_valid(each) for each in documents] == expected
    texts = (json.dumps(each, ensure_ascii=False).replace("\x7f", "\\u007f") for each in documents)
    report = checker.check(Case(recorded.schema, tuple(texts)))
    assert report.enforcement == recorded.enforcement, report.reason
    assert list(report.accepted) == expected


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each.tool)
def test_recorded(checker: Checker, recorded: Recorded) -> None:
    check(checker, recorded)


@pytest.mark.parametrize("tool", MADE)
def test_made_by_the_installed_tool(checker: Checker, tool: str) -> None:
    make, read = MADE[tool]
    schema = make()
    fine: dict[str, Any] = {"number": 1, "pair": ["a", 2], "kind": "\x7f"}
    fine |= {"maybe": None} if "maybe" in schema.get("required", ()) else {}
    faults: list[dict[str, Any]] = [
        {"number": "1"},
        {"pair": ["a"]},
        {"pair": ["a", 2, 3]},
        {"pair": [2, "a"]},
        {"kind": "b"},
        {"kind": "\x7e"},
    ]
    valid, invalid = [fine, {**fine, "kind": "a"}], [{**fine, **fault} for fault in faults]
    # A control character beside undeclared names, which could be spelled as declared ones.
    enforcement = "full" if schema.get("additionalProperties") is False else "validated"
    check(checker, Recorded(tool, schema, enforcement, read, valid, invalid))


def check_slipped(checker: Checker, walks: Walks, seed: int) -> Counter[str]:
    """Check one schema with documents of the test, and with texts that its grammar writes."""
    source = Random(seed)
    written, meant = slipped_schema(source)
    texts = tuple(document(source, meant) for _ in range(24))
    report = checker.check(Case(written, texts))
    counts = Counter[str]({report.enforcement: 1})
    judges = [Draft202012Validator(each) for each in (meant, to_newest(written, param="schema"))]
    if report.enforcement == "refused":
        # Contradictory parts: no document of the test may be valid either.
        assert not any(judges[0].is_valid(json.loads(text)) for text in texts), (seed, report.reason)
        return counts
    accepted = dict(zip(texts, report.accepted, strict=True))
    if report.enforcement == "full":
        plan = plan_enforcement(written, strict=True, param="schema", limits=SchemaLimits())
        accepted |= dict.fromkeys(walks.texts(walks.start(plan.schema, "llguidance"), 4, seed), True)
    for text, is_accepted in accepted.items():
        verdicts = {judge.is_valid(json.loads(text)) for judge in judges}
        assert len(verdicts) == 1, (seed, text)
        is_valid = verdicts.pop()
        assert is_valid or not is_accepted, f"seed {seed}: {text} under {json.dumps(written)}"
        counts["valid" if is_valid else "invalid"] += 1
        counts["accepted"] += is_accepted
    return counts


def check_seeds(checker: Checker, walks: Walks, seeds: range) -> Counter[str]:
    return sum((check_slipped(checker, walks, seed) for seed in seeds), Counter[str]())


def test_schemas_with_slips_and_control_characters(checker: Checker, walks: Walks) -> None:
    counts = check_seeds(checker, walks, range(50))
    assert counts["refused"] < 10 and counts["invalid"] > 200 and counts["accepted"] > 150, counts


@pytest.mark.long
def test_500_schemas_with_slips_and_control_characters(checker: Checker, walks: Walks) -> None:
    counts = check_seeds(checker, walks, range(500))
    assert counts["refused"] < 50 and counts["invalid"] > 2_000 and counts["accepted"] > 1_500, counts
