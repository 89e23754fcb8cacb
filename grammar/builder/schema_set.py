"""Plans all schemas of one output for one backend.

Invariant: the backend enforces each compiled schema exactly, and relaxed schemas are validated on the finished value.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

from loraplex.grammar.constraints import JsonSchemaValue, SchemaLimits
from loraplex.grammar.enforcement.enforcement_plan import Enforcement, EnforcementPlan, UnenforcedKeyword
from loraplex.grammar.enforcement.planner import ALL_BACKENDS, PREFERENCE, plan_enforcement
from loraplex.grammar.errors import GrammarRefused
from loraplex.grammar.json_schema.bounds import check_together
from loraplex.grammar.spec import Backend

PREFERRED: Final[Backend] = PREFERENCE[0]


@dataclass(frozen=True, slots=True)
class RequestedSchema:
    """A schema of the request; `param` is its request field, `tool` the name of the tool whose arguments it describes."""

    schema: JsonSchemaValue
    strict: bool
    param: str
    tool: str | None = None


@dataclass(frozen=True, slots=True)
class SchemaSet:
    """`plans` are in the order of the requested schemas."""

    backend: Backend
    plans: tuple[EnforcementPlan, ...]

    @property
    def enforcement(self) -> Enforcement | None:
        """`validated` if any schema is; None without a schema."""
        if not self.plans:
            return None
        return "full" if all(plan.enforcement == "full" for plan in self.plans) else "validated"

    @property
    def unenforced(self) -> tuple[UnenforcedKeyword, ...]:
        """The keywords that only validation enforces, each with its place in its own schema."""
        return tuple(keyword for plan in self.plans for keyword in plan.unenforced)

    @property
    def slips(self) -> tuple[str, ...]:
        """The keywords of any schema that were read in another form, and `nullable`."""
        return tuple(sorted({keyword for plan in self.plans for keyword in plan.slips}))


def plan_schemas(
    requested: Sequence[RequestedSchema], limits: SchemaLimits, *, backends: frozenset[Backend]
) -> SchemaSet:
    """Choose one backend for all schemas; `backends` can express the rest of the output. Raises `GrammarRefused`.

    If no backend is exact for all, schemas that the preferred one does not enforce are relaxed; a strict one is
    refused.
    """
    check_together(((each.schema, each.param) for each in requested), limits=limits)
    plans = tuple(_plan(each, limits, ALL_BACKENDS) for each in requested)
    common = reduce(frozenset.intersection, (plan.backends for plan in plans), backends)
    if common:
        return SchemaSet(next(backend for backend in PREFERENCE if backend in common), plans)
    only = frozenset({PREFERRED})
    relaxed = (
        plan if PREFERRED in plan.backends else _plan(each, limits, only)
        for each, plan in zip(requested, plans, strict=True)
    )
    return SchemaSet(PREFERRED, tuple(relaxed))


def validation_schema(plan: EnforcementPlan) -> str | None:
    """Return the schema that validates the finished value, a JSON text; None if the grammar enforces all of it."""
    return None if plan.validation_schema is None else json.dumps(plan.validation_schema)


def value_schema(plan: EnforcementPlan) -> str:
    """Return the schema of the finished value, whether or not it needs validation."""
    return json.dumps(plan.schema if plan.validation_schema is None else plan.validation_schema)


def _plan(requested: RequestedSchema, limits: SchemaLimits, backends: frozenset[Backend]) -> EnforcementPlan:
    try:
        return plan_enforcement(
            requested.schema, strict=requested.strict, param=requested.param, limits=limits, backends=backends
        )
    except GrammarRefused as error:
        if requested.tool is None:
            raise
        message = f"tool {requested.tool!r}: {error}"
        raise type(error)(message, param=error.param, pointer=error.pointer) from error
