"""A composition as it is remembered, and as it crosses from one process to another."""

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
    """`size_bytes` is an estimate: what the form and the grammar take as text, a few times."""

    plan: OutputPlan
    size_bytes: int


def build_plan(
    constraints: OutputConstraints, style: ToolStyle, limits: SchemaLimits, control_tokens: Collection[str]
) -> CachedPlan:
    """Raises `GrammarRefused`. Takes up to 0.3 s for a schema at the bound of 10,000 values (measured)."""
    plan = plan_output(constraints, style, limits=limits, control_tokens=control_tokens)
    source = "" if plan.spec is None else plan.spec.source
    size = constraints_size(constraints, MAX_SIZE) + len(source)
    return CachedPlan(plan, ENTRY_BYTES + 4 * size)


def constraints_size(constraints: OutputConstraints, limit: int) -> int:
    """Characters and values of what a grammar is made of, counted no further than `limit`."""
    values: list[object] = [tool.parameters for tool in constraints.tools]
    match constraints.format:
        case JsonSchema(schema=inside) | StructuralTag(tag=inside) | Choice(options=inside):
            values.append(inside)
        case Regex(pattern=text) | ContextFreeGrammar(text=text):
            values.append(text)
    return size_of(values, limit)
