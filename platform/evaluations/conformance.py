"""The built-in suite `conformance`: does a model call the right tool, with valid arguments, without stray markers, and stop.

Each call is asked for with the grammar, and once more with `unaided`: the model would have written it by itself. Invariant:
the suite follows from this file alone, so that its digest names it in every installation of a release.
"""

import json
from typing import Any, Final

NAME: Final = "conformance"
_MARKERS: Final = r"<\|?/?(tool_call|im_start|im_end|eot_id|python_tag|eom_id)\|?>|\[/?(TOOL_CALLS|AVAILABLE_TOOLS|INST)\]|</?s>"
_CITY: Final = {"city": {"type": "string"}}
_TOOLS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "get_weather": ("Current weather in a city", _CITY),
    "set_timer": ("Start a timer", {"minutes": {"type": "integer", "minimum": 1}}),
    "send_message": ("Send a short message", {"to": {"type": "string"}, "text": {"type": "string"}}),
    "convert_currency": (
        "Convert an amount of money",
        {"amount": {"type": "number"}, "to": {"enum": ["EUR", "USD", "JPY"]}},
    ),
}
_ASKED: Final = (
    ("What is the weather in Lisbon right now?", "get_weather", {"city": "Lisbon"}),
    ("Is it raining in Oslo?", "get_weather", {"city": "Oslo"}),
    ("Set a timer for 12 minutes.", "set_timer", {"minutes": 12}),
    ("Wake me in 45 minutes with a timer.", "set_timer", {"minutes": 45}),
    ("Tell Maria that dinner is ready.", "send_message", {"to": "Maria"}),
    ("Write Tom a message: the train is late.", "send_message", {"to": "Tom"}),
    ("How much are 250 dollars in euros?", "convert_currency", {"amount": 250, "to": "EUR"}),
    ("Convert 80 euros to yen.", "convert_currency", {"amount": 80, "to": "JPY"}),
)
_PLAIN: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("Say hello in one short sentence.", {}),
    ("Name one colour.", {}),
    ("Reply with a JSON object that has the key `ok`.", {"type": "object"}),
    (
        "Give the year of the first moon landing as JSON.",
        {"type": "object", "required": ["year"], "properties": {"year": {"type": "integer"}}},
    ),
)


def conformance_suite() -> bytes:
    """Return the suite as JSONL."""
    return b"".join(json.dumps(case, sort_keys=True).encode() + b"\n" for case in _cases())


def _cases() -> list[dict[str, Any]]:
    tools = [_tool(name, text, properties) for name, (text, properties) in _TOOLS.items()]
    cases: list[dict[str, Any]] = []
    for index, (question, name, arguments) in enumerate(_ASKED, 1):
        asked = {
            "messages": [{"role": "user", "content": question}],
            "tools": tools,
            "max_tokens": 96,
            "parallel_tool_calls": False,
        }
        right = {"tool_calls": [{"name": name, "arguments": arguments}], "finish_reason": "tool_calls"}
        named = {"tool_calls": [{"name": name}], "finish_reason": "tool_calls"}
        forced = {"tool_choice": "required"}
        cases += [
            {**asked, **forced, "id": f"name-{index}", "expect": named},
            {**asked, **forced, "id": f"arguments-{index}", "expect": right},
            {**asked, "id": f"unaided-{index}", "expect": {**right, "unaided": True}},
        ]
    for index, (question, schema) in enumerate(_PLAIN, 1):
        asked = {"messages": [{"role": "user", "content": question}], "max_tokens": 128}
        clean = {"regex": f"^(?![\\s\\S]*(?:{_MARKERS}))", "finish_reason": "stop"}
        if schema:
            held = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            cases.append(
                {
                    **asked,
                    "response_format": held,
                    "id": f"schema-{index}",
                    "expect": {**clean, "schema": schema},
                }
            )
        else:
            cases.append({**asked, "id": f"stopping-{index}", "expect": clean})
            cases.append(
                {**asked, "tools": tools, "id": f"no-call-{index}", "expect": {**clean, "tool_calls": []}}
            )
    return cases


def _tool(name: str, text: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
