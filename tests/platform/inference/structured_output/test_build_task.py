"""Packed constraints: every format is unpacked unchanged."""

import pytest

from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonObject,
    JsonSchema,
    OutputConstraints,
    OutputFormat,
    Regex,
    StructuralTag,
    Tool,
)
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.inference.structured_output.build_task import pack_constraints, unpack_constraints

SCHEMA = {"maximum": 10**40, "multipleOf": 0.1, "const": "\u2028 \U0001f600 ä", "enum": [None, True, -0.0]}


@pytest.mark.parametrize(
    "format_",
    [
        None,
        JsonObject(),
        JsonSchema(SCHEMA, True, "p"),
        JsonSchema(False, False, "p"),
        Regex("a|b"),
        Choice(("a", "b")),
        ContextFreeGrammar("root ::= x"),
        StructuralTag({"type": "structural_tag", "format": SCHEMA}),
    ],
)
@pytest.mark.parametrize("style", ToolStyle)
def test_every_format_is_unpacked_unchanged(format_: OutputFormat | None, style: ToolStyle) -> None:
    tools = (Tool("f", "what", SCHEMA, True, "tools[0]"), Tool("g", "", True, False, "tools[1]"))
    form = OutputConstraints(format_, tools, "auto", parallel=False, close=True, fast_forward=False)
    assert unpack_constraints(pack_constraints(form, style)) == (form, style)
    assert pack_constraints(form, style) != pack_constraints(
        OutputConstraints(format_, tools[:1], "auto"), style
    )
