"""The styles, and how the style of a base model is guessed from its chat template."""

import pytest

from loraplex.grammar.tools.call_syntax import ToolStyle, renders_tools, style_of_template, syntax_of

QWEN = """{%- if tools %}<tools>{{ tool | tojson }}</tools> <tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": …}"""
QWEN_CODER = "{%- if tools %}<tool_call>\\n<function={{ tool_call.name }}>\\n<parameter="
LLAMA = """{%- if tools is not none %}"Environment: ipython" '{"name": ' ... '"parameters": '"""
MISTRAL = """{%- if tools is not none %}[AVAILABLE_TOOLS] … [TOOL_CALLS] [{"name": …, "arguments": …}]"""


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (QWEN, ToolStyle.HERMES),
        (QWEN_CODER, ToolStyle.GENERIC),
        (MISTRAL, ToolStyle.MISTRAL),
        (LLAMA, ToolStyle.LLAMA3),
        ('{% for message in messages %}<tool_call> "arguments"{% endfor %}', ToolStyle.GENERIC),
        ("{{ tools }}", ToolStyle.GENERIC),
        ("{{ messages }}", ToolStyle.GENERIC),
        (None, ToolStyle.GENERIC),
    ],
)
def test_the_style_is_read_from_the_template(template: str | None, style: ToolStyle) -> None:
    assert style_of_template(template) is style


def test_llama3_may_show_only_in_the_vocabulary() -> None:
    template = '{{ tools }} "parameters"'
    assert style_of_template(template) is ToolStyle.GENERIC
    assert style_of_template(template, ["<|python_tag|>"]) is ToolStyle.LLAMA3


def test_a_template_that_does_not_say_tools_ignores_them() -> None:
    assert renders_tools(QWEN) and not renders_tools("{{ messages }}") and not renders_tools(None)


@pytest.mark.parametrize("style", ToolStyle)
@pytest.mark.parametrize("beside_json", [False, True])
def test_what_ends_a_call_tells_what_follows(style: ToolStyle, beside_json: bool) -> None:
    """The reader decides between one more call and the end by one character, and finds a name's end by its quote."""
    syntax = syntax_of(style, beside_json=beside_json)
    assert syntax.separator and syntax.separator[0] != syntax.closing[:1]
    assert syntax.after_arguments[0] == "}"
    assert syntax.before_name.endswith('"') and syntax.before_arguments.startswith('"')
    assert syntax.before_name.strip() and "{" in syntax.before_name


def test_beside_json_no_call_begins_as_json_does() -> None:
    for style in ToolStyle:
        assert syntax_of(style, beside_json=True).beginning[:2] not in ('{"', "{ ", "[{")


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (ToolStyle.HERMES, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        (ToolStyle.LLAMA3, '{"name": "f", "parameters": {}}'),
        (ToolStyle.MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
        (ToolStyle.GENERIC, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ],
)
def test_spelling_of_one_call(style: ToolStyle, text: str) -> None:
    syntax = syntax_of(style)
    assert syntax.opening + syntax.head("f") + "{}" + syntax.after_arguments + syntax.closing == text
