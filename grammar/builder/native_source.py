"""Formats in a backend's own language, whose text is passed on unchanged.

Invariant: a schema inside a structural tag is one that xgrammar enforces exactly, or the tag is refused.
"""

from typing import Any, Final

from loraplex.grammar.backends.emit_llguidance import emit, lark_source
from loraplex.grammar.backends.emit_xgrammar import ebnf_source, structural_tag_source
from loraplex.grammar.constraints import (
    ContextFreeGrammar,
    JsonSchemaValue,
    Regex,
    SchemaLimits,
    StructuralTag,
    Tool,
)
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import GrammarRefused, GrammarTooLarge
from loraplex.grammar.json_schema.bounds import check_bounds
from loraplex.grammar.spec import Backend
from loraplex.grammar.tree import Pattern

GRAMMAR: Final = "structured_outputs.grammar"
INPUT: Final = "input"
"""The one argument of a custom tool."""

SCHEMA_FORMAT: Final[dict[str, Any]] = {"type": "json_schema", "json_schema": True, "style": "json"}
"""The keys of such a format. `any_order` and its like would loosen the schema."""


def native_param(native: ContextFreeGrammar | StructuralTag) -> str:
    """Return the request field of the format."""
    return native.param if isinstance(native, StructuralTag) else GRAMMAR


def native_source(native: ContextFreeGrammar | StructuralTag, limits: SchemaLimits) -> tuple[Backend, str]:
    """Return the one backend that reads the format, and its source. Raises `GrammarRefused`."""
    if isinstance(native, StructuralTag):
        check_bounds(native.tag, limits=limits, param=native.param)
        return "xgrammar", structural_tag_source(_with_exact_schemas(native.tag, limits, native.param))
    size = len(native.text.encode(errors="surrogatepass"))
    if size > limits.max_text_bytes:
        message = f"the grammar has {size} bytes, at most {limits.max_text_bytes} are allowed"
        raise GrammarTooLarge(message, param=GRAMMAR)
    if "::=" in native.text:
        return "xgrammar", ebnf_source(native.text)
    return "llguidance", lark_source(native.text)


def input_source(tool: Tool, limits: SchemaLimits) -> str:
    """Return the Lark grammar of a custom tool's input. Raises `GrammarTooLarge`."""
    is_pattern = isinstance(tool.input, Regex)
    text = tool.input.pattern if isinstance(tool.input, Regex) else tool.input.text if tool.input else ""
    limit = limits.max_pattern_bytes if is_pattern else limits.max_text_bytes
    size = len(text.encode(errors="surrogatepass"))
    if size > limit:
        raise GrammarTooLarge(
            f"the format of {tool.name} has {size} bytes, at most {limit} are allowed", param=tool.param
        )
    return emit(Pattern(text)) if is_pattern else lark_source(text)


def _with_exact_schemas(value: Any, limits: SchemaLimits, param: str) -> Any:
    """Copy a tag, no deeper than `limits`, with each schema planned for xgrammar. Schemas are not walked."""
    if isinstance(value, list):
        return [_with_exact_schemas(each, limits, param) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") != "json_schema":
        return {key: _with_exact_schemas(each, limits, param) for key, each in value.items()}
    for name in value.keys() - SCHEMA_FORMAT.keys():
        raise GrammarRefused(
            f"a format json_schema has {', '.join(SCHEMA_FORMAT)}, not {name[:64]!r}", param=param
        )
    if value.get("style", "json") != "json":
        raise GrammarRefused('of the styles of "json_schema" only "json" is supported', param=param)
    return {**SCHEMA_FORMAT, "json_schema": _exact_schema(value.get("json_schema"), limits, param)}


def _exact_schema(schema: Any, limits: SchemaLimits, param: str) -> JsonSchemaValue:
    return plan_enforcement(
        schema, strict=True, param=param, limits=limits, backends=frozenset({"xgrammar"})
    ).schema
