"""The schemas of one answer, held by one backend together. Invariant: the backend is exact for each schema as it is then
compiled, and what was relaxed has a judge.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

from loraplex.grammar.constraints import JsonSchemaValue, SchemaLimits
from loraplex.grammar.enforcement.enforcement_plan import Enforcement, EnforcementPlan
from loraplex.grammar.enforcement.planner import ALL_BACKENDS, PREFERENCE, plan_enforcement
from loraplex.grammar.json_schema.bounds import check_together
from loraplex.grammar.spec import Backend

PREFERRED: Final[Backend] = PREFERENCE[0]


@dataclass(frozen=True, slots=True)
class RequestedSchema:
    """A schema as it stands in the request; `param` is its place there."""

    schema: JsonSchemaValue
    strict: bool
    param: str


@dataclass(frozen=True, slots=True)
class SchemaSet:
    """`holdings` in the order in which they were asked."""

    backend: Backend
    holdings: tuple[EnforcementPlan, ...]

    @property
    def enforcement(self) -> Enforcement | None:
        """validated if any is; None without a schema."""
        if not self.holdings:
            return None
        return "full" if all(holding.enforcement == "full" for holding in self.holdings) else "validated"


def plan_schemas(
    asked: Sequence[RequestedSchema], limits: SchemaLimits, *, backends: frozenset[Backend]
) -> SchemaSet:
    """`backends`: those that can hold the rest of the answer. Raises `GrammarRefused`.

    When no backend is exact for all, those that the preferred one does not hold are relaxed: a strict one is refused.
    """
    check_together(((each.schema, each.param) for each in asked), limits=limits)
    holdings = tuple(_hold(each, limits, ALL_BACKENDS) for each in asked)
    common = reduce(frozenset.intersection, (holding.backends for holding in holdings), backends)
    if common:
        return SchemaSet(next(backend for backend in PREFERENCE if backend in common), holdings)
    only = frozenset({PREFERRED})
    relaxed = (
        holding if PREFERRED in holding.backends else _hold(each, limits, only)
        for each, holding in zip(asked, holdings, strict=True)
    )
    return SchemaSet(PREFERRED, tuple(relaxed))


def validation_schema(holding: EnforcementPlan) -> str | None:
    """What a finished value is judged by, as a JSON text, if the grammar alone does not hold its schema."""
    return None if holding.judged is None else json.dumps(holding.judged)


def value_schema(holding: EnforcementPlan) -> str:
    """What a finished value is judged by in any case."""
    return json.dumps(holding.schema if holding.judged is None else holding.judged)


def _hold(asked: RequestedSchema, limits: SchemaLimits, backends: frozenset[Backend]) -> EnforcementPlan:
    return plan_enforcement(
        asked.schema, strict=asked.strict, param=asked.param, limits=limits, backends=backends
    )
