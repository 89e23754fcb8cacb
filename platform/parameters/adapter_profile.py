"""Parses an adapter version's profile into a checked `ProfileChange`.

The profile is closed like the parameter table, whose bounds its defaults share: an unknown name is refused, also a chat template.
"""

from collections.abc import Mapping
from typing import Any, Final

from loraplex.platform.errors import UnknownParameter
from loraplex.platform.parameters.parameter_table import Parameter, table
from loraplex.platform.parameters.value_types import Choice, refuse
from loraplex.tenants.models import TOOL_STYLES
from loraplex.tenants.registry.adapters import ProfileChange

FIELDS: Final = ("tool_style", "defaults")
DEFAULTABLE: Final = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_STYLE: Final = Choice(TOOL_STYLES)
_ROWS: Final[Mapping[str, Parameter]] = {name: table("chat")[name] for name in DEFAULTABLE}
_DEFAULTS: Final = f"an object with any of {', '.join(f'`{name}`' for name in DEFAULTABLE)}"


def read_profile_change(body: Mapping[str, object]) -> ProfileChange:
    """Return the fields that `body` names; null removes a value. `defaults` replaces all defaults. Raises `InvalidParameter`."""
    for name in body:
        if name not in FIELDS:
            raise UnknownParameter(
                f"Unknown field `{name[:64]}`; allowed: {', '.join(FIELDS)}.", param=name[:64]
            )
    change = ProfileChange()
    if "tool_style" in body:
        style = body["tool_style"]
        change["tool_style"] = None if style is None else _STYLE.read("tool_style", style)
    if "defaults" in body:
        change["defaults"] = _read_defaults(body["defaults"])
    return change


def _read_defaults(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse("defaults", value, _DEFAULTS)
    for name in value:
        if name not in _ROWS:
            path = f"defaults.{name[:64]}"
            raise UnknownParameter(f"Unknown field `{path}`: `defaults` is {_DEFAULTS}.", param=path)
    return {
        name: _ROWS[name].kind.read(f"defaults.{name}", each)
        for name, each in value.items()
        if each is not None
    }


def profile_schema() -> dict[str, Any]:
    """Build the `requestBody` of the operation that changes a profile."""
    defaults = {name: {"description": f"Must be {row.kind.allowed}."} for name, row in _ROWS.items()}
    properties = {
        "tool_style": {"enum": [*TOOL_STYLES, None]},
        "defaults": {"type": ["object", "null"], "additionalProperties": False, "properties": defaults},
    }
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
