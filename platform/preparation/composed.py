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

    composition: OutputPlan
    size_bytes: int


def compose_form(
    form: OutputConstraints, style: ToolStyle, limits: SchemaLimits, control_tokens: Collection[str]
) -> CachedPlan:
    """Raises `GrammarRefused`. Takes up to 0.3 s for a schema at the bound of 10,000 values (measured)."""
    composition = plan_output(form, style, limits=limits, control_tokens=control_tokens)
    source = "" if composition.spec is None else composition.spec.source
    size = form_size(form, MAX_SIZE) + len(source)
    return CachedPlan(composition, ENTRY_BYTES + 4 * size)


def form_size(form: OutputConstraints, most: int) -> int:
    """Characters and values of what a grammar is made of, counted no further than `most`."""
    values: list[object] = [tool.parameters for tool in form.tools]
    match form.format:
        case JsonSchema(schema=inside) | StructuralTag(tag=inside) | Choice(options=inside):
            values.append(inside)
        case Regex(pattern=text) | ContextFreeGrammar(text=text):
            values.append(text)
    return size_of(values, most)
