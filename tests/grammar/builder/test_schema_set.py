"""One backend for all schemas of an answer."""

import json
from typing import Any

import pytest

from loraplex.grammar.builder import schema_set
from loraplex.grammar.builder.schema_set import RequestedSchema, plan_schemas, validation_schema, value_schema
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.enforcement_plan import EnforcementPlan
from loraplex.grammar.enforcement.planner import ALL_BACKENDS
from loraplex.grammar.errors import SchemaNotEnforceable
from loraplex.grammar.spec import Backend

PLAIN = RequestedSchema({"type": "object"}, False, "plain")
UNIQUE = RequestedSchema({"type": "array", "uniqueItems": True}, False, "unique")
LLGUIDANCE: frozenset[Backend] = frozenset({"llguidance"})
XGRAMMAR: frozenset[Backend] = frozenset({"xgrammar"})


def test_no_schema_is_no_enforcement() -> None:
    assert plan_schemas([], SchemaLimits(), backends=ALL_BACKENDS).enforcement is None


def test_the_preferred_backend_is_taken_where_it_is_exact() -> None:
    planned = plan_schemas([PLAIN], SchemaLimits(), backends=ALL_BACKENDS)
    assert (planned.backend, planned.enforcement) == ("llguidance", "full")
    assert validation_schema(planned.plans[0]) is None


def test_one_validated_schema_makes_the_whole_validated() -> None:
    planned = plan_schemas([PLAIN, UNIQUE], SchemaLimits(), backends=ALL_BACKENDS)
    assert planned.enforcement == "validated"
    validated_by = validation_schema(planned.plans[1])
    assert validated_by is not None and json.loads(validated_by) == UNIQUE.schema


def test_every_value_can_be_validated() -> None:
    planned = plan_schemas([PLAIN], SchemaLimits(), backends=ALL_BACKENDS)
    assert json.loads(value_schema(planned.plans[0])) == PLAIN.schema


def route(exact: dict[str, frozenset[Backend]]) -> Any:
    """A routing by table, for schemas that only one backend holds."""

    def plan_by_table(
        schema: Any, *, strict: bool, param: str, limits: SchemaLimits, backends: frozenset[Backend]
    ) -> EnforcementPlan:
        if exact[param] & backends:
            return EnforcementPlan("full", exact[param] & backends, schema)
        if strict:
            raise SchemaNotEnforceable("not planned", param=param)
        return EnforcementPlan("validated", LLGUIDANCE, {}, validation_schema=schema)

    return plan_by_table


def test_a_schema_for_another_backend_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_set, "plan_enforcement", route({"plain": ALL_BACKENDS, "unique": XGRAMMAR}))
    planned = plan_schemas([PLAIN, UNIQUE], SchemaLimits(), backends=ALL_BACKENDS)
    assert (planned.backend, planned.enforcement) == ("xgrammar", "full")


@pytest.mark.parametrize("backends", [LLGUIDANCE, ALL_BACKENDS])
def test_without_a_common_backend_schemas_are_relaxed(
    monkeypatch: pytest.MonkeyPatch, backends: frozenset[Backend]
) -> None:
    monkeypatch.setattr(schema_set, "plan_enforcement", route({"plain": LLGUIDANCE, "unique": XGRAMMAR}))
    planned = plan_schemas([PLAIN, UNIQUE], SchemaLimits(), backends=backends)
    assert (planned.backend, planned.enforcement) == ("llguidance", "validated")
    assert [plan.enforcement for plan in planned.plans] == ["full", "validated"]
    strict = RequestedSchema(UNIQUE.schema, True, UNIQUE.param)
    with pytest.raises(SchemaNotEnforceable) as refused:
        plan_schemas([PLAIN, strict], SchemaLimits(), backends=backends)
    assert refused.value.param == "unique"
