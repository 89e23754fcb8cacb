"""What `bench grammar` asks for: three shapes of grammar, each with texts it generates, and a tool list as requests carry it.

Invariant: every text of a shape is one its grammar allows, to the letter and in the schema's order of fields.
"""

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of
from loraplex.grammar.tools.call_tree import calls_tree
from loraplex.grammar.tree import JsonValue, Node
from loraplex.platform.bench.workload import WORDS

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GrammarShape:
    """`text_of`: seed -> one answer."""

    name: str
    node: Node
    text_of: Callable[[int], str]


def closed_object(**properties: Schema) -> Schema:
    """An object of exactly these fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT: Schema = {"type": "string"}
THREE_FIELDS = closed_object(name=TEXT, age={"type": "integer"}, city=TEXT)
TWELVE_FIELDS = closed_object(
    id={"type": "string", "format": "uuid"},
    name={"type": "string", "maxLength": 40},
    age={"type": "integer", "minimum": 0, "maximum": 150},
    score={"type": "number"},
    active={"type": "boolean"},
    role={"enum": ["admin", "editor", "viewer", "guest"]},
    email={"type": "string", "format": "email"},
    joined={"type": "string", "format": "date"},
    tags={"type": "array", "items": TEXT, "maxItems": 5},
    address=closed_object(street=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
    note={"anyOf": [TEXT, {"type": "null"}]},
    level={"enum": [1, 2, 3]},
)
TOOLS: dict[str, Schema] = {
    "get_weather": closed_object(city=TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
    "search_documents": closed_object(query=TEXT, limit={"type": "integer", "minimum": 1, "maximum": 50}),
    "send_message": closed_object(recipient=TEXT, subject=TEXT, urgent={"type": "boolean"}),
    "create_event": closed_object(title=TEXT, date={"type": "string", "format": "date"}, guests=TEXT),
    "convert_currency": closed_object(amount={"type": "number"}, source=TEXT, target=TEXT),
    "list_files": closed_object(folder=TEXT, recursive={"type": "boolean"}),
    "translate_text": closed_object(text=TEXT, language={"enum": ["de", "en", "fr", "es"]}),
    "set_reminder": closed_object(note=TEXT, minutes={"type": "integer", "minimum": 1, "maximum": 1440}),
}


def request_tools() -> list[dict[str, Any]]:
    """`TOOLS` as a chat request carries them."""
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in TOOLS.items()
    ]


def grammar_shapes() -> list[GrammarShape]:
    calls = calls_tree(syntax_of(ToolStyle.LLAMA3), TOOLS, parallel=False)
    return [
        GrammarShape("3 fields", JsonValue(THREE_FIELDS), lambda seed: json.dumps(_three_fields(seed))),
        GrammarShape("12 fields", JsonValue(TWELVE_FIELDS), lambda seed: json.dumps(_twelve_fields(seed))),
        GrammarShape(f"{len(TOOLS)} tools", calls, _call),
    ]


def _words(drawn: random.Random, most: int) -> str:
    return " ".join(drawn.choices(WORDS, k=drawn.randint(1, most)))


def _three_fields(seed: int) -> dict[str, Any]:
    drawn = random.Random(seed)
    return {"name": _words(drawn, 3), "age": drawn.randint(0, 99), "city": _words(drawn, 2)}


def _twelve_fields(seed: int) -> dict[str, Any]:
    drawn = random.Random(seed)
    return {
        "id": str(uuid.UUID(int=drawn.getrandbits(128), version=4)),
        "name": _words(drawn, 3),
        "age": drawn.randint(0, 150),
        "score": round(drawn.uniform(0, 100), 2),
        "active": drawn.random() < 0.5,
        "role": drawn.choice(TWELVE_FIELDS["properties"]["role"]["enum"]),
        "email": f"{drawn.choice(WORDS)}@{drawn.choice(WORDS)}.org",
        "joined": f"20{drawn.randint(10, 29)}-{drawn.randint(1, 12):02}-{drawn.randint(1, 28):02}",
        "tags": [drawn.choice(WORDS) for _ in range(drawn.randint(0, 5))],
        "address": {"street": _words(drawn, 3), "zip": f"{drawn.randint(0, 99999):05}"},
        "note": None if drawn.random() < 0.5 else _words(drawn, 10),
        "level": drawn.randint(1, 3),
    }


def _call(seed: int) -> str:
    drawn = random.Random(seed)
    name = drawn.choice(list(TOOLS))
    arguments = {field: _argument(drawn, schema) for field, schema in TOOLS[name]["properties"].items()}
    syntax = syntax_of(ToolStyle.LLAMA3)
    return (
        f"{syntax.opening}{syntax.head(name)}{json.dumps(arguments)}{syntax.after_arguments}{syntax.closing}"
    )


def _argument(drawn: random.Random, schema: Schema) -> object:
    if "enum" in schema:
        return drawn.choice(schema["enum"])
    if schema.get("format") == "date":
        return f"2026-{drawn.randint(1, 12):02}-{drawn.randint(1, 28):02}"
    match schema["type"]:
        case "integer":
            return drawn.randint(schema["minimum"], schema["maximum"])
        case "number":
            return round(drawn.uniform(0, 1000), 2)
        case "boolean":
            return drawn.random() < 0.5
    return _words(drawn, 6)
