"""Fifty output constraints: schemas and tool lists as applications write them.

Each is small enough for a small model to finish, and together they use what people use: nesting, enums, references,
recursion, bounds on arrays, numbers and strings, patterns, formats, unions, null, open and closed objects.
"""

from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]

SHORT: Schema = {"type": "string", "maxLength": 24}
WORD: Schema = {"type": "string", "pattern": "^[a-z]{2,10}$"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 999}
YES: Schema = {"type": "boolean"}


@dataclass(frozen=True)
class Form:
    """Either `schema` or `tools` (name -> schema of arguments). `needs_validator`: only the validator can check it, so 422 is a valid response."""

    name: str
    schema: Schema | None = None
    tools: dict[str, Schema] = field(default_factory=dict)
    choice: str = "required"
    strict: bool = False
    needs_validator: bool = False


def obj(required: "list[str] | None" = None, *, closed: bool = True, **properties: Schema) -> Schema:
    """An object; all its fields are required unless named."""
    names = list(properties) if required is None else required
    schema: Schema = {"type": "object", "properties": properties, "required": names}
    return {**schema, "additionalProperties": False} if closed else schema


def arr(items: Schema, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def fmt(name: str) -> Schema:
    return {"type": "string", "format": name}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


POINT = obj(x=number(-10, 10), y=number(-10, 10))
ADDRESS = obj(street=SHORT, zip={"type": "string", "pattern": "^[0-9]{5}$"}, city=WORD)
TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {"node": obj(["label"], label=WORD, children=arr({"$ref": "#/$defs/node"}, 0, 2))},
}
EXPRESSION: Schema = {
    "$ref": "#/$defs/expression",
    "$defs": {
        "expression": {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 9},
                obj(
                    op=one_of("add", "mul"),
                    left={"$ref": "#/$defs/expression"},
                    right={"$ref": "#/$defs/expression"},
                ),
            ]
        }
    },
}

SCHEMAS: dict[str, Schema] = {
    "person": obj(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}, city=WORD),
    "unbounded text": obj(title={"type": "string"}, done=YES),
    "sentiment": obj(label=one_of("positive", "negative", "neutral"), confidence=number(0, 1)),
    "one enum": one_of("red", "green", "blue"),
    "mixed enum": one_of("none", 0, False, None),
    "constant": obj(kind={"const": "ping"}, version={"const": 2}),
    "boolean": YES,
    "bare integer": {"type": "integer", "minimum": -50, "maximum": 50},
    "exclusive bounds": obj(p={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    "multiples": obj(step={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    "array of numbers": arr(number(0, 100), 1, 4),
    "array of enums": arr(one_of("a", "b", "c"), 2, 4),
    "tuple": {"type": "array", "prefixItems": [WORD, COUNT, YES], "items": False, "minItems": 3},
    "matrix": arr(arr(COUNT, 2, 2), 1, 3),
    "nested objects": obj(user=obj(name=WORD, address=ADDRESS)),
    "three levels": obj(a=obj(b=obj(c=obj(value=COUNT)))),
    "array of objects": obj(items=arr(obj(sku=WORD, quantity=COUNT), 1, 3)),
    "invoice": obj(
        number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        lines=arr(obj(text=SHORT, amount=number(0, 1000)), 1, 2),
        paid=YES,
    ),
    "optional fields": obj(["id"], id=COUNT, nick=WORD, note=SHORT),
    "all optional": obj([], a=COUNT, b=WORD),
    "open object": obj(["id"], closed=False, id=COUNT),
    "map of integers": {"type": "object", "additionalProperties": COUNT, "maxProperties": 3},
    "map with a known key": {
        "type": "object",
        "properties": {"id": COUNT},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "nullable": obj(middle_name=nullable(WORD), age=nullable(COUNT)),
    "type list": obj(value={"type": ["integer", "null", "boolean"]}),
    "union of objects": {"anyOf": [obj(circle=number(0, 9)), obj(square=number(0, 9), filled=YES)]},
    "tagged union": {
        "anyOf": [obj(type={"const": "cat"}, lives=COUNT), obj(type={"const": "dog"}, barks=YES)]
    },
    "union of kinds": obj(id={"anyOf": [{"type": "integer", "minimum": 1}, WORD]}),
    "reference": {
        **obj(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
        "$defs": {"point": POINT},
    },
    "tree": TREE,
    "expression": EXPRESSION,
    "linked list": {
        "$ref": "#/$defs/cell",
        "$defs": {"cell": obj(head=COUNT, tail=nullable({"$ref": "#/$defs/cell"}))},
    },
    "date": obj(day=fmt("date")),
    "date and time": obj(at=fmt("date-time")),
    "identifiers": obj(id=fmt("uuid"), host=fmt("ipv4")),
    "email": obj(to=fmt("email")),
    "phone": obj(phone={"type": "string", "pattern": r"^\+[0-9]{6,12}$"}),
    "length of text": obj(code={"type": "string", "minLength": 4, "maxLength": 8}),
    "merged": {"allOf": [obj(["a"], closed=False, a=COUNT), obj(["b"], closed=False, b=YES)]},
    "unusual keys": {
        "type": "object",
        "properties": {"a b": COUNT, "ü": YES, 'quo"te': WORD, "slash/": COUNT},
        "required": ["a b", 'quo"te'],
        "additionalProperties": False,
    },
    "conditions": {
        "type": "object",
        "properties": {"kind": one_of("a", "b"), "size": COUNT},
        "required": ["kind"],
        "additionalProperties": False,
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["size"]},
    },
    "different items": {**arr(one_of("x", "y", "z", "w", "v"), 2, 3), "uniqueItems": True},
}
NEEDS_VALIDATOR = ("conditions", "different items")
STRICT = ("person", "sentiment", "tree", "union of objects", "nullable", "invoice")

WEATHER = obj(city=WORD, unit=one_of("celsius", "fahrenheit"))
SEARCH = obj(["query"], query=SHORT, limit={"type": "integer", "minimum": 1, "maximum": 20})
EVENT = obj(title=SHORT, day=fmt("date"), guests=arr(WORD, 0, 2))
MOVE = obj(to={"$ref": "#/$defs/point"}) | {"$defs": {"point": POINT}}
NOTHING = obj()
MANY = {f"tool_{index:02}": obj(value=COUNT, flag=YES) for index in range(20)}

FORMS: tuple[Form, ...] = (
    *(
        Form(name, schema, strict=name in STRICT, needs_validator=name in NEEDS_VALIDATOR)
        for name, schema in SCHEMAS.items()
    ),
    Form("one tool", tools={"get_weather": WEATHER}, strict=True),
    Form("three tools", tools={"get_weather": WEATHER, "search": SEARCH, "create_event": EVENT}),
    Form("tools if it likes", tools={"get_weather": WEATHER, "search": SEARCH}, choice="auto"),
    Form("a named tool", tools={"search": SEARCH, "move": MOVE}, choice="search"),
    Form("twenty tools", tools=MANY),
    Form("references in arguments", tools={"move": MOVE}),
    Form("no arguments", tools={"stop": NOTHING, "search": SEARCH}),
    Form("a call or a document", SCHEMAS["sentiment"], tools={"get_weather": WEATHER}, choice="auto"),
)
