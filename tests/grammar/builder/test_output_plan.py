"""Output constraints to one grammar: what its mask allows, which backend, what is validated, what is refused."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.builder.output_plan import OutputPlan, plan_output
from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonObject,
    JsonSchema,
    OutputConstraints,
    Regex,
    SchemaLimits,
    StructuralTag,
    Tool,
)
from loraplex.grammar.errors import GrammarRefused, GrammarTooLarge, SchemaNotEnforceable, SchemaNotSatisfied
from loraplex.grammar.json_schema.validator import Validator
from loraplex.grammar.parsing.deltas import ContentDelta
from loraplex.grammar.spec import encode_spec
from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of

LIMITS = SchemaLimits()
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = CITY, *, index: int = 0, strict: bool = False) -> Tool:
    return Tool(name, "what it does", parameters, strict, f"tools[{index}].function.parameters")


WEATHER = tool("get_weather")
TOOLS = (WEATHER, tool("sum", {}, index=1))


def constraints(**fields: Any) -> OutputConstraints:
    return OutputConstraints(**{"tools": TOOLS, "tool_choice": "auto", **fields})


def planned(of: OutputConstraints, style: ToolStyle = ToolStyle.HERMES) -> OutputPlan:
    return plan_output(of, style, limits=LIMITS)


@cache
def compiler() -> MaskCompiler:
    return MaskCompiler(byte_vocabulary())


def accepts(plan: OutputPlan, text: str) -> bool:
    """Return whether exactly this text is an output."""
    assert plan.spec is not None
    mask = compiler().compile(b"tenant", encode_spec(plan.spec))
    ids = byte_vocabulary().tokenizer.encode(text).ids
    return all(mask.accept(token) for token in ids) and mask.is_complete()


def call(style: ToolStyle, name: str, arguments: str, *, beside_json: bool = False) -> str:
    syntax = syntax_of(style, beside_json=beside_json)
    return syntax.opening + syntax.head(name) + arguments + syntax.after_arguments + syntax.closing


def two_calls(style: ToolStyle) -> str:
    syntax = syntax_of(style)
    one = syntax.head("sum") + "{}" + syntax.after_arguments
    return syntax.opening + one + syntax.separator + one + syntax.closing


def validate(schema: str, value: str) -> None:
    Validator(json.loads(schema)).validate(value)


def read(plan: OutputPlan, text: str) -> tuple[str, list[str], str]:
    """Content, names of the calls, reason."""
    reader = plan.parser(validate)
    pieces = [*reader.feed(text)]
    rest, reason = reader.finish("stop")
    pieces += rest
    content = "".join(piece.text for piece in pieces if isinstance(piece, ContentDelta))
    return content, [piece.name for piece in pieces if hasattr(piece, "name")], reason


def test_no_constraints_give_no_grammar() -> None:
    for nothing in (OutputConstraints(), constraints(tool_choice="none")):
        assert planned(nothing) == OutputPlan(None)
    text = call(ToolStyle.HERMES, "sum", "{}")
    assert read(planned(constraints(tool_choice="none")), text) == (text, [], "stop")


@pytest.mark.parametrize("style", ToolStyle)
def test_auto_is_text_or_calls(style: ToolStyle) -> None:
    plan = planned(constraints(), style)
    weather = call(style, "get_weather", '{"city": "Bern"}')
    assert accepts(plan, weather)
    assert accepts(plan, two_calls(style))
    assert accepts(plan, "")
    assert accepts(plan, "It is 3 < 4 and } {.")
    assert not accepts(plan, call(style, "nope", "{}"))
    assert not accepts(plan, call(style, "get_weather", "{}"))
    assert not accepts(plan, call(style, "sum", "[]"))
    assert not accepts(plan, weather + " and so on")
    assert read(plan, weather) == ("", ["get_weather"], "tool_calls")
    assert plan.enforcement == "full"


@pytest.mark.parametrize("style", [ToolStyle.HERMES, ToolStyle.MISTRAL, ToolStyle.GENERIC])
def test_text_may_stand_before_calls(style: ToolStyle) -> None:
    plan = planned(constraints(), style)
    text = "Let me see.\n" + call(style, "sum", "{}")
    assert accepts(plan, text)
    assert read(plan, text) == ("Let me see.", ["sum"], "tool_calls")


@pytest.mark.parametrize("style", ToolStyle)
def test_required_is_calls_and_nothing_else(style: ToolStyle) -> None:
    for of in (
        constraints(tool_choice="required"),
        constraints(tool_choice="required", format=JsonSchema(PERSON, True, "p")),
    ):
        plan = planned(of, style)
        assert accepts(plan, call(style, "sum", '{"a": 1}'))
        assert not accepts(plan, "")
        assert not accepts(plan, "text")
        assert not accepts(plan, '{"name": "Ann"}')


@pytest.mark.parametrize("style", ToolStyle)
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_without_parallel_there_is_one_call(style: ToolStyle, tool_choice: Any) -> None:
    one = planned(constraints(parallel=False, tool_choice=tool_choice), style)
    assert accepts(one, call(style, "sum", "{}"))
    assert not accepts(one, two_calls(style))


@pytest.mark.parametrize("style", ToolStyle)
def test_tools_beside_a_format_are_one_grammar(style: ToolStyle) -> None:
    plan = planned(constraints(format=JsonSchema(PERSON, True, "p")), style)
    weather = call(style, "get_weather", '{"city": "Bern"}', beside_json=True)
    assert accepts(plan, weather)
    assert accepts(plan, '{"name": "get_weather"}')
    assert not accepts(plan, "text")
    assert not accepts(plan, '{"city": "Bern"}')
    assert not accepts(plan, "text" + weather)
    assert read(plan, weather) == ("", ["get_weather"], "tool_calls")
    assert read(plan, '{"name": "get_weather"}') == ('{"name": "get_weather"}', [], "stop")


def test_json_beside_llama3_calls_can_look_like_one() -> None:
    either = {"type": "object", "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}}}
    plan = planned(constraints(format=JsonSchema(either, True, "p")), ToolStyle.LLAMA3)
    text = '{"name": "sum", "parameters": {}}'
    assert accepts(plan, text) and read(plan, text) == (text, [], "stop")
    tagged = "<|python_tag|>" + text
    assert accepts(plan, tagged) and read(plan, tagged) == ("", ["sum"], "tool_calls")


def test_formats_without_tools() -> None:
    assert accepts(planned(OutputConstraints(JsonObject())), ' {"a": [1]}'.strip())
    assert not accepts(planned(OutputConstraints(JsonObject())), "[1]")
    assert accepts(planned(OutputConstraints(JsonSchema(PERSON, True, "p"))), '{"name": "Ann"}')
    pattern = planned(OutputConstraints(Regex(r"\d{3}-[a-c/]+")))
    assert accepts(pattern, "123-a/b") and not accepts(pattern, "123-") and pattern.enforcement is None
    choice = planned(OutputConstraints(Choice(("yes", "no", "yes", 'ma"y\nbe'))))
    assert accepts(choice, 'ma"y\nbe') and not accepts(choice, "yesno") and not accepts(choice, "")


def test_a_pattern_or_choice_beside_tools() -> None:
    for content in (Regex("[0-9]+"), Choice(("1", "22"))):
        plan = planned(constraints(format=content))
        assert accepts(plan, "22") and accepts(plan, call(ToolStyle.HERMES, "sum", "{}"))
        assert not accepts(plan, "x")
        assert read(plan, "22") == ("22", [], "stop")


def test_a_call_that_a_pattern_allows_is_validated() -> None:
    plan = planned(constraints(format=Regex("(?s:.*)")))
    assert plan.enforcement == "validated"
    text = call(ToolStyle.HERMES, "get_weather", "{}")
    assert accepts(plan, text)
    with pytest.raises(SchemaNotSatisfied):
        read(plan, text)


def test_native_formats_go_to_their_backend() -> None:
    lark = planned(OutputConstraints(ContextFreeGrammar('start: "a" "b"')))
    assert accepts(lark, "ab") and not accepts(lark, "a") and lark.enforcement is None
    ebnf = planned(OutputConstraints(ContextFreeGrammar('root ::= "a" | "b"')))
    assert accepts(ebnf, "a") and not accepts(ebnf, "ab")
    assert ebnf.spec is not None and ebnf.spec.backend == "xgrammar"
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "x"},
        {"type": "json_schema", "json_schema": CITY},
    ]}}  # fmt: skip
    tagged = planned(OutputConstraints(StructuralTag(tag)))
    assert accepts(tagged, 'x{"city": "B"}') and not accepts(tagged, "x{}")


@pytest.mark.parametrize(
    ("native", "param"),
    [
        (ContextFreeGrammar('start: "a"'), "structured_outputs.grammar"),
        (StructuralTag({"type": "structural_tag", "format": {}}), "structured_outputs.structural_tag"),
    ],
)
def test_native_formats_stand_alone(native: Any, param: str) -> None:
    with pytest.raises(GrammarRefused, match="tools") as refused:
        planned(constraints(format=native))
    assert refused.value.param == param


def test_unenforced_keywords_are_validated_or_refused() -> None:
    validated = planned(OutputConstraints(JsonSchema(UNIQUE, False, "p")))
    assert validated.enforcement == "validated"
    assert accepts(validated, '{"a": [1, 1]}')
    with pytest.raises(SchemaNotSatisfied):
        read(validated, '{"a": [1, 1]}')
    assert read(validated, '{"a": [1, 2]}')[2] == "stop"
    with pytest.raises(SchemaNotEnforceable) as refused:
        planned(OutputConstraints(JsonSchema(UNIQUE, True, "p")))
    assert (refused.value.param, refused.value.pointer) == ("p", "/properties/a/uniqueItems")


def test_one_validated_tool_makes_the_whole_validated() -> None:
    plan = planned(constraints(tools=(WEATHER, tool("unique", UNIQUE, index=1))))
    assert plan.enforcement == "validated"
    with pytest.raises(SchemaNotSatisfied):
        read(plan, call(ToolStyle.HERMES, "unique", '{"a": [1, 1]}'))
    assert read(plan, call(ToolStyle.HERMES, "unique", '{"a": [1]}'))[2] == "tool_calls"
    with pytest.raises(SchemaNotEnforceable) as refused:
        planned(constraints(tools=(WEATHER, tool("unique", UNIQUE, index=1, strict=True))))
    assert refused.value.param == "tools[1].function.parameters"


def test_the_spec_has_the_requested_options() -> None:
    spec = planned(constraints(close=True, fast_forward=False)).spec
    assert spec is not None and spec.close and not spec.fast_forward
    spec = planned(OutputConstraints(ContextFreeGrammar('start: "a"'), close=True, fast_forward=False)).spec
    assert spec is not None and spec.close and not spec.fast_forward


def test_control_tokens_are_kept_only_where_the_tokenizer_has_them() -> None:
    for style, token in ((ToolStyle.MISTRAL, "[TOOL_CALLS]"), (ToolStyle.HERMES, "<tool_call>")):
        assert plan_output(
            constraints(), style, limits=LIMITS, control_tokens={token, "</s>"}
        ).keep_special_tokens
        assert not plan_output(
            constraints(), style, limits=LIMITS, control_tokens={"</s>"}
        ).keep_special_tokens
    assert not plan_output(
        constraints(tool_choice="none"), ToolStyle.MISTRAL, limits=LIMITS, control_tokens={"[TOOL_CALLS]"}
    ).keep_special_tokens


def test_every_choice_has_its_own_parser() -> None:
    plan = planned(constraints())
    assert plan.parser(validate) is not plan.parser(validate)


@pytest.mark.parametrize(
    ("of", "param"),
    [
        (constraints(tool_choice="required", tools=()), "tool_choice"),
        (constraints(format=Choice(('<tool_call>\n{"name": "sum"',))), "structured_outputs.choice"),
        (OutputConstraints(Choice(())), "structured_outputs.choice"),
        (OutputConstraints(Choice(("a", ""))), "structured_outputs.choice"),
        (constraints(tools=(tool("a b"),)), "tools[0].function.name"),
        (
            constraints(tools=(WEATHER, replace(WEATHER, param="tools[1].function.parameters"))),
            "tools[1].function.name",
        ),
        (constraints(tools=(tool("a", {"type": "array"}),)), "tools[0].function.parameters"),
    ],
)
def test_refusals_name_the_field(of: OutputConstraints, param: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        planned(of)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("of", "limits"),
    [
        (constraints(), SchemaLimits(max_tools=1)),
        (OutputConstraints(Choice(("a", "b"))), SchemaLimits(max_choices=1)),
        (OutputConstraints(Choice(("aa", "b"))), SchemaLimits(max_text_bytes=2)),
        (OutputConstraints(Regex("aaa")), SchemaLimits(max_pattern_bytes=2)),
        (OutputConstraints(ContextFreeGrammar("aaa")), SchemaLimits(max_text_bytes=2)),
        (OutputConstraints(StructuralTag({"a": "b" * 100})), SchemaLimits(max_bytes=50)),
        (OutputConstraints(JsonSchema(PERSON, False, "p")), SchemaLimits(max_bytes=50)),
    ],
)
def test_bounds_are_checked_and_named(of: OutputConstraints, limits: SchemaLimits) -> None:
    with pytest.raises(GrammarTooLarge, match=r"\d"):
        plan_output(of, ToolStyle.GENERIC, limits=limits)
