"""Parses chat messages: role, plain text, the calls of an assistant and the results of tools (OpenAI chat API).

Parts that are not text are refused by name. Fields that clients return from an earlier response are accepted and ignored.
"""

from dataclasses import dataclass
from typing import Any, Final

from loraplex.platform.errors import InvalidParameter, UnsupportedParameter
from loraplex.platform.parameters.value_types import Choice, Identifier, Text, closed_fields, needed, refuse

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 4096
MAX_CALLS: Final = 128
_LATER: Final = ("function_call", "audio", "refusal")
# `annotations` and `parsed`, and `index` and `parsed_arguments` of a call: the `openai` client adds them to responses.
_ECHOED: Final = ("annotations", "parsed")
_NAMES: Final = ("role", "content", "name", "tool_calls", "tool_call_id")
_MESSAGE: Final = "a message with " + ", ".join(_NAMES)
_CALL: Final = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
_PART: Final = '{"type": "text", "text": …}'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an assistant. `arguments` is its text: a JSON object unless it was truncated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. Text parts are joined; an assistant's content may be empty."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Messages:
    """The type of `messages`."""

    max_items: int = MAX_MESSAGES

    @property
    def allowed(self) -> str:
        roles = f"`role` ({', '.join(ROLES)}) and `content` (string or text parts)"
        calls = f"an assistant may have up to {MAX_CALLS} `tool_calls`, a tool has the `tool_call_id` of one"
        return f"a list of 1..{self.max_items} messages with {roles}; {calls}"

    def read(self, name: str, value: object) -> list[ChatMessage]:
        if not isinstance(value, list) or not 1 <= len(value) <= self.max_items:
            refuse(name, value, self.allowed)
        messages = [_message(f"{name}[{index}]", each) for index, each in enumerate(value)]
        _check_results(name, messages)
        return messages


def _message(path: str, value: object) -> ChatMessage:
    if not isinstance(value, dict):
        refuse(path, value, "an object with `role` and `content`")
    fields = closed_fields(path, value, (*_NAMES, *_LATER, *_ECHOED), _MESSAGE)
    for key in _LATER:
        if key in fields:
            where = f"{path}.{key}"
            raise UnsupportedParameter(
                f"`{where}` is not supported: messages contain text only.", param=where
            )
    role = Choice(ROLES).read(f"{path}.role", needed(fields, path, "role"))
    _check_role(path, role, fields)
    calls = _calls(f"{path}.tool_calls", fields.get("tool_calls", []))
    # A response without text has the content null, also one without a call.
    content = "" if role == "assistant" and "content" not in fields else needed(fields, path, "content")
    return ChatMessage(
        role=role,
        content=_content(f"{path}.content", content),
        name=_optional_text(f"{path}.name", fields.get("name")),
        tool_call_id=_optional_text(f"{path}.tool_call_id", fields.get("tool_call_id")),
        tool_calls=calls,
    )


def _check_role(path: str, role: str, fields: dict[str, Any]) -> None:
    if role == "tool":
        needed(fields, path, "tool_call_id")
    for key, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if key in fields and role != owner:
            where = f"{path}.{key}"
            raise InvalidParameter(
                f"`{where}` belongs to a message of role {owner}, not {role}.", param=where
            )


def _check_results(name: str, messages: list[ChatMessage]) -> None:
    called = set[str]()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in called:
            where = f"{name}[{index}].tool_call_id"
            raise InvalidParameter(
                f"`{where}` is the `id` of no call of an earlier assistant message.", param=where
            )


def _calls(path: str, value: object) -> tuple[ToolCall, ...]:
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        refuse(path, value, f"a list of up to {MAX_CALLS} calls {_CALL}")
    return tuple(_call(f"{path}[{index}]", each) for index, each in enumerate(value))


def _call(path: str, value: object) -> ToolCall:
    fields = closed_fields(path, value, ("id", "type", "function", "index"), _CALL)
    Choice(("function",)).read(f"{path}.type", needed(fields, path, "type"))
    where = f"{path}.function"
    names = ("name", "arguments", "parsed_arguments")
    function = closed_fields(where, needed(fields, path, "function"), names, _CALL)
    arguments = needed(function, where, "arguments")
    if not isinstance(arguments, str):
        refuse(f"{where}.arguments", arguments, "a string")
    return ToolCall(
        id=Text(max_bytes=256).read(f"{path}.id", needed(fields, path, "id")),
        name=Identifier().read(f"{where}.name", needed(function, where, "name")),
        arguments=arguments,
    )


def _content(path: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        refuse(path, value, f"a string or a list of 1..{MAX_PARTS} text parts")
    return "".join(_part(f"{path}[{index}]", part) for index, part in enumerate(value))


def _part(path: str, value: object) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        refuse(path, value, f"an object {_PART}")
    if value["type"] != "text":
        kind = value["type"][:64]
        raise UnsupportedParameter(
            f"`{path}` is a part of type {kind!r}; only text is supported.", param=path
        )
    fields = closed_fields(path, value, ("type", "text"), _PART)
    if not isinstance(fields.get("text"), str):
        refuse(f"{path}.text", value.get("text"), "a string")
    return str(fields["text"])


def _optional_text(path: str, value: object) -> str | None:
    return None if value is None else Text(max_bytes=256).read(path, value)
