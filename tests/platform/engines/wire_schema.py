"""Describes all messages between gateways and engines, and those of Ray replicas: `python -m tests.platform.engines.wire_schema` writes them as JSON.

At a release, its output replaces `last_release.json`, with which the next release is compared.
"""

import json
import sys
import typing
from types import UnionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from loraplex.platform.engines import wire
from loraplex.platform.ray import messages

Fields: TypeAlias = dict[str, str]
"""By name the type as text; with a question mark where a message may lack the field."""


def wire_schema() -> dict[str, Any]:
    """The version of the protocol, and tag and fields of every struct in a message."""
    structs: dict[str, Any] = {}
    for hint in (wire.ToEngine, wire.ToGateway, *vars(messages).values()):
        for message in _structs_in(hint):
            _describe(message, structs)
    return {"protocol": wire.PROTOCOL_VERSION, "structs": structs}


def _describe(struct: Any, structs: dict[str, Any]) -> None:
    name = f"ray.{struct.__name__}" if struct.__module__ == messages.__name__ else struct.__name__
    if name in structs:
        return
    hints = get_type_hints(struct)
    fields: Fields = {
        each.encode_name: _text(hints[each.name]) + ("" if each.required else "?")
        for each in msgspec.structs.fields(struct)
    }
    structs[name] = {"tag": struct.__struct_config__.tag, "fields": fields}
    for hint in hints.values():
        for nested in _structs_in(hint):
            _describe(nested, structs)


def _structs_in(hint: Any) -> list[Any]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [found for part in get_args(hint) for found in _structs_in(part)]


def _text(hint: Any) -> str:
    """The type as text, the same for `X | None` and `Optional[X]`; of a named tuple its parts, whose order is the message."""
    if hasattr(hint, "_fields"):
        return f"tuple[{', '.join(map(_text, get_type_hints(hint).values()))}]"
    if get_origin(hint) in (UnionType, typing.Union):
        return " | ".join(sorted(map(_text, get_args(hint))))
    if get_args(hint):
        return (
            f"{get_origin(hint).__name__}[{', '.join(map(_text, get_args(hint)))}]"
            if isinstance(get_origin(hint), type)
            else str(hint)
        )
    return hint.__name__ if isinstance(hint, type) else repr(hint)


if __name__ == "__main__":
    json.dump(wire_schema(), sys.stdout, indent=1)
    print()
