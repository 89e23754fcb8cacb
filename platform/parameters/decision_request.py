"""The body of `/v1/decisions` (OpenAI Decisions API): one input, and typed questions about it.

Invariant: whatever answers a question is one of the options that the request names, each of which is there once.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import Field, GetCoreSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.chat_messages import Content, RefusalPart
from loraplex.platform.parameters.request_models import (
    ACCEPTED,
    MAX_SALT_BYTES,
    ModelRequest,
    PromptCacheOptions,
)
from loraplex.platform.parameters.request_object import ObjectOf, RequestObject
from loraplex.platform.parameters.responses_input import (
    CALL_ITEMS,
    CallOutputItem,
    InputItem,
    InputItems,
    ItemTextPart,
    MessageItem,
)
from loraplex.platform.parameters.responses_tools import OneOf
from loraplex.platform.parameters.value_errors import INVALID, checked, refused
from loraplex.platform.parameters.value_types import Choice, Kind, ListOf, Text

MAX_QUESTIONS: Final = 400
MAX_OPTIONS: Final = 255
MAX_LEVELS: Final = 10
MAX_BREAKPOINTS: Final = 4
MAX_JSON_DEPTH: Final = 32
MAX_JSON_VALUES: Final = 10_000
MAX_JSON_BYTES: Final = 256 << 10
_BREAKPOINT: Final = "prompt_cache_breakpoint"
_SCALAR: Final = str | int | float | None
_NAME: Final = Text(256)
_DESCRIPTION: Final = Text(4096, min_bytes=0)
_PART: Final = '{"type": "input_text", "text": …} or {"type": "input_json", "data": …}'


@dataclass(frozen=True)
class JsonData(Kind):
    """An object, or a list of objects. It is read as its compact JSON."""

    allowed = (
        f"an object or a list of objects, of at most {MAX_JSON_DEPTH} levels, {MAX_JSON_VALUES} values "
        f"and {MAX_JSON_BYTES} bytes"
    )

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        single = core_schema.dict_schema()
        documented = core_schema.union_schema([single, core_schema.list_schema(single)])
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=documented)

    def _read(self, value: object) -> str:
        members = value if isinstance(value, list) else [value]
        if not all(isinstance(each, dict) for each in members):
            raise refused(self.allowed, value)
        level: list[Any] = [value]
        count = 1
        for _ in range(MAX_JSON_DEPTH):
            inner = (each.values() if isinstance(each, dict) else each for each in level)
            level = [each for values in inner if not isinstance(values, _SCALAR) for each in values]
            count += len(level)
        if count > MAX_JSON_VALUES or any(isinstance(each, dict | list) for each in level):
            raise refused(self.allowed, value)
        try:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            fits = len(text.encode()) <= MAX_JSON_BYTES
        except ValueError:
            # Of half a surrogate pair, or of too many digits.
            fits = False
        if not fits:
            raise refused(self.allowed, value)
        return text


class JsonPart(RequestObject):
    """A part that is data."""

    allowed: ClassVar[str] = '{"type": "input_json", "data": …}'
    type: Annotated[str, Choice(("input_json",))]
    data: Annotated[str, JsonData()]


@dataclass(frozen=True)
class Evidence(Content):
    """Text, or parts of text and JSON, each on lines of its own."""

    part: type[ItemTextPart] = ItemTextPart
    types: tuple[str, ...] = ("input_text", "output_text")
    least: int = 0
    between: str = "\n"

    def _part_models(self) -> tuple[type[RequestObject], ...]:
        return *super()._part_models(), JsonPart

    def _read_part(self, value: object) -> str:
        if isinstance(value, dict) and value.get("type") == "input_json":
            return JsonPart.check(value).data
        if isinstance(value, dict) and value.get("type") == "refusal":
            return RefusalPart.check(value).refusal
        return super()._read_part(value)


class EvidenceMessage(MessageItem):
    """A message. `type` may be absent."""

    content: Annotated[str, Evidence()]


class EvidenceOutput(CallOutputItem):
    """The result of a call of either type."""

    output: Annotated[str, Evidence()]


@dataclass(frozen=True)
class OptionValue(Kind):
    """What a choice stands for."""

    allowed = "true, false or a string of 1..1024 bytes in UTF-8"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = [core_schema.bool_schema(strict=True), Text(1024).schema(handler)]
        return checked(core_schema.union_schema([*kinds]), self.allowed)


class Option(RequestObject):
    """One choice of a question."""

    allowed: ClassVar[str] = '{"value": …, "description"?: …}'
    value: Annotated[str | bool, OptionValue()]
    description: Annotated[str, _DESCRIPTION] = ""


class Level(RequestObject):
    """One level of a score, counted from 0."""

    allowed: ClassVar[str] = '{"label": …, "description"?: …}'
    label: Annotated[str, Text(1024)]
    description: Annotated[str, _DESCRIPTION] = ""


class _Question(RequestObject):
    instructions: Annotated[str, Evidence()]
    name: Annotated[str | None, _NAME] = None
    model: Annotated[str | None, Text(256)] = None


class PredicateQuestion(_Question):
    """How likely a statement about the input is true."""

    allowed: ClassVar[str] = '{"type": "predicate", instructions, name?, model?}'
    type: Annotated[str, Choice(("predicate",))]


class ChoiceQuestion(_Question):
    """Which of several options the input calls for."""

    allowed: ClassVar[str] = '{"type": "choice", instructions, choices, name?, model?}'
    type: Annotated[str, Choice(("choice",))]
    choices: Annotated[list[Option], ListOf(Option, 2, MAX_OPTIONS, f"choices {Option.allowed}")]

    @field_validator("choices")
    @classmethod
    def _differ(cls, choices: list[Option]) -> list[Option]:
        seen: dict[tuple[type, str | bool], int] = {}
        for index, each in enumerate(choices):
            first = seen.setdefault((type(each.value), each.value), index)
            if first != index:
                message = f"has the value of choice {first} again as that of choice {index}: each must be there once."
                raise PydanticCustomError(INVALID, message)
        return choices


class ScoreQuestion(_Question):
    """How far up ordered levels the input is."""

    allowed: ClassVar[str] = '{"type": "score", instructions, levels, name?, model?}'
    type: Annotated[str, Choice(("score",))]
    levels: Annotated[list[Level], ListOf(Level, 2, MAX_LEVELS, f"levels {Level.allowed}, lowest first")]


Question: TypeAlias = PredicateQuestion | ChoiceQuestion | ScoreQuestion
_QUESTIONS: Final = ListOf(
    OneOf({"predicate": PredicateQuestion, "choice": ChoiceQuestion, "score": ScoreQuestion}),
    *(1, MAX_QUESTIONS, "questions of type predicate, choice or score"),
)
_INPUT: Final = InputItems(
    (
        ("message", EvidenceMessage),
        *CALL_ITEMS,
        ("function_call_output", EvidenceOutput),
        ("custom_tool_call_output", EvidenceOutput),
    )
)


class DecisionRequest(ModelRequest):
    """The body of `/v1/decisions`."""

    input: Annotated[tuple[InputItem, ...], _INPUT] = Field(
        description=f"what the questions are about; parts {_PART}"
    )
    questions: Annotated[list[Question], _QUESTIONS] = Field(
        description="answered in their order; `model` of one: another adapter of the tenant for it"
    )
    prompt_cache_key: Annotated[str | None, Text(512, min_bytes=0)] = Field(
        None,
        description="names the session of the request, for usage and `tokens_per_session`; prefixes are cached without it",
    )
    prompt_cache_options: Annotated[PromptCacheOptions | None, ObjectOf(PromptCacheOptions)] = Field(
        None, description=ACCEPTED
    )
    safety_identifier: Annotated[str | None, Text(512, min_bytes=0)] = Field(None, description=ACCEPTED)
    cache_salt: Annotated[str | None, Text(MAX_SALT_BYTES)] = Field(
        None, description="separates cached prefixes within the tenant"
    )

    @model_validator(mode="before")
    @classmethod
    def _check_breakpoints(cls, value: object) -> object:
        # What is cached does not depend on them: every full block is.
        for count, (place, given) in enumerate(_breakpoints(value), 1):
            if given != {"mode": "explicit"}:
                raise InvalidParameter(f'`{place}` must be {{"mode": "explicit"}}.', param=place)
            if count > MAX_BREAKPOINTS:
                message = f"`{place}` is one more than the {MAX_BREAKPOINTS} that a request may have."
                raise InvalidParameter(message, param=place)
        return value


def _breakpoints(body: object) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each breakpoint."""
    for name, fields in (("input", ("content", "output")), ("questions", ("instructions",))):
        items = body.get(name) if isinstance(body, dict) else None
        for index, item in enumerate(items if isinstance(items, list) else ()):
            for field in fields:
                parts = item.get(field) if isinstance(item, dict) else None
                for number, part in enumerate(parts if isinstance(parts, list) else ()):
                    if isinstance(part, dict) and part.get(_BREAKPOINT) is not None:
                        yield f"{name}[{index}].{field}[{number}].{_BREAKPOINT}", part[_BREAKPOINT]
