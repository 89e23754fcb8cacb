"""No schema ends `grammar check` or gets through unchecked: each is enforced, validated or refused with place and reason."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any, Final

import jsonschema_rs
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from tests.grammar.grammar_walks import Walks
from tests.grammar.hostile_schemas import hostile_case, wrong_types

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.check import Case, Checker, SchemaReport
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import (
    AnalysisFailed,
    GrammarInvalid,
    GrammarRefused,
    MatcherFailed,
    SchemaNotSatisfied,
)
from loraplex.grammar.json_schema.dialect import to_newest
from loraplex.grammar.json_schema.references import ROOT
from loraplex.grammar.json_schema.validator import parse_value

SEEDS: Final = st.integers(0, 2**64 - 1)
ORACLES: Final = {
    "draft-04": jsonschema_rs.Draft4Validator,
    "draft-06": jsonschema_rs.Draft6Validator,
    "draft-07": jsonschema_rs.Draft7Validator,
    "2019-09": jsonschema_rs.Draft201909Validator,
}


@dataclass
class Run:
    """Checks schemas and counts what they came to; `slowest_s` is the longest check."""

    checker: Checker
    walks: Walks
    enforcements: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    slowest_s: float = 0.0

    def check(self, seed: int) -> None:
        """Check one schema with documents of the test, and with documents that its grammar writes."""
        note(f"seed {seed}")
        case = hostile_case(Random(seed))
        report = self._checked(case)
        self.enforcements[report.enforcement] += 1
        if report.enforcement != "refused":
            self._checked(Case(case.schema, self._written(case.schema, report, seed)))
            check_report(case, self.checker.check(case, strict=True))

    def _checked(self, case: Case) -> SchemaReport:
        began = perf_counter()
        report = self.checker.check(case)
        self.slowest_s = max(self.slowest_s, perf_counter() - began)
        self.accepted += sum(report.accepted)
        check_report(case, report)
        return report

    def _written(self, schema: Any, report: SchemaReport, seed: int) -> tuple[str, ...]:
        assert report.backend != "none"
        plan = plan_enforcement(schema, strict=False, param="schema", limits=SchemaLimits())
        try:
            return tuple(self.walks.texts(self.walks.start(plan.schema, report.backend), 3, seed))
        except (GrammarInvalid, MatcherFailed):
            return ()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    vocabulary = byte_vocabulary()
    made = Run(Checker(vocabulary), Walks(vocabulary))
    yield made
    print(f"\n{made.enforcements}, {made.accepted} accepted, slowest {made.slowest_s:.3f} s")


def test_any_schema(run: Run) -> None:
    settings(max_examples=150, deadline=None)(given(seed=SEEDS)(run.check))()


@pytest.mark.long
def test_20_000_schemas(run: Run) -> None:
    settings(max_examples=20_000, deadline=None)(given(seed=SEEDS)(run.check))()


def check_report(case: Case, report: SchemaReport) -> None:
    """Hold a report against the oracle. What is refused only while it is compiled or read was planned as it should."""
    assert not report.is_unexpected, (case, report.reason)
    if report.enforcement == "refused":
        assert report.refused_at is not None and report.reason, case
        assert not any(report.accepted)
        assert not report.reason.startswith("not a JSON schema") or not _is_planned(case.schema), case
        return
    assert (report.refused_at, report.reason) == (None, None)
    validator = oracle(case.schema)
    for text, accepted in zip(case.documents, report.accepted, strict=True):
        assert not accepted or all(map(validator.is_valid, _values(text))), (case.schema, text)


def _values(text: str) -> list[Any]:
    """The parsed text; nothing if it has a key twice or a number beyond 1e±400, which no schema speaks of."""
    try:
        return [parse_value(text)]
    except SchemaNotSatisfied:
        return []


def _is_planned(schema: Any) -> bool:
    try:
        plan_enforcement(schema, strict=False, param="schema", limits=SchemaLimits())
    except GrammarRefused:
        return False
    return True


def oracle(schema: Any) -> jsonschema_rs.Validator:
    """Another implementation's reading of the schema, in its own draft where that can be built."""
    options: Any = {"validate_formats": True, "offline": True, "base_uri": ROOT}
    named = str(schema.get("$schema", ""))
    kind = next((kind for name, kind in ORACLES.items() if name in named), None)
    text = json.dumps(schema)
    if '"content' in text or '"format"' in text:
        kind = None  # a validator may choose which encodings and formats it asserts, and loraplex does not by draft
    try:
        return kind(schema, **options) if kind is not None else _newest(schema, **options)
    except ValueError:
        return _newest(schema, **options)


def _newest(schema: Any, **options: Any) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator(to_newest(schema, param="schema"), **options)


def test_every_keyword_with_every_type() -> None:
    """Planned as by the gateway, where nothing but a refusal may be raised."""
    counts: Counter[str] = Counter()
    for schema, place in wrong_types():
        try:
            plan = plan_enforcement(schema, strict=False, param="schema", limits=SchemaLimits())
        except AnalysisFailed as error:
            raise AssertionError(schema) from error
        except GrammarRefused as error:
            counts["refused"] += 1
            assert error.param == "schema" and error.pointer is not None, schema
            assert error.pointer == "" or error.pointer.startswith(place), schema
        else:
            counts[plan.enforcement] += 1
    assert counts["refused"] > 2_000 and counts["full"] > 1_000, counts
