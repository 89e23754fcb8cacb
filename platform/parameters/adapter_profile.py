"""Parses an adapter version's profile into a checked `ProfileChange`.

The profile is closed like the parameter table, whose bounds its defaults share: an unknown name is refused, also a chat template.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import create_model

from loraplex.platform.errors import UnknownParameter
from loraplex.platform.parameters.request_models import ChatRequest
from loraplex.platform.parameters.request_object import ObjectOf, RequestObject, kind_of, read_object
from loraplex.platform.parameters.value_types import Choice, Kind
from loraplex.tenants.models import TOOL_STYLES
from loraplex.tenants.registry.records import ProfileChange

FIELDS: Final = ("tool_style", "defaults")
DEFAULTABLE: Final = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
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


class _Profile(RequestObject):
    allowed: ClassVar[str] = "a JSON object"
    tool_style: Annotated[str | None, Choice(TOOL_STYLES)] = None
    defaults: Annotated[RequestObject | None, ObjectOf(_PROFILE_DEFAULTS)] = None


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
    if "defaults" in body:
        change["defaults"] = (
            {} if profile.defaults is None else profile.defaults.model_dump(exclude_unset=True)
        )
    return change


def profile_schema() -> dict[str, Any]:
    """Build the `requestBody` of the operation that changes a profile."""
    defaults = {name: {"description": f"Must be {kind.allowed}."} for name, kind in _KINDS.items()}
    properties = {
        "tool_style": {"enum": [*TOOL_STYLES, None]},
        "defaults": {"type": ["object", "null"], "additionalProperties": False, "properties": defaults},
    }
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
