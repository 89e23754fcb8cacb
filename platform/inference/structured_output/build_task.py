"""The analysis of large requests, as a worker process runs it: checks a body, or builds an output plan.

Invariant: constraints cross between processes as JSON text, in which numbers keep all digits; msgpack would limit them to
64 bits.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

import msgspec

from loraplex.grammar.builder.output_plan import OutputPlan, plan_output
from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonObject,
    JsonSchema,
    OutputConstraints,
    OutputFormat,
    Regex,
    SchemaLimits,
    StructuralTag,
    Tool,
)
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.parameters.json_object import BodyLimits, parse_object, size_of

MAX_SIZE: Final = 8 << 20
ENTRY_BYTES: Final = 4096

_FORMATS: Final[dict[str, type[OutputFormat]]] = {
    each.__name__: each for each in (JsonObject, JsonSchema, Regex, Choice, ContextFreeGrammar, StructuralTag)
}


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """An output plan and its estimated size: a multiple of the constraints' and the grammar's text."""

    plan: OutputPlan
    size_bytes: int


class AnalysisSetup(msgspec.Struct, frozen=True):
    """Bounds of all requests. `control_tokens`: the texts of the tokenizer's special tokens."""

    body: BodyLimits
    grammar: SchemaLimits
    control_tokens: frozenset[str]


class CheckBody(msgspec.Struct, frozen=True, tag=True):
    """Check that the body is a JSON object within the bounds. There is no result."""

    body: bytes


class BuildPlan(msgspec.Struct, frozen=True, tag=True):
    """Build the output plan of constraints packed by `pack_constraints`."""

    packed: bytes


Analysis: TypeAlias = CheckBody | BuildPlan


def analyzer(setup: AnalysisSetup) -> Callable[[Analysis], CachedPlan | None]:
    """Return the function of the worker task."""

    def analyze(analysis: Analysis) -> CachedPlan | None:
        """Raises `GatewayError` for a body, `GrammarRefused` for a plan."""
        match analysis:
            case CheckBody(body=body):
                parse_object(body, setup.body)
                return None
            case BuildPlan(packed=packed):
                return build_plan(*unpack_constraints(packed), setup.grammar, setup.control_tokens)

    return analyze


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
    values: list[object] = [
        each
        for tool in constraints.tools
        for each in (tool.parameters, _members(tool.input) if tool.input else None)
    ]
    match constraints.format:
        case JsonSchema(schema=inside) | StructuralTag(tag=inside) | Choice(options=inside):
            values.append(inside)
        case Regex(pattern=text) | ContextFreeGrammar(text=text):
            values.append(text)
    return size_of(values, limit)


def pack_constraints(constraints: OutputConstraints, style: ToolStyle) -> bytes:
    """Pack the constraints. Equal bytes mean equal constraints, with the members of objects in the same order."""
    document = _members(constraints) | {
        "format": _packed(constraints.format),
        "tools": [_members(tool) | {"input": _packed(tool.input)} for tool in constraints.tools],
    }
    return json.dumps([style, document]).encode()


def unpack_constraints(packed: bytes) -> tuple[OutputConstraints, ToolStyle]:
    """Unpack what `pack_constraints` has packed."""
    style, document = json.loads(packed)
    tools = tuple(Tool(**tool | {"input": _format(tool["input"])}) for tool in document["tools"])
    constraints = OutputConstraints(**document | {"format": _format(document["format"]), "tools": tools})
    return constraints, ToolStyle(style)


def _members(item: OutputConstraints | OutputFormat | Tool) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _packed(given: OutputFormat | None) -> list[Any] | None:
    return None if given is None else [type(given).__name__, _members(given)]


def _format(packed: list[Any] | None) -> Any:
    """Return the format of this name."""
    if packed is None:
        return None
    name, members = packed
    return Choice(tuple(members["options"])) if name == Choice.__name__ else _FORMATS[name](**members)
