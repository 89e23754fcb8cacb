"""Values of the parameters of `/v1/messages` that are objects, at their bounds and one step outside."""

from typing import Any

from loraplex.platform.parameters.chat_messages import MAX_MESSAGES
from loraplex.platform.parameters.message_blocks import MAX_BLOCKS, MAX_TOOL_NAME, Blocks, Conversation
from loraplex.platform.parameters.messages_request import MessageTools
from loraplex.platform.parameters.request_object import ObjectOf
from loraplex.platform.parameters.tools import MAX_TOOLS
from loraplex.platform.parameters.value_types import Kind

USER = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "a"}
MARKER = {"type": "ephemeral"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
FORMAT = {"type": "json_schema", "schema": {}}
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}


def tool(name: str = "f", **fields: object) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


OBJECTS: dict[str, tuple[list[Any], list[Any]]] = {
    "MessageToolChoice": (
        [
            {"type": "auto", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "f"},
            {"type": "none"},
        ],
        [{}, {"type": "tool"}, {"type": "any", "name": "f"}, {"type": "required"}, "auto", []],
    ),
    "Thinking": (
        [
            {"type": "disabled"},
            {"type": "adaptive", "display": None},
            {"type": "adaptive", "display": "omitted"},
            {"type": "between_tools"},
            {"type": "enabled", "budget_tokens": 0, "display": "summarized"},
        ],
        [
            *({}, {"type": "enabled"}, {"type": "disabled", "budget_tokens": 1}, {"type": "always"}),
            *({"type": "enabled", "budget_tokens": -1}, {"type": "adaptive", "display": "updates"}, True),
        ],
    ),
    "OutputConfig": (
        [{}, {"effort": "max", "format": FORMAT}, {"effort": None}],
        [{"effort": "minimal"}, {"format": {"type": "json_schema"}}, {"format": {"type": "text"}}, "low"],
    ),
    "CacheControl": (
        [MARKER, {**MARKER, "ttl": "1h"}],
        [{}, {"type": "persistent"}, {**MARKER, "ttl": "2h"}, 1],
    ),
    "ContextManagement": (
        [{}, {"edits": []}, {"edits": [KEEP_ALL]}],
        [
            {"edits": [{**KEEP_ALL, "keep": {"type": "thinking_turns", "value": 1}}]},
            {"edits": [KEEP_ALL] * 2},
        ],
    ),
    "RequestMetadata": (
        [{}, {"user_id": ""}, {"user_id": "u" * 512}],
        [{"user_id": "u" * 513}, {"user": "u"}],
    ),
}


def knows(kind: Kind) -> bool:
    return isinstance(kind, Conversation | Blocks | MessageTools) or (
        isinstance(kind, ObjectOf) and kind.model.__name__ in OBJECTS
    )


def inside(kind: Kind) -> list[Any]:
    """Values at the bounds."""
    match kind:
        case Conversation():
            return [
                [USER],
                [USER] * MAX_MESSAGES,
                [{"role": "user", "content": [TEXT] * MAX_BLOCKS}],
                [{"role": "system", "content": [{**TEXT, "cache_control": MARKER, "citations": None}]}, USER],
                [
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "", "signature": "s"}, USE],
                    }
                ],
                [{"role": "assistant", "content": []}],
                [{"role": "user", "content": [RESULT, {**RESULT, "content": "", "is_error": True}]}],
                [{"role": "user", "content": [{**RESULT, "content": [TEXT]}, {**RESULT, "content": []}]}],
                [
                    {
                        "role": "user",
                        "content": [{**RESULT, "content": [{"type": "tool_reference", "tool_name": "f"}]}],
                    }
                ],
            ]
        case Blocks():
            return ["", "a", [], [TEXT] * MAX_BLOCKS]
        case MessageTools():
            full = tool("f" * MAX_TOOL_NAME, type="custom", description="", strict=True, defer_loading=True)
            full |= {"eager_input_streaming": True, "allowed_callers": ["direct"], "input_examples": [{}]}
            return [
                [],
                [tool(f"f{index}") for index in range(MAX_TOOLS)],
                [full],
                [tool(cache_control=MARKER)],
            ]
        case ObjectOf(model):
            return OBJECTS[model.__name__][0]
    raise AssertionError(f"no bounds for {kind}")


def outside(kind: Kind) -> list[Any]:
    """Values one step outside, and values of other types."""
    match kind:
        case Conversation():
            contents: list[Any] = [
                *(1, None, [], [TEXT] * (MAX_BLOCKS + 1), [IMAGE], [USE], [{"type": "document"}], [{}]),
                *(
                    [{"type": "tool_result", "text": "a"}],
                    [{**RESULT, "content": [IMAGE]}],
                    [{**TEXT, "cache_control": {}}],
                    [{**TEXT, "mood": 1}],
                ),
            ]
            wrong = [[{"role": "user", "content": content}] for content in contents]
            assistant = {"role": "assistant", "content": [{**USE, "input": "{}"}]}
            return [
                [],
                [USER] * (MAX_MESSAGES + 1),
                USER,
                "hi",
                [1],
                [{**USER, "role": "tool"}],
                [{**USER, "role": ["user"]}],
                [{"role": "system", "content": []}],
                [assistant],
                *wrong,
            ]
        case Blocks():
            return [1, [TEXT] * (MAX_BLOCKS + 1), [IMAGE], ["a"]]
        case MessageTools():
            return [
                [tool(f"f{index}") for index in range(MAX_TOOLS + 1)],
                [tool("f" * (MAX_TOOL_NAME + 1))],
                [tool("a b")],
                [{"name": "f"}],
                [tool(input_schema=[])],
                [tool(allowed_callers=["code_execution_20250825"])],
                [tool(mood=1)],
                tool(),
                [1],
            ]
        case ObjectOf(model):
            return OBJECTS[model.__name__][1]
    raise AssertionError(f"no bounds for {kind}")
