"""Gateways and engines of this release and of the last one understand each other, while one is replaced by the other."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.platform.engines.wire_schema import wire_schema

from loraplex.engine.messages import Delta, EngineStats
from loraplex.platform.engines import wire

LAST: dict[str, Any] = json.loads((Path(__file__).parent / "last_release.json").read_text())


ASKED_FOR = {"Scored"}
"""Events that answer only what the last release does not ask for."""


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What the other release would refuse or misread. A field may be added if it may be absent: it is ignored there."""
    found = [f"protocol {before['protocol']} became {now['protocol']}"] * (
        before["protocol"] != now["protocol"]
    )
    for name, struct in before["structs"].items():
        current = now["structs"].get(name)
        if current is None or current["tag"] != struct["tag"]:
            found.append(f"{name} is gone, or has another tag")
            continue
        for field in struct["fields"].keys() | current["fields"].keys():
            old, new = struct["fields"].get(field), current["fields"].get(field)
            added = old is None and new is not None and new.endswith("?")
            kept = old is not None and new is not None and _asked_for(old) == _asked_for(new)
            if not (added or kept):
                found.append(f"{name}.{field}: {old} became {new}")
    return found


def _asked_for(text: str) -> str:
    """A type without those events, and without what says that the field may be absent."""
    for name in ASKED_FOR:
        text = text.replace(f" | {name}", "")
    return text.removesuffix("?")


def test_messages_are_those_of_the_last_release() -> None:
    """If this fails: keep the old form beside the new one for one release, or raise PROTOCOL_VERSION and serve both."""
    assert differences(LAST, wire_schema()) == []


@pytest.mark.parametrize(
    ("fields", "compatible"),
    [
        ({"number": "int"}, True),
        ({"number": "int", "note": "str?"}, True),
        ({"number": "int?"}, True),
        ({"number": "int", "note": "str"}, False),
        ({"number": "float"}, False),
        ({}, False),
    ],
)
def test_what_another_release_understands(fields: dict[str, str], compatible: bool) -> None:
    before = {"protocol": 3, "structs": {"Ping": {"tag": "ping", "fields": {"number": "int"}}}}
    now = {"protocol": 3, "structs": {"Ping": {"tag": "ping", "fields": fields}}}
    assert (differences(before, now) == []) == compatible
    assert differences(before, now | {"protocol": 4})


def test_unknown_fields_are_ignored_and_absent_ones_have_their_defaults() -> None:
    pong = {"type": "pong", "number": 1, "stats": {"running": 2, "of_a_later_release": [1, {"a": 2}]}}
    decoded = wire.decode_to_gateway(msgspec.msgpack.encode(pong | {"note": "later"}))
    assert decoded == wire.Pong(1, EngineStats(running=2))
    delta = {"type": "delta", "request_id": "r", "choice": 0, "token_ids": [1], "text": "a", "later": 1}
    events = wire.decode_to_gateway(msgspec.msgpack.encode({"type": "events", "events": [delta]}))
    assert events == wire.Events([Delta("r", 0, [1], "a")])
    ping = msgspec.msgpack.encode({"type": "ping", "number": 7, "later": "x"})
    assert wire.decode_to_engine(ping) == wire.Ping(7)
