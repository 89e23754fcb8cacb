"""Unknown and forged keys cost a bounded number of look-ups, and keep no right key out."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.platform.auth.authentication import (
    NOWHERE,
    Clock,
    bearer,
    lookups_of,
    make_key,
)

from loraplex.platform.auth.authenticator import (
    MAX_WAITING,
    PENALIZED_AT_ONCE,
    PENALIZED_WAITING,
    UNKNOWN_AT_ONCE,
    Authenticator,
    Caller,
)
from loraplex.platform.auth.failure_buckets import BURST
from loraplex.platform.errors import TooManyUnknownKeys, describe
from loraplex.platform.tenant_limiter import AT_ONCE
from loraplex.tenants.api_keys.key_format import ParsedKey, generate_key
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    DatabaseUnavailable,
    UnknownKey,
)


async def forge(authenticator: Authenticator, address: str) -> type[Exception]:
    with pytest.raises((UnknownKey, TooManyUnknownKeys)) as refused:
        await authenticator.authenticate(bearer(generate_key("live").plaintext), address, cached=True)
    return type(refused.value)


async def burst(authenticator: Authenticator, address: str) -> list[type[Exception]]:
    """The refusals of keys that one address presents at once, after it has used up its failures."""
    flood = PENALIZED_AT_ONCE + PENALIZED_WAITING + 10
    return await asyncio.gather(*(forge(authenticator, address) for _ in range(flood)))


async def test_forged_keys_cost_a_bounded_number_of_look_ups(database: Database) -> None:
    key, clock = await make_key(database), Clock()
    authenticator = Authenticator(database, 1.0, clock=clock)
    lookups = lookups_of(database)
    for address in ("2001:db8::1", "192.0.2.1"):
        await authenticator.authenticate(bearer(key), address, cached=True)
        lookups.clear()
        assert [await forge(authenticator, address) for _ in range(BURST)] == [UnknownKey] * BURST
        counts = Counter(await burst(authenticator, address))
        assert counts == {UnknownKey: PENALIZED_AT_ONCE + PENALIZED_WAITING, TooManyUnknownKeys: 10}
        assert len(lookups) == BURST + counts[UnknownKey]
    # The same subscriber, another one, and a valid key that was used before, also when it must be looked up again.
    assert TooManyUnknownKeys in await burst(authenticator, "2001:db8::2")
    assert set(await burst(authenticator, "2001:db8:1::2")) == {UnknownKey}
    lookups.clear()
    for seconds in (0.0, 5.0):
        clock.now += seconds
        assert (await authenticator.authenticate(bearer(key), "192.0.2.1", cached=True)).tenant_name == "acme"
    assert len(lookups) == 1
    assert (await authenticator.authenticate(bearer(key), "192.0.2.1")).tenant_name == "acme"


def test_a_refusal_is_a_429_that_may_be_repeated() -> None:
    row = describe(TooManyUnknownKeys("too many")).row
    assert (row.status, row.code, row.retry_after_s) == (429, "rate_limit_exceeded", 1)


@pytest.mark.parametrize("cached", [False, True])
async def test_an_unseen_key_works_from_an_address_without_failures_left(
    cached: bool, database: Database
) -> None:
    key, authenticator = await make_key(database), Authenticator(database, 60.0, clock=Clock())
    for _ in range(BURST + 1):
        await forge(authenticator, "192.0.2.1")
    caller = await authenticator.authenticate(bearer(key), "192.0.2.1", cached=cached)
    assert caller.tenant_name == "acme"


async def test_requests_of_one_key_share_a_look_up(database: Database) -> None:
    """More of them than may wait for a look-up, of a key that was never found, and of one that has expired in the cache."""
    key, clock = await make_key(database), Clock()
    authenticator, lookups = Authenticator(database, 1.0, clock=clock), lookups_of(database)
    _, environment, key_id, _, _ = key.split("_")
    forged = ParsedKey(environment, key_id, "0" * 43).plaintext
    for seconds in (0.0, 5.0):
        clock.now += seconds
        lookups.clear()
        valid = (
            authenticator.authenticate(bearer(key), "192.0.2.1", cached=True)
            for _ in range(MAX_WAITING + 2 * AT_ONCE)
        )
        wrong = authenticator.authenticate(bearer(forged), "192.0.2.1", cached=True)
        *callers, refused = await asyncio.gather(*valid, wrong, return_exceptions=True)
        assert {type(each) for each in callers} == {Caller} and isinstance(refused, UnknownKey)
        assert len(lookups) == 1


async def test_networks_that_wait_read_what_another_has_found(database: Database) -> None:
    key, lookups = await make_key(database), lookups_of(database)
    authenticator = Authenticator(database, 60.0, clock=Clock())
    networks = [f"192.0.2.{number}" for number in range(20)]
    found = await asyncio.gather(
        *(authenticator.authenticate(bearer(key), network, cached=True) for network in networks)
    )
    assert {each.tenant_name for each in found} == {"acme"} and len(lookups) == UNKNOWN_AT_ONCE


async def test_new_keys_work_at_once_from_an_address_with_failures_left(database: Database) -> None:
    authenticator = Authenticator(database, 60.0, clock=Clock())
    for _ in range(BURST - 1):
        await forge(authenticator, "192.0.2.1")
    for name in ("acme", "rival"):
        key = await make_key(database, tenant=name)
        assert (await authenticator.authenticate(bearer(key), "192.0.2.1")).tenant_name == name


async def test_look_ups_of_unknown_keys_use_a_part_of_the_pool(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, end = await make_key(database), asyncio.Event()
    small = Database(database.url, pool_size=UNKNOWN_AT_ONCE + 1)
    authenticator, looking = Authenticator(small, 0.0), 0
    await authenticator.authenticate(bearer(key))
    find = KeyRepository.find

    async def slow(keys: KeyRepository, key_id: str) -> Any:
        nonlocal looking
        if key_id != key.split("_")[2]:
            looking += 1
            await end.wait()
        return await find(keys, key_id)

    monkeypatch.setattr(KeyRepository, "find", slow)
    flood = [asyncio.create_task(forge(authenticator, f"192.0.2.{number}")) for number in range(20)]
    async with asyncio.timeout(60):
        while looking < UNKNOWN_AT_ONCE:
            await asyncio.sleep(0.01)
        for _ in range(5):
            assert (await authenticator.authenticate(bearer(key))).tenant_name == "acme"
    assert looking == UNKNOWN_AT_ONCE
    end.set()
    assert set(await asyncio.gather(*flood)) == {UnknownKey}
    await small.close()


async def test_a_wrong_secret_of_a_known_key_needs_no_look_up(database: Database) -> None:
    key = await make_key(database)
    authenticator = Authenticator(database, 0.0)
    await authenticator.authenticate(bearer(key))
    lookups = lookups_of(database)
    forged = ParsedKey("live", key.split("_")[2], "0" * 43).plaintext
    for _ in range(2 * BURST):
        with pytest.raises(UnknownKey):
            await authenticator.authenticate(bearer(forged), "192.0.2.1")
    assert lookups == []


async def test_a_database_that_is_down_uses_up_no_failure() -> None:
    down = Database(NOWHERE)
    authenticator = Authenticator(down, 1.0, clock=Clock())
    for _ in range(BURST + 1):
        with pytest.raises(DatabaseUnavailable):
            await authenticator.authenticate(bearer(generate_key("live").plaintext), "192.0.2.1")
    await down.close()


async def test_two_secrets_of_one_id_share_nothing(database: Database) -> None:
    key = await make_key(database)
    authenticator = Authenticator(database, 60)
    await authenticator.authenticate(bearer(key), cached=True)
    _, environment, key_id, secret, _ = key.split("_")
    near = secret[:-1] + ("0" if secret[-1] != "0" else "1")
    with pytest.raises(UnknownKey):
        await authenticator.authenticate(bearer(ParsedKey(environment, key_id, near).plaintext), cached=True)
