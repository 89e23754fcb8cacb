"""Keys are parsed without I/O: typos fall to the checksum, and no message shows the secret."""

import hashlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.api_keys.key_format import SECRET_LENGTH, generate_key, parse_key
from loraplex.tenants.errors import MalformedKey

CHARACTERS = string.ascii_letters + string.digits


@pytest.mark.parametrize("environment", ["live", "test", "op"])
def test_round_trip(environment: str) -> None:
    key = generate_key(environment)
    assert key.plaintext.startswith(f"lpx_{environment}_{key.key_id}_")
    assert parse_key(key.plaintext) == key
    assert len(key.secret) == SECRET_LENGTH
    assert key.secret not in repr(key)


def test_keys_differ() -> None:
    keys = [generate_key("live") for _ in range(50)]
    assert len({key.key_id for key in keys}) == len({key.secret for key in keys}) == 50


@given(position=st.integers(0, 200), character=st.sampled_from(CHARACTERS))
def test_one_wrong_character_is_refused(position: int, character: str) -> None:
    text = generate_key("live").plaintext
    position %= len(text)
    wrong = text[:position] + character + text[position + 1 :]
    if wrong != text:
        with pytest.raises(MalformedKey) as caught:
            parse_key(wrong)
        assert wrong[30:60] not in str(caught.value)


@given(st.text())
def test_any_text_is_refused_cleanly(text: str) -> None:
    with pytest.raises(MalformedKey):
        parse_key(text)


def test_long_and_cut_off_texts_are_refused() -> None:
    text = generate_key("live").plaintext
    for wrong in (text[:-1], text + "a", text + "\n", " " + text, text * 1000, ""):
        with pytest.raises(MalformedKey):
            parse_key(wrong)


def test_matches_the_digest_of_its_own_secret_only() -> None:
    key = generate_key("live")
    assert key.matches(hashlib.sha256(key.secret.encode()).digest())
    assert not key.matches(generate_key("live").secret_sha256)
    assert not key.matches(bytes(32))
