"""Prepares tools, calls and results for a chat template: as objects if it knows tools, else as plain text.

Invariant: this text contains no markup yet; `chat_template.py` keeps user text apart from control tokens.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any, Final

from loraplex.grammar.constraints import Tool
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.grammar.tools.prompt_text import WrittenCall, render_calls, render_result, render_tools
from loraplex.platform.errors import InvalidBody, InvalidParameter
from loraplex.platform.parameters.chat_messages import INSTRUCTIONS, ChatMessage, ToolCall
from loraplex.platform.parameters.json_object import BodyLimits, parse_object

ARGUMENT_LIMITS: Final = BodyLimits()
MISTRAL_ID: Final = re.compile(r"[A-Za-z0-9]{9}")


def as_text(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], style: ToolStyle, *, system: bool
) -> list[ChatMessage]:
    """Write calls, results and tools as text, for a template that does not know them.

    Tools are added to the first system message. `system`: the template renders system messages; else tools are added to the
    first user message. Successive results become one user message, for templates that require alternating roles.
    """
    names = called_names(messages)
    plain: list[ChatMessage] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            results = [render_result(_name(each, names), each.content) for each in group]
            plain.append(ChatMessage("user", "\n".join(results)))
        else:
            plain.extend(_without_calls(message, style) for message in group)
    return _with_tools(plain, render_tools(style, tools), system) if tools else plain


def with_leading_system(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Join the system messages at the beginning, and put later ones into the user's turn beside them.

    For templates that refuse or drop the others.
    """
    if not any(message.role in INSTRUCTIONS for message in messages[1:]):
        return messages
    leading = list(takewhile(lambda message: message.role in INSTRUCTIONS, messages))
    turns = [leading] if leading else []
    moved = False
    for message in messages[len(leading) :]:
        late = message.role in INSTRUCTIONS
        message = replace(message, role="user") if late else message
        if turns and turns[-1][-1].role == message.role == "user" and (late or moved):
            turns[-1].append(message)
        else:
            turns.append([message])
        moved = late
    return [replace(turn[0], content="\n\n".join(each.content for each in turn)) for turn in turns]


def called_names(messages: Sequence[ChatMessage]) -> dict[str, str]:
    """Return call id -> name of the function."""
    return {call.id: call.name for message in messages for call in message.tool_calls}


def template_message(
    message: ChatMessage, style: ToolStyle, names: dict[str, str], thoughts: Sequence[str] = ()
) -> dict[str, Any]:
    """Build the message for a chat template: arguments as an object where possible, a result with its function's name.

    `thoughts`: the names by which the template reads the message's `reasoning`.
    """
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    name = _name(message, names) if message.role == "tool" else message.name
    if name:
        fields["name"] = name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = _call_id(message.tool_call_id, style)
    if message.tool_calls:
        fields["tool_calls"] = [_template_call(call, style) for call in message.tool_calls]
    if message.reasoning:
        fields |= dict.fromkeys(thoughts, message.reasoning)
    return fields


def template_tool(tool: Tool) -> dict[str, Any]:
    """Build the tool in the format of the OpenAI API."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _template_call(call: ToolCall, style: ToolStyle) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments)}
    return {"id": _call_id(call.id, style), "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    """Parse the arguments of a call. Truncated arguments are no object: then templates get their text."""
    try:
        return parse_object(text.encode(), ARGUMENT_LIMITS)
    except (InvalidBody, InvalidParameter):
        return text


def _call_id(call_id: str, style: ToolStyle) -> str:
    """Return an id that the template accepts: Mistral's templates refuse ids in any other format than their own."""
    if style is not ToolStyle.MISTRAL or MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _name(message: ChatMessage, names: dict[str, str]) -> str:
    return names.get(message.tool_call_id or "", message.name or "")


def _without_calls(message: ChatMessage, style: ToolStyle) -> ChatMessage:
    if not message.tool_calls:
        return message
    written = render_calls(style, [WrittenCall(call.name, call.arguments) for call in message.tool_calls])
    content = f"{message.content}\n{written}" if message.content else written
    return replace(message, content=content, tool_calls=())


def _with_tools(messages: list[ChatMessage], text: str, system: bool) -> list[ChatMessage]:
    first = messages[0]
    if first.role in INSTRUCTIONS:
        return [replace(first, content=f"{first.content}\n\n{text}"), *messages[1:]]
    if system:
        return [ChatMessage("system", text), *messages]
    if first.role == "user":
        return [replace(first, content=f"{text}\n\n{first.content}"), *messages[1:]]
    return [ChatMessage("user", text), *messages]
