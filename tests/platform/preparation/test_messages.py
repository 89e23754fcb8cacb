"""Messages between a gateway and its analysis process."""

import pytest

from loraplex.grammar.errors import SchemaNotEnforceable
from loraplex.platform.errors import InvalidBody, MissingParameter
from loraplex.platform.preparation.messages import (
    LENGTH_BYTES,
    REFUSALS,
    CheckBody,
    Refusal,
    Refused,
    Reply,
    decode_reply,
    decode_task,
    frame,
    length,
)


def test_a_message_has_a_length_prefix() -> None:
    data = frame(CheckBody(b"{}"))
    assert length(data[:LENGTH_BYTES]) == len(data) - LENGTH_BYTES
    assert decode_task(data[LENGTH_BYTES:]) == CheckBody(b"{}")


@pytest.mark.parametrize("kind", REFUSALS.values())
def test_every_refusal_arrives_as_it_was_raised(kind: type[Refused]) -> None:
    data = frame(Reply(refusal=Refusal.of(kind("why", param="p"))))
    refusal = decode_reply(data[LENGTH_BYTES:]).refusal
    assert refusal is not None
    error = refusal.error()
    assert type(error) is kind and str(error) == "why" and error.param == "p"


def test_a_place_in_a_schema_arrives_too_and_a_subclass_as_what_is_known() -> None:
    held = Refusal.of(SchemaNotEnforceable("why", param="p", pointer="/not")).error()
    assert isinstance(held, SchemaNotEnforceable) and held.pointer == "/not"
    assert Refusal.of(MissingParameter("why")).kind == "InvalidParameter"
    assert Refusal.of(InvalidBody("why")).param is None
