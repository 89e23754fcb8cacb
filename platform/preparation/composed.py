"""Builds output plans, in the form in which they are cached and sent from one process to another."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from loraplex.grammar.builder.output_plan import OutputPlan, plan_output
from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonSchema,
    OutputConstraints,
    Regex,
    SchemaLimits,
    StructuralTag,
)
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.parameters.json_object import size_of

MAX_SIZE: Final = 8 << 20
ENTRY_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """An output plan and its estimated size: a multiple of the constraints' and the grammar's text."""

    plan: OutputPlan
    size_bytes: int


def build_plan(
    constraints: OutputConstraints, style: ToolStyle, limits: SchemaLimits, control_tokens: Collection[str]
) -> CachedPlan:
    """Build the output plan. Raises `GrammarRefused`. Takes up to 0.3 s for a schema with the maximum of 10,000 values."""
    plan = plan_output(constraints, style, limits=limits, control_tokens=control_tokens)
    source = "" if plan.spec is None else plan.spec.source
    size = constraints_size(constraints, MAX_SIZE) + len(source)
    return CachedPlan(plan, ENTRY_BYTES + 4 * size)


def constraints_size(constraints: OutputConstraints, limit: int) -> int:
    """Count the characters and values that the grammar is built from; counting ends above `limit`."""
    values: list[object] = [tool.parameters for tool in constraints.tools]
    match constraints.format:
        case JsonSchema(schema=inside) | StructuralTag(tag=inside) | Choice(options=inside):
            values.append(inside)
        case Regex(pattern=text) | ContextFreeGrammar(text=text):
            values.append(text)
    return size_of(values, limit)
