"""Tools, calls and results as plain text, for chat templates without tool support.

Invariant: a call is spelled exactly as the grammar of its style lets the model write it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.grammar.constraints import Tool
from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of an earlier assistant message. `arguments` is its JSON text."""

    name: str
    arguments: str


def render_tools(style: ToolStyle, tools: Sequence[Tool]) -> str:
    """Return the system text that lists `tools` and explains how to call them."""
    example = _written(style, [("FUNCTION_NAME", "{ARGUMENTS}")])
    lines = [
        "You can call functions. These are the functions, one per line, each with the JSON schema of its arguments:",
        "",
        *(_described(tool) for tool in tools),
        "",
        "To call a function, write exactly this, with its name and with its arguments as one JSON object:",
        "",
        example,
        "",
        "The result comes back to you in the next message. Call a function only when it helps; otherwise answer in words.",
    ]
    return "\n".join(lines)


def render_calls(style: ToolStyle, calls: Sequence[WrittenCall]) -> str:
    """Return the text that the assistant wrote for `calls`."""
    return _written(style, [(call.name, call.arguments) for call in calls])


def render_result(name: str, content: str) -> str:
    """Return a call's result as a message. Content is a JSON string, so a line break cannot end its frame."""
    result = json.dumps({"name": name, "content": content}, ensure_ascii=False)
    return f"<tool_response>\n{result}\n</tool_response>"


def _described(tool: Tool) -> str:
    shown = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return json.dumps(shown, ensure_ascii=False)


def _written(style: ToolStyle, calls: Sequence[tuple[str, str]]) -> str:
    syntax = syntax_of(style)
    written = (syntax.head(name) + arguments + syntax.after_arguments for name, arguments in calls)
    return syntax.opening + syntax.separator.join(written) + syntax.closing
