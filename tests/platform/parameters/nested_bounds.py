"""Values of nested parameter types (messages, prompts, formats, tools), at their bounds and one step outside."""

from typing import Any

from tests.platform.parameters import decision_bounds
from tests.platform.parameters.request_parts import CALL, NAMED, SCHEMA, USER, allowed_tools, schema, tool

from loraplex.platform.parameters.chat_messages import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, Messages
from loraplex.platform.parameters.response_format import BOUNDS, ResponseFormat, StructuredOutputs
from loraplex.platform.parameters.responses_input import MAX_ITEMS, InputItems
from loraplex.platform.parameters.responses_tools import ResponseToolChoices, ResponseTools
from loraplex.platform.parameters.tools import MAX_DESCRIPTION_BYTES, MAX_TOOLS, ToolChoices, ToolDefinitions
from loraplex.platform.parameters.value_types import MAX_PROMPTS, Prompts

NestedKind = (
    Messages
    | Prompts
    | ResponseFormat
    | StructuredOutputs
    | ToolDefinitions
    | ToolChoices
    | InputItems
    | ResponseTools
    | ResponseToolChoices
)
FUNCTION = {"type": "function", "name": "f"}
CUSTOM = {"type": "custom", "name": "g"}
ITEMS: list[Any] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
    {"role": "user", "content": "a", "id": "msg_1", "status": "completed"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "reasoning", "encrypted_content": "sealed"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
    {"type": "custom_tool_call", "call_id": "d", "name": "g", "namespace": "n", "input": ""},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
    {"type": "custom_tool_call_output", "call_id": "d", "output": ""},
    {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
]


def inside(kind: NestedKind) -> list[Any]:
    """Values at the bounds."""
    match kind:
        case Messages():
            return messages_inside(MAX_MESSAGES)
        case Prompts():
            return prompts_inside(MAX_PROMPTS)
        case ResponseFormat():
            return response_format_inside()
        case StructuredOutputs():
            return structured_outputs_inside()
        case ToolDefinitions():
            return tool_definitions_inside(MAX_TOOLS)
        case ToolChoices():
            return tool_choices_inside(MAX_TOOLS)
        case InputItems(models):
            known = [each for each in ITEMS if each.get("type", "message") in dict(models)]
            own = [] if "reasoning" in dict(models) else decision_bounds.DATA_INSIDE
            return ["", "a", [USER], [USER] * MAX_ITEMS, known, [{"role": "user", "content": []}], *own]
        case ResponseTools():
            return response_tools_inside(MAX_TOOLS)
        case ResponseToolChoices():
            return response_tool_choices_inside(MAX_TOOLS)


def outside(kind: NestedKind) -> list[Any]:
    """Values one step outside, and values of other types."""
    match kind:
        case Messages():
            return messages_outside(MAX_MESSAGES)
        case Prompts():
            return prompts_outside(MAX_PROMPTS)
        case ResponseFormat():
            return response_format_outside()
        case StructuredOutputs():
            return structured_outputs_outside()
        case ToolDefinitions():
            return tool_definitions_outside(MAX_TOOLS)
        case ToolChoices():
            return tool_choices_outside(MAX_TOOLS)
        case InputItems(models):
            own = [] if "reasoning" in dict(models) else [[ITEMS[2]], *decision_bounds.DATA_OUTSIDE]
            return input_items_outside(MAX_ITEMS) + own
        case ResponseTools():
            return response_tools_outside(MAX_TOOLS)
        case ResponseToolChoices():
            return response_tool_choices_outside(MAX_TOOLS)


def messages_inside(max_items: int) -> list[Any]:
    return [
        [USER],
        [USER] * max_items,
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * MAX_PARTS}],
        [{"role": "assistant", "tool_calls": [CALL] * MAX_CALLS}],
        [
            {
                "role": "assistant",
                "tool_calls": [CALL],
                "content": None,
                "refusal": None,
                "audio": None,
                "reasoning_content": "because",
            },
            {"role": "tool", "tool_call_id": "c", "content": ""},
        ],
        [
            {
                "role": "assistant",
                "content": "a",
                "annotations": [],
                "parsed": {},
                "function_call": None,
            }
        ],
    ]


def prompts_inside(max_items: int) -> list[Any]:
    return ["a", ["a"] * max_items, [1], [[1], [2, 3]]]


def response_format_inside() -> list[Any]:
    return [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_object", "schema": {"type": "object"}},
        {"type": "json_object", "value": {"type": "object"}},
        {"type": "structural_tag", "format": {"type": "any_text"}},
        schema(name="n" * 64, description="", strict=None),
        schema(description="d" * MAX_DESCRIPTION_BYTES, strict=True),
    ]


def structured_outputs_inside() -> list[Any]:
    return [
        {"json": {"type": "object"}, "regex": None},
        {"json": '{"type": "object"}'},
        {"regex": "a" * BOUNDS.max_pattern_bytes, "close": False},
        {"choice": ["a"] * BOUNDS.max_choices, "close": True},
        {"grammar": "a" * BOUNDS.max_text_bytes},
        {"structural_tag": {}},
        {"structural_tag": "{}"},
        {"close": True},
    ]


def tool_definitions_inside(max_items: int) -> list[Any]:
    return [
        [],
        [tool(f"f{index}") for index in range(max_items)],
        [tool("f" * 64, description="d" * MAX_DESCRIPTION_BYTES, parameters={}, strict=True)],
        [tool(description=None, parameters=None, strict=None)],
    ]


def tool_choices_inside(max_items: int) -> list[Any]:
    many = allowed_tools(*(f"f{index}" for index in range(max_items)), mode="required")
    return ["none", "auto", "required", NAMED, allowed_tools("f"), many]


def messages_outside(max_items: int) -> list[Any]:
    return [
        [],
        [USER] * (max_items + 1),
        USER,
        "hello",
        [1],
        [{"role": "user"}],
        [{**USER, "role": "operator"}],
        [{"role": "assistant", "tool_calls": [CALL] * (MAX_CALLS + 1)}],
        [{**USER, "tool_calls": [CALL]}],
        [{"role": "tool", "content": "a"}],
        [{"role": "tool", "content": "a", "tool_call_id": "c"}],
    ]


def prompts_outside(max_items: int) -> list[Any]:
    return ["", [], [""], [[]], ["a"] * (max_items + 1), [1, "a"], [-1], [True], 1, {}]


def response_format_outside() -> list[Any]:
    bad: list[Any] = [
        schema(name="n" * 65),
        schema(schema=None),
        schema(schema=True),
        schema(strict="yes"),
        schema(description="d" * (MAX_DESCRIPTION_BYTES + 1)),
        {**SCHEMA, "type": "json_object"},
        {"type": "json_object", "schema": True},
        {"type": "json_object", "value": True},
        {"type": "json_object", "schema": {}, "value": {}},
        {"type": "structural_tag"},
        {"type": "structural_tag", "format": []},
        {"type": "structural_tag", "format": {}, "triggers": ["a"]},
        {"type": "structural_tag", "structures": [{}]},
    ]
    return [*bad, {}, {"type": "xml"}, {"type": "json_schema"}, "text", [], {"type": "text", "x": 1}]


def structured_outputs_outside() -> list[Any]:
    both = {"json": {}, "regex": "a"}
    wrong: list[Any] = [
        {"json": "["},
        {"json": "[]"},
        {"json": '{"a": NaN}'},
        {"json": 1},
        {"json": True},
    ]
    long = {"regex": "a" * (BOUNDS.max_pattern_bytes + 1)}
    longer: list[Any] = [
        {"grammar": "a" * (BOUNDS.max_text_bytes + 1)},
        {"json": " " * (BOUNDS.max_bytes + 1)},
    ]
    lists: list[Any] = [
        {"choice": []},
        {"choice": ["a"] * (BOUNDS.max_choices + 1)},
        {"choice": [""]},
    ]
    return [*wrong, *longer, *lists, both, long, {}, [], {"regex": ""}, {"close": 1}, {"xml": "a"}]


def tool_definitions_outside(max_items: int) -> list[Any]:
    return [
        [tool(f"f{index}") for index in range(max_items + 1)],
        [tool(), tool()],
        [tool("f" * 65)],
        [tool("a b")],
        [tool(description="d" * (MAX_DESCRIPTION_BYTES + 1))],
        [tool(parameters=[])],
        [tool(parameters=True)],
        [tool(strict=1)],
        [tool(other=1)],
        [{**tool(), "type": "custom"}],
        [{"type": "function"}],
        [{"function": {"name": "f"}}],
        [1],
        tool(),
    ]


def tool_choices_outside(max_items: int) -> list[Any]:
    many = allowed_tools(*["f"] * (max_items + 1))
    modes: list[Any] = [allowed_tools(), allowed_tools("f", mode="none"), many]
    return [*modes, "any", 1, [], {}, tool("a b"), {"type": "function"}, {**NAMED, "x": 1}, tool(x=1)]


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "syntax": syntax, "definition": definition}


def namespace(*tools: object, **fields: object) -> dict[str, Any]:
    return {"type": "namespace", "name": "n", "description": "", "tools": list(tools), **fields}


def response_tools_inside(max_items: int) -> list[Any]:
    functions = [{**FUNCTION, "name": f"f{index}"} for index in range(max_items)]
    long = {**CUSTOM, "description": "d" * MAX_DESCRIPTION_BYTES}
    return [
        [],
        functions,
        [namespace(*functions)],
        [{**FUNCTION, "parameters": {}, "strict": True, "defer_loading": True, "async": False}],
        [{**long, "format": {"type": "text"}}, {"type": "web_search"}, {"type": "mcp", "server_label": "a"}],
        [
            {**CUSTOM, "name": "r", "format": grammar("regex", "a" * BOUNDS.max_pattern_bytes)},
            {**CUSTOM, "name": "l", "format": grammar("lark", "a" * BOUNDS.max_text_bytes)},
            namespace(FUNCTION, CUSTOM),
        ],
    ]


def response_tools_outside(max_items: int) -> list[Any]:
    functions = [{**FUNCTION, "name": f"f{index}"} for index in range(max_items + 1)]
    formats: list[Any] = [
        {"type": "grammar", "syntax": "lark"},
        {"type": "grammar", "definition": "a"},
        {"type": "text", "definition": "a"},
        grammar("gbnf", "a"),
        grammar("lark", "a" * (BOUNDS.max_text_bytes + 1)),
        grammar("regex", "a" * (BOUNDS.max_pattern_bytes + 1)),
        "text",
    ]
    return [
        functions,
        [namespace(*functions[:-1]), functions[-1]],
        [namespace()],
        [namespace(namespace(FUNCTION))],
        [namespace({"type": "web_search"})],
        [namespace(FUNCTION), {**FUNCTION, "name": "n__f"}],
        [FUNCTION, {**FUNCTION, "type": "custom"}],
        [tool()],
        [{"type": "function"}],
        [{**FUNCTION, "parameters": True}],
        [{**FUNCTION, "name": "a b"}],
        [{"name": "f"}],
        [1],
        {},
        *([{**CUSTOM, "format": each}] for each in formats),
    ]


def response_tool_choices_inside(max_items: int) -> list[Any]:
    many: list[Any] = [{**FUNCTION, "name": f"f{index}"} for index in range(max_items)]
    some = [
        FUNCTION,
        CUSTOM,
        {**CUSTOM, "namespace": "n"},
        {"type": "namespace", "name": "n"},
        {"type": "mcp"},
    ]
    return [
        *("none", "auto", "required"),
        *(FUNCTION, CUSTOM, {**FUNCTION, "namespace": "n"}, {"type": "web_search"}),
        {"type": "allowed_tools", "mode": "auto", "tools": some},
        {"type": "allowed_tools", "mode": "required", "tools": many},
    ]


def response_tool_choices_outside(max_items: int) -> list[Any]:
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}
    wrong: list[Any] = [
        {**allowed, "mode": "none"},
        {**allowed, "tools": []},
        {**allowed, "tools": [FUNCTION] * (max_items + 1)},
        {**allowed, "tools": [{"type": "function"}]},
        {**allowed, "tools": [1]},
        {"type": "allowed_tools"},
    ]
    return [*wrong, "any", 1, [], {}, {"type": "function"}, {**FUNCTION, "x": 1}, tool("f")]


def input_items_outside(max_items: int) -> list[Any]:
    call, output = ITEMS[4], ITEMS[6]
    parts: list[Any] = [
        {"type": "input_image", "image_url": "data:,"},
        {"type": "input_file", "file_id": "f"},
        {"type": "text", "text": "a"},
        {"type": "input_text"},
        1,
    ]
    items: list[Any] = [
        {"type": "item_reference", "id": "msg_1"},
        {"id": "msg_1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "tool", "content": "a"},
        {"role": "user"},
        {"type": "reasoning", "content": "a"},
        {"type": 1},
        output,
        {},
        1,
        *({"role": "user", "content": [each]} for each in parts),
    ]
    several: list[Any] = [[USER] * (max_items + 1), [call, call], [call, output, output], [output, call]]
    return [[], 1, {}, *several, *([each] for each in items)]
