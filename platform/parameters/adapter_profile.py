"""Parses an adapter version's profile into a checked `ProfileChange`.

The profile is closed like the parameter table, whose bounds its defaults share: an unknown name is refused, also a chat template.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pydantic import GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.thought import MAX_MARKER_BYTES, MIN_MARKER_BYTES, ThoughtMarkers
from loraplex.platform.errors import UnknownParameter
from loraplex.platform.parameters.request_models import ChatRequest
from loraplex.platform.parameters.request_object import ObjectOf, RequestObject, kind_of, read_object
from loraplex.platform.parameters.value_errors import INVALID, refused
from loraplex.platform.parameters.value_types import Choice, Kind, Text
from loraplex.tenants.models import DECISION_READS, REASONING_STYLES, TOOL_STYLES
from loraplex.tenants.registry.records import ProfileChange, ReasoningStyle

FIELDS: Final = ("tool_style", "reasoning_style", "defaults", "decision")
DEFAULTABLE: Final = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("thinking_token_budget", "reasoning_effort"),
)
_DEFAULTS: Final = f"an object with any of {', '.join(f'`{name}`' for name in DEFAULTABLE)}"
_KINDS: Final[Mapping[str, Kind]] = {name: kind_of(ChatRequest.model_fields[name]) for name in DEFAULTABLE}


class _Defaults(RequestObject):
    allowed: ClassVar[str] = _DEFAULTS


_PROFILE_DEFAULTS: Final = create_model(
    "ProfileDefaults",
    __base__=_Defaults,
    **{name: (Annotated[Any, kind], None) for name, kind in _KINDS.items()},  # type: ignore[call-overload]
)
_MARKER: Final = Text(MAX_MARKER_BYTES, MIN_MARKER_BYTES)
_MARKERS: Final = f'{{"start": …, "end": …}}, two markers of {MIN_MARKER_BYTES}..{MAX_MARKER_BYTES} printable ASCII characters'


class ReasoningMarkers(RequestObject):
    """What begins and what ends a version's thought."""

    allowed: ClassVar[str] = _MARKERS
    start: Annotated[str, _MARKER]
    end: Annotated[str, _MARKER]


@dataclass(frozen=True)
class _ReasoningStyle(Kind):
    allowed = f"{Choice(REASONING_STYLES).allowed} or {_MARKERS}"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def _read(self, value: object) -> ReasoningStyle:
        if isinstance(value, str) and value in REASONING_STYLES:
            return value
        if not isinstance(value, dict):
            raise refused(self.allowed, value)
        markers = ReasoningMarkers.check(value).model_dump()
        try:
            ThoughtMarkers(**markers)
        except GrammarInvalid as error:
            raise PydanticCustomError(INVALID, f"must be two markers that divide a text: {error}.") from None
        return markers


class DecisionProfile(RequestObject):
    """How decisions read the options of a question."""

    allowed: ClassVar[str] = '{"read": "labels"} or {"read": "values"}'
    read: Annotated[str, Choice(DECISION_READS)]


class _Profile(RequestObject):
    allowed: ClassVar[str] = "a JSON object"
    tool_style: Annotated[str | None, Choice(TOOL_STYLES)] = None
    reasoning_style: Annotated[ReasoningStyle | None, _ReasoningStyle()] = None
    defaults: Annotated[RequestObject | None, ObjectOf(_PROFILE_DEFAULTS)] = None
    decision: Annotated[DecisionProfile | None, ObjectOf(DecisionProfile)] = None


def read_profile_change(body: Mapping[str, object]) -> ProfileChange:
    """Return the fields that `body` names; null removes a value. `defaults` replaces all defaults. Raises `InvalidParameter`.

    So an unknown name is refused with null too; within `defaults`, as in a request, null counts as absent.
    """
    for name in body:
        if name not in FIELDS:
            raise UnknownParameter(
                f"Unknown field `{name[:64]}`; allowed: {', '.join(FIELDS)}.", param=name[:64]
            )
    profile = read_object(_Profile, body)
    change = ProfileChange()
    if "tool_style" in body:
        change["tool_style"] = profile.tool_style
    if "reasoning_style" in body:
        change["reasoning_style"] = profile.reasoning_style
    if "defaults" in body:
        change["defaults"] = (
            {} if profile.defaults is None else profile.defaults.model_dump(exclude_unset=True)
        )
    if "decision" in body:
        change["decision"] = None if profile.decision is None else profile.decision.model_dump()
    return change


def profile_schema() -> dict[str, Any]:
    """Build the `requestBody` of the operation that changes a profile."""
    defaults = {name: {"description": f"Must be {kind.allowed}."} for name, kind in _KINDS.items()}
    properties = {
        "tool_style": {"enum": [*TOOL_STYLES, None]},
        "reasoning_style": {
            "anyOf": [{"enum": [*REASONING_STYLES, None]}, ReasoningMarkers.model_json_schema()]
        },
        "defaults": {"type": ["object", "null"], "additionalProperties": False, "properties": defaults},
        "decision": {"anyOf": [DecisionProfile.model_json_schema(), {"type": "null"}]},
    }
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
