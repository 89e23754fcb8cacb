"""Schemas of clients are enforced in full, also with strict: pydantic, the openai client's strict form, zod, OpenAPI."""

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    RootModel,
    SecretStr,
    StringConstraints,
)
from tests.grammar.grammar_walks import Walks

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import SchemaNotEnforceable, SchemaNotSatisfied
from loraplex.grammar.json_schema.dialect import to_newest
from loraplex.grammar.json_schema.validator import Validator

ZOD = json.loads((Path(__file__).parent / "zod_schemas.json").read_text("utf-8"))
"""By `z.toJSONSchema` of zod 4.6, for draft 7."""


class Color(str, Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    street: str = Field(description="Name and number", examples=["1 Rue X"])
    city: str = "Paris"
    code: Annotated[str, Field(pattern=r"^\d{5}(-\d{4})?$")]


class Optionals(BaseModel):
    a: int | None = None
    b: str | None
    c: Address | None = Field(default=None, description="beside a reference")
    d: list[Address] | None = None


class Choices(BaseModel):
    a: Color
    b: Literal["x", "y"]
    c: Literal[1, "a"] | None
    d: Literal["only"]


class Times(BaseModel):
    a: datetime
    b: date
    c: time
    d: timedelta


class Texts(BaseModel):
    a: UUID
    b: AnyUrl
    c: Path
    d: IPv4Address
    e: SecretStr
    f: Annotated[str, StringConstraints(min_length=2, max_length=10, pattern=r"^\w+$")]
    g: bytes


class Maps(BaseModel):
    a: dict[str, int] = Field(min_length=1)
    b: dict[str, Address]
    c: dict[Annotated[str, Field(pattern="^[a-z]+$")], int]
    d: dict[Color, int]
    e: dict[Literal["x", "y"], list[float]]
    f: dict[str, Any]


class Lists(BaseModel):
    a: list[int] = Field(min_length=1, max_length=3)
    b: tuple[int, str]
    c: tuple[float, ...]
    d: list[list[Color]]
    e: list[Any] = []


class Numbers(BaseModel):
    a: int = Field(ge=1, le=10)
    b: float = Field(gt=0, lt=10)
    c: PositiveInt
    d: Annotated[int, Field(multiple_of=5)]
    e: Decimal
    f: Decimal = Field(max_digits=10, decimal_places=2)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Unions(BaseModel):
    a: Cat | Dog = Field(discriminator="kind")
    b: list[Annotated[Cat | Dog, Field(discriminator="kind")]]
    c: int | str | list[str] | None
    d: Cat | Dog


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []
    left: Optional["Tree"] = None


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int = Field(alias="$a-B/c", title="T", deprecated=True)


class Addresses(RootModel[list[Address]]):
    pass


MODELS = [Address, Optionals, Choices, Times, Texts, Maps, Lists, Numbers, Unions, Tree, Closed, Addresses]
PLAIN: dict[str, Any] = {
    "openai": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location"],
    },
    "no arguments": {"type": "object", "properties": {}},
    "recursive": {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["div", "button"]},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["type", "children"],
        "additionalProperties": False,
    },
    "nullable": {"type": "object", "properties": {"a": {"type": ["string", "null"], "enum": ["x", None]}}},
    "mcp": {
        "type": "object",
        "properties": {
            "page": {"type": "number", "minimum": 1},
            "dryRun": {"type": "boolean", "default": False},
        },
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    "either name": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "described values": {"oneOf": [{"const": "x", "description": "X"}, {"const": "y", "title": "Y"}]},
    "openapi": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "format": "int64"},
            "b": {"type": "number", "format": "double"},
            "c": {"type": "string", "format": "password"},
            "d": {"allOf": [{"$ref": "#/$defs/x"}], "description": "beside allOf"},
        },
        "$defs": {"x": {"type": "object", "properties": {"y": {"type": "integer"}}}},
    },
    "zod 4.0": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
}


def enforcement(schema: Any) -> str:
    return plan_enforcement(schema, strict=True, param="schema", limits=SchemaLimits()).enforcement


@pytest.mark.parametrize("model", MODELS)
def test_pydantic(model: type[BaseModel]) -> None:
    assert enforcement(model.model_json_schema()) == "full"
    assert enforcement(model.model_json_schema(mode="serialization")) == "full"


@pytest.mark.parametrize("model", [model for model in MODELS if model not in (Maps, Addresses)])
def test_the_openai_client(model: type[BaseModel]) -> None:
    assert enforcement(to_strict_json_schema(model)) == "full"


@pytest.fixture(scope="module")
def walks() -> Walks:
    return Walks(byte_vocabulary())


@pytest.mark.parametrize("schema", [*ZOD.values(), *PLAIN.values()], ids=[*ZOD, *PLAIN])
def test_zod_and_others(walks: Walks, schema: Any) -> None:
    """And what their grammars write is valid."""
    plan = plan_enforcement(schema, strict=True, param="schema", limits=SchemaLimits())
    assert plan.enforcement == "full"
    validator = Validator(to_newest(schema, param="schema"))
    start = walks.start(plan.schema, "llguidance")
    for text in walks.texts(start, 8, seed=1):
        try:
            validator.validate(text)
        except SchemaNotSatisfied as error:
            # Both are JSON, and no schema speaks of them.
            assert "a key twice" in str(error) or "a number beyond" in str(error), text


@pytest.mark.parametrize(
    "schema", [{"format": "base64"}, {"type": ["string", "null"], "format": "ipvanyaddress"}]
)
def test_a_format_that_would_forbid_texts_and_is_not_known_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaNotEnforceable, match="is not known"):
        enforcement(schema)
