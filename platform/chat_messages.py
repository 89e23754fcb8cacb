"""Chat messages: role and plain text, nothing else. Parts that are not text are refused by name (OpenAI chat API)."""

from dataclasses import dataclass
from typing import Final

from loraplex.platform.errors import MissingParameter, UnknownParameter, UnsupportedParameter
from loraplex.platform.parameter_kinds import Choice, Text, refuse

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 4096
_LATER: Final = ("tool_calls", "function_call", "audio", "refusal")
_NAMES: Final = ("role", "content", "name", "tool_call_id")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; text parts are joined."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Messages:
    """The kind of the `messages` parameter."""

    most: int = MAX_MESSAGES

    @property
    def allowed(self) -> str:
        return f"a list of 1..{self.most} messages with `role` ({', '.join(ROLES)}) and `content` (string or text parts)"

    def read(self, name: str, value: object) -> list[ChatMessage]:
        if not isinstance(value, list) or not 1 <= len(value) <= self.most:
            refuse(name, value, self.allowed)
        return [_message(f"{name}[{index}]", each) for index, each in enumerate(value)]


def _message(path: str, value: object) -> ChatMessage:
    if not isinstance(value, dict):
        refuse(path, value, "an object with `role` and `content`")
    fields = {key: each for key, each in value.items() if each is not None}
    for key in fields:
        where = f"{path}.{key[:64]}"
        if key in _LATER:
            raise UnsupportedParameter(f"`{where}` is not supported: messages hold text only.", param=where)
        if key not in _NAMES:
            raise UnknownParameter(
                f"Unknown parameter `{where}`: a message has {', '.join(_NAMES)}.", param=where
            )
    for required in ("role", "content"):
        if required not in fields:
            raise MissingParameter(f"`{path}.{required}` is required.", param=f"{path}.{required}")
    return ChatMessage(
        role=Choice(ROLES).read(f"{path}.role", fields["role"]),
        content=_content(f"{path}.content", fields["content"]),
        name=_optional_text(f"{path}.name", fields.get("name")),
        tool_call_id=_optional_text(f"{path}.tool_call_id", fields.get("tool_call_id")),
    )


def _content(path: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        refuse(path, value, f"a string or a list of 1..{MAX_PARTS} text parts")
    return "".join(_part(f"{path}[{index}]", part) for index, part in enumerate(value))


def _part(path: str, value: object) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        refuse(path, value, 'an object {"type": "text", "text": …}')
    if value["type"] != "text":
        kind = value["type"][:64]
        raise UnsupportedParameter(
            f"`{path}` is a part of type {kind!r}; only text is supported.", param=path
        )
    for key in value:
        if key not in ("type", "text"):
            where = f"{path}.{key[:64]}"
            raise UnknownParameter(f"Unknown parameter `{where}`: a text part has type, text.", param=where)
    if not isinstance(value.get("text"), str):
        refuse(f"{path}.text", value.get("text"), "a string")
    return str(value["text"])


def _optional_text(path: str, value: object) -> str | None:
    return None if value is None else Text(longest=256).read(path, value)
