"""One backend for all schemas of an answer."""

import json
from typing import Any

import pytest

from loraplex.grammar.builder import schema_set
from loraplex.grammar.builder.schema_set import AskedSchema, hold_together, residue_schema, value_schema
from loraplex.grammar.constraints import Limits
from loraplex.grammar.enforcement.enforcement_plan import Holding
from loraplex.grammar.enforcement.planner import ALL_BACKENDS
from loraplex.grammar.errors import SchemaNotHeld
from loraplex.grammar.spec import Backend

PLAIN = AskedSchema({"type": "object"}, False, "plain")
UNIQUE = AskedSchema({"type": "array", "uniqueItems": True}, False, "unique")
LLGUIDANCE: frozenset[Backend] = frozenset({"llguidance"})
XGRAMMAR: frozenset[Backend] = frozenset({"xgrammar"})


def test_no_schema_is_no_enforcement() -> None:
    assert hold_together([], Limits(), backends=ALL_BACKENDS).enforcement is None


def test_the_preferred_backend_is_taken_where_it_is_exact() -> None:
    held = hold_together([PLAIN], Limits(), backends=ALL_BACKENDS)
    assert (held.backend, held.enforcement) == ("llguidance", "full")
    assert residue_schema(held.holdings[0]) is None


def test_one_validated_schema_makes_the_whole_validated() -> None:
    held = hold_together([PLAIN, UNIQUE], Limits(), backends=ALL_BACKENDS)
    assert held.enforcement == "validated"
    judged_by = residue_schema(held.holdings[1])
    assert judged_by is not None and json.loads(judged_by) == UNIQUE.schema


def test_a_value_can_be_judged_in_any_case() -> None:
    held = hold_together([PLAIN], Limits(), backends=ALL_BACKENDS)
    assert json.loads(value_schema(held.holdings[0])) == PLAIN.schema


def route(exact: dict[str, frozenset[Backend]]) -> Any:
    """A routing by table, for schemas that only one backend holds."""

    def hold_schema(
        schema: Any, *, strict: bool, param: str, limits: Limits, backends: frozenset[Backend]
    ) -> Holding:
        if exact[param] & backends:
            return Holding("full", exact[param] & backends, schema)
        if strict:
            raise SchemaNotHeld("not held", param=param)
        return Holding("validated", LLGUIDANCE, {}, judged=schema)

    return hold_schema


def test_a_schema_for_another_backend_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_set, "hold_schema", route({"plain": ALL_BACKENDS, "unique": XGRAMMAR}))
    held = hold_together([PLAIN, UNIQUE], Limits(), backends=ALL_BACKENDS)
    assert (held.backend, held.enforcement) == ("xgrammar", "full")


@pytest.mark.parametrize("backends", [LLGUIDANCE, ALL_BACKENDS])
def test_without_a_common_backend_schemas_are_relaxed(
    monkeypatch: pytest.MonkeyPatch, backends: frozenset[Backend]
) -> None:
    monkeypatch.setattr(schema_set, "hold_schema", route({"plain": LLGUIDANCE, "unique": XGRAMMAR}))
    held = hold_together([PLAIN, UNIQUE], Limits(), backends=backends)
    assert (held.backend, held.enforcement) == ("llguidance", "validated")
    assert [holding.enforcement for holding in held.holdings] == ["full", "validated"]
    strict = AskedSchema(UNIQUE.schema, True, UNIQUE.param)
    with pytest.raises(SchemaNotHeld) as refused:
        hold_together([PLAIN, strict], Limits(), backends=backends)
    assert refused.value.param == "unique"
