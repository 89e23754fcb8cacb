"""Hostile `Authorization` headers are refused without a database."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.platform.auth.authentication import (
    NOWHERE,
    bearer,
)

from loraplex.platform.auth.authenticator import (
    Authenticator,
)
from loraplex.platform.errors import describe
from loraplex.tenants.api_keys.key_format import generate_key
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    InvalidApiKey,
    MalformedKey,
)


def ask_nobody(headers: list[str]) -> None:
    """An authenticator whose database does not answer: what gets past the format would be a `DatabaseUnavailable`."""
    with pytest.raises(InvalidApiKey) as caught:
        asyncio.run(Authenticator(Database(NOWHERE), 0).authenticate(headers))
    assert describe(caught.value).message == "The API key is missing, wrong, expired or revoked."


KEY = generate_key("live").plaintext


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [f"Bearer {KEY}", f"Bearer {KEY}"],
        [KEY],
        [f"Basic {KEY}"],
        [f"Bearer{KEY}"],
        [f"Bearer\t{KEY}"],
        [f"Bearer {KEY[:-1]}"],
        [f"Bearer {KEY}\x00"],
        [f"Bearer {KEY}' OR '1'='1"],
        [f"Bearer {KEY[:9]}' OR '1'='1{KEY[9:]}"],
        [f'Bearer "{KEY}"'],
        [f"Bearer {KEY} {KEY}"],
        [f"Bearer {KEY[:20].swapcase()}{KEY[20:]}"],
        ["Bearer " + "x" * (1 << 20)],
        [f"Bearer {KEY}{'0' * (1 << 20)}"],
        [" " * (1 << 20)],
        ["Bearer lpx_live_" + "\xb2" * 16 + KEY[25:]],
        [f"Bearer {KEY[:40]}\u0130{KEY[41:]}"],
    ],
    ids=range(18),
)
def test_malformed_keys_need_no_database(headers: list[str]) -> None:
    ask_nobody(headers)


@pytest.mark.parametrize("position", [0, 4, 10, 30, 60, len(KEY) - 1])
def test_one_wrong_character_anywhere_needs_no_database(position: int) -> None:
    wrong = "a" if KEY[position] != "a" else "b"
    ask_nobody(bearer(KEY[:position] + wrong + KEY[position + 1 :]))


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")), st.booleans())
def test_no_authorization_is_an_error_of_the_server(value: str, prefixed: bool) -> None:
    authenticator: Any = Authenticator.__new__(Authenticator)

    async def read() -> None:
        with pytest.raises(MalformedKey):
            await authenticator.authenticate([f"Bearer {value}" if prefixed else value])

    asyncio.run(read())
