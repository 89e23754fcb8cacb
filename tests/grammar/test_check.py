"""The proof of the planner: over the whole suite nothing invalid is accepted, and the committed table says so."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.grammar.enforcement_table import TABLE, Group, render, totals, verdicts

from loraplex.grammar.backends.vocabulary import Vocabulary, byte_vocabulary
from loraplex.grammar.check import BadLine, Case, Checker, read_cases


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Group, dict[str, Any]]]:
    return verdicts(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker(byte_vocabulary())


def test_nothing_invalid_is_let_through(found: list[tuple[Group, dict[str, Any]]]) -> None:
    counts = totals(found)
    assert counts["tests"] == 629
    assert counts["let through"] == 0
    assert counts["right"] >= 557


def test_the_committed_table_is_what_the_command_says(found: list[tuple[Group, dict[str, Any]]]) -> None:
    assert render(found) == TABLE.read_text("utf-8")


def test_another_vocabulary_decides_the_same(vocabulary: Vocabulary) -> None:
    case = Case(
        {"type": "object", "properties": {"city": {"type": "string", "maxLength": 3}}},
        ('{"city":"Par"}', '{"city":"Paris"}', '{"city":"<|stop|>"}', '{"city":"<|e"}', '{"city":"\ud800"}'),
    )
    accepted = (True, False, False, True, False)
    for known in (vocabulary, byte_vocabulary()):
        assert Checker(known).check(case).accepted == accepted


def test_blanks_and_other_spellings(checker: Checker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    texts = ('{"a":1}', '{ "a" : 1 }', '{"a":1} ', ' {"a":1}', '{"\\u0061":1}', '{"a":1', '{"a":1,"a":1}', "")
    assert checker.check(Case(schema, texts)).accepted == (True, True, *[False] * 6)


def test_the_validator_decides_last(checker: Checker) -> None:
    verdict = checker.check(Case({"type": "array", "uniqueItems": True}, ("[1,2]", "[1,1.0]", "[1")))
    assert (verdict.enforcement, verdict.backend) == ("validated", "llguidance")
    assert verdict.accepted == (True, False, False)


def test_refusals_are_results(checker: Checker) -> None:
    strict = checker.check(Case({"properties": {"a": {"uniqueItems": True}}}, ("{}",)), strict=True)
    assert (strict.enforcement, strict.backend, strict.refused_at) == (
        "refused",
        "none",
        "/properties/a/uniqueItems",
    )
    assert strict.accepted == (False,) and "uniqueItems" in (strict.reason or "")
    # Two patterns without a common text: only the backend finds that out.
    empty = checker.check(Case({"type": "string", "pattern": "^a$", "minLength": 2}, ('"a"',)))
    assert empty.enforcement == "refused" and empty.accepted == (False,)


def test_the_line_of_the_contract(checker: Checker) -> None:
    line = checker.check(Case(True, ("1",))).as_line()
    assert list(line) == ["enforcement", "backend", "refused_at", "compile_ms", "accepted"]
    assert line["compile_ms"] > 0 and json.loads(json.dumps(line))["accepted"] == [True]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("[]", "line 2: must be"),
        ('{"schema": {}}', "line 2: must be"),
        ('{"schema": [], "documents": []}', "line 2: schema must be"),
        ('{"schema": {}, "documents": [1]}', "line 2: documents must be"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str) -> None:
    with pytest.raises(BadLine, match=message):
        list(read_cases(['{"schema": {}, "documents": []}', line]))


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    assert list(read_cases(["\n", '{"schema": true, "documents": ["1"]}\n', ""])) == [Case(True, ("1",))]


@pytest.mark.parametrize(
    ("schema", "refused_at", "reason"),
    [
        ({"allOf": [{"$ref": "#/x/y"}], "x": {"y": {"pattern": 5}}}, "/x/y/pattern", "not a JSON schema"),
        ({"minimum": 10**3_000}, "/minimum", "more than 8192 bits"),
        ({"$dynamicRef": "#none"}, "/$dynamicRef", "refers to no single subschema"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, "/$ref", "refers to no single subschema"),
        (
            {"anyOf": [{"$ref": "#"}, {"minLength": 1, "maxLength": 5, "format": "ipv4", "type": "string"}]},
            "",
            "no text",
        ),
        ({"$id": "mailto:x", "$defs": {"a": {"$id": "b"}}, "uniqueItems": True}, "", "Failed to resolve 'b'"),
    ],
)
def test_what_an_analysis_or_a_registry_does_not_bear(
    checker: Checker, schema: Any, refused_at: str, reason: str
) -> None:
    report = checker.check(Case(schema, ("1", "[]")))
    assert (report.enforcement, report.backend, report.refused_at) == ("refused", "none", refused_at)
    assert reason in (report.reason or "") and report.accepted == (False, False)


def test_a_grammar_that_fails_only_while_a_document_is_read(checker: Checker) -> None:
    schema = {"type": "string", "pattern": "^.*a.{2000}$"}
    assert checker.check(Case(schema, ('"abc"',))).enforcement == "full"
    report = checker.check(Case(schema, ('"abc"', json.dumps("abc" * 1_000))))
    assert (report.enforcement, report.refused_at, report.accepted) == ("refused", "", (False, False))
    assert "lexer error" in (report.reason or "") and not report.is_unexpected


def test_an_unexpected_error_is_a_refusal_too(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("inside a library")

    monkeypatch.setattr(checker, "_accepts", fail)
    report = checker.check(Case(True, ("1",)))
    assert report.is_unexpected and report.refused_at == "" and "KeyError" in (report.reason or "")
    monkeypatch.setattr("loraplex.grammar.enforcement.planner.recursive_groups", fail)
    report = checker.check(Case(True, ()))
    assert report.is_unexpected and "KeyError" in (report.reason or "")


def test_a_number_that_python_does_not_read_is_in_a_schema_not_in_the_line(checker: Checker) -> None:
    [case] = read_cases(['{"schema": {"minimum": ' + "1" * 5_000 + '}, "documents": []}'])
    assert checker.check(case).refused_at == "/minimum"


DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": DRAFT_7, "definitions": {"a": {"$id": "#a", "type": "null"}}, "items": {"$ref": "#a"}},
        {"$schema": DRAFT_7, "$id": "http://e.test/a.json#", "items": {"$id": "#/items", "type": "null"}},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "#",
            "items": {"id": "#b", "type": "null"},
        },
        {
            "$schema": "https://json-schema.org/draft-07/schema",
            "$id": "http://e.test/#a",
            "items": {"type": "null"},
        },
        {"$schema": "http://json-schema.org/schema#", "items": {"type": "null"}},
        {"$id": "#", "items": {"$id": "#a", "type": "null"}},
    ],
)
def test_harmless_fragments_are_accepted(checker: Checker, schema: Any) -> None:
    report = checker.check(Case(schema, ("[null]", "[1]")))
    assert (report.enforcement, report.accepted) == ("full", (True, False))
