"""Authentication: addresses, kinds of keys, freshness, and hostile headers."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, text
from starlette.requests import Request

from loraplex.platform.auth.authenticator import (
    MAX_WAITING,
    PENALIZED_AT_ONCE,
    PENALIZED_WAITING,
    UNKNOWN_AT_ONCE,
    Authenticator,
    Caller,
    OperatorCaller,
)
from loraplex.platform.auth.client_address import ClientAddresses
from loraplex.platform.auth.failure_buckets import BURST
from loraplex.platform.errors import AddressNotAllowed, InsufficientScope, TooManyUnknownKeys, describe
from loraplex.platform.tenant_limiter import AT_ONCE
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.key_format import ParsedKey, generate_key
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.last_used import LastUsedTracker
from loraplex.tenants.api_keys.networks import parse_network
from loraplex.tenants.counters.counter_replies import Admitted, PolicyOutdated
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    DatabaseUnavailable,
    InvalidApiKey,
    MalformedKey,
    RevokedKey,
    TenantSuspended,
    UnknownKey,
)
from loraplex.tenants.quotas.limits import NO_LIMITS, Subject
from loraplex.tenants.quotas.reservation import ReservationRequest
from loraplex.tenants.valkey import open_valkey

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


async def make_key(
    database: Database,
    scopes: Sequence[str] = ("inference",),
    allowed_cidrs: Sequence[str] = (),
    *,
    tenant: str | None = "acme",
) -> str:
    """A key's text; of an operator for no tenant."""
    async with database.as_operator() as session:
        owner = None if tenant is None else (await TenantRepository(session).create(tenant)).id
        issued = await KeyRepository(session).create(owner, "key", scopes, allowed_cidrs=allowed_cidrs)
    return issued.plaintext


async def revoke(database: Database, plaintext: str, tenant: str = "acme") -> None:
    async with database.as_operator() as session:
        owner = await TenantRepository(session).get(tenant)
        await KeyRepository(session).revoke(owner.id, plaintext.split("_")[2])


def bearer(plaintext: str) -> list[str]:
    return [f"Bearer {plaintext}"]


def request_from(peer: str, plaintext: str, forwarded: str | None = None) -> Request:
    headers = [(b"authorization", f"Bearer {plaintext}".encode())]
    if forwarded is not None:
        headers.append((b"x-forwarded-for", forwarded.encode()))
    return Request({"type": "http", "headers": headers, "client": (peer, 1)})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Uses(LastUsedTracker):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[UUID] = []

    def note(self, api_key_id: UUID, at: datetime) -> None:
        self.noted.append(api_key_id)


async def test_a_caller_is_its_key_and_its_tenant(database: Database) -> None:
    key, uses = await make_key(database, ["tenant:admin"]), Uses()
    authenticator = Authenticator(database, 0, key_use=uses)
    caller = await authenticator.requires("keys:write")(request_from("203.0.113.9", key))
    assert (caller.tenant_name, caller.key_id) == ("acme", key.split("_")[2])
    assert (caller.weight, caller.tier, caller.policy_epoch) == (1.0, "standard", 1)
    assert caller.address == "203.0.113.9" and "keys:write" in caller.scopes
    assert (caller.api_key_id, caller.tenant_id) == (caller.key.api_key_id, caller.key.tenant_id)
    assert uses.noted == [caller.api_key_id]
    assert key.split("_")[3] not in repr(caller) and "sha256" not in repr(caller)


FROM = [
    ("10.1.2.3", None, True),
    ("::ffff:10.1.2.3", None, True),
    ("11.1.2.3", None, False),
    ("2001:db8::7", None, True),
    ("2001:db9::7", None, False),
    ("testclient", None, False),
    ("11.1.2.3", "10.1.2.3", False),
    ("192.0.2.1", "10.1.2.3", True),
    ("192.0.2.1", "11.1.2.3", False),
    ("192.0.2.1", "10.1.2.3, 11.1.2.3", False),
    ("192.0.2.1", "nonsense", False),
]


@pytest.mark.parametrize("cached", [False, True])
async def test_networks_of_a_key(cached: bool, database: Database) -> None:
    key, uses = await make_key(database, ["inference"], ["10.0.0.0/8", "2001:db8::/32"]), Uses()
    proxies = ClientAddresses([parse_network("192.0.2.0/24")])
    authenticator = Authenticator(database, 60, addresses=proxies, key_use=uses)
    authorized = authenticator.requires("inference", cached=cached)
    for peer, forwarded, allowed in FROM:
        uses.noted.clear()
        if allowed:
            assert (await authorized(request_from(peer, key, forwarded))).tenant_name == "acme"
            continue
        with pytest.raises(AddressNotAllowed) as refused:
            await authorized(request_from(peer, key, forwarded))
        seen = describe(refused.value)
        assert (seen.row.status, seen.row.code) == (403, "address_not_allowed") and uses.noted == []


async def test_a_wrong_secret_reveals_nothing_about_networks(database: Database) -> None:
    key = await make_key(database, ["inference"], ["10.0.0.0/8"])
    forged = ParsedKey("live", key.split("_")[2], "0" * 43).plaintext
    with pytest.raises(UnknownKey):
        await Authenticator(database, 0).authenticate(bearer(forged), "192.0.2.1")


async def test_each_kind_of_key_on_its_own_plane(database: Database) -> None:
    tenants, operators = (
        await make_key(database, ["tenant:admin"]),
        await make_key(database, ["operator"], ["10.0.0.0/8"], tenant=None),
    )
    authenticator = Authenticator(database, 0)
    operator = await authenticator.requires_operator()(request_from("10.0.0.1", operators))
    assert isinstance(operator, OperatorCaller)
    assert (operator.key_id, operator.address) == (operators.split("_")[2], "10.0.0.1")
    for refused, error in (
        (authenticator.requires_operator()(request_from("10.0.0.1", tenants)), InsufficientScope),
        (authenticator.requires()(request_from("10.0.0.1", operators)), InsufficientScope),
        (authenticator.requires("usage:write")(request_from("10.0.0.1", tenants)), InsufficientScope),
        (authenticator.requires_operator()(request_from("11.0.0.1", operators)), AddressNotAllowed),
    ):
        with pytest.raises(error) as caught:
            await refused
        assert describe(caught.value).row.status == 403
    assert isinstance(await authenticator.requires()(request_from("10.0.0.1", tenants)), Caller)


async def test_what_is_cached_is_looked_up_once_and_planes_always(database: Database) -> None:
    key = await make_key(database)
    queries: list[str] = []
    event.listen(database._engine.sync_engine, "before_cursor_execute", lambda *seen: queries.append(seen[2]))

    def lookups() -> int:
        return sum("find_api_key" in query for query in queries)

    authenticator = Authenticator(database, 60)
    for _ in range(3):
        await authenticator.authenticate(bearer(key), cached=True)
    assert lookups() == 1
    await revoke(database, key)
    await authenticator.authenticate(bearer(key), cached=True)
    with pytest.raises(RevokedKey):
        await authenticator.authenticate(bearer(key))
    # What the plane has seen the cache knows.
    with pytest.raises(RevokedKey):
        await authenticator.authenticate(bearer(key), cached=True)
    unknown = generate_key("live").plaintext
    for _ in range(3):
        with pytest.raises(UnknownKey):
            await authenticator.authenticate(bearer(unknown), cached=True)
    assert lookups() == 3


def lookups_of(database: Database) -> list[str]:
    """The look-ups of keys from now on."""
    found: list[str] = []
    event.listen(
        database._engine.sync_engine,
        "before_cursor_execute",
        lambda *seen: found.append(seen[2]) if "find_api_key" in seen[2] else None,
    )
    return found


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


async def test_a_gateway_notified_of_a_newer_policy_sees_a_revocation_at_once(
    database: Database,
) -> None:
    key = await make_key(database, ["inference", "usage:read"])
    here, there = Authenticator(database, 60), Authenticator(Database(database.url, pool_size=1), 60)
    stale = await there.authenticate(bearer(key), cached=True)
    await here.authenticate(bearer(key), cached=True)
    async with database.as_operator() as session:
        await session.execute(text("UPDATE api_keys SET scopes = '{inference}'"))
    renewed = await there.renew(stale, "inference")
    assert renewed.scopes == {"inference"} and renewed.policy_epoch == stale.policy_epoch + 1
    with pytest.raises(InsufficientScope):
        await there.renew(stale, "usage:read")
    async with database.as_operator() as session:
        await TenantRepository(session).suspend("acme")
    with pytest.raises(TenantSuspended):
        await there.renew(stale, "inference")
    async with database.as_operator() as session:
        await TenantRepository(session).resume("acme")
    await revoke(database, key)
    assert (await here.authenticate(bearer(key), cached=True)).key_id == stale.key_id
    here.forget(stale.tenant_id)
    for authenticator in (here, there):
        with pytest.raises(RevokedKey):
            await authenticator.renew(stale, "inference")
        with pytest.raises(RevokedKey):
            await authenticator.authenticate(bearer(key), cached=True)
    await there._database.close()


async def test_the_counters_refuse_a_revoked_key_at_the_next_request_on_every_gateway(
    database: Database, valkey_url: str
) -> None:
    """Both gateways hold the key in their caches for an hour; only the counters are updated."""
    key = await make_key(database)
    client = open_valkey(valkey_url, command_s=10.0)
    counters = Counters(client, command_s=10.0, bulk_s=10.0)
    gateways = [Authenticator(database, 3600), Authenticator(database, 3600)]
    callers = [await gateway.authenticate(bearer(key), cached=True) for gateway in gateways]
    await counters.rebuild(
        callers[0].tenant_id,
        1,
        CounterSnapshot(policy_epoch=1, totals=(), reservations=(), full_buckets=True),
    )
    for caller in callers:
        assert isinstance(await counters.reserve(asked_by(caller)), Admitted)
    await revoke(database, key)
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).get("acme")
    await counters.publish_policy(tenant.id, tenant.policy_epoch)
    for gateway in gateways:
        caller = await gateway.authenticate(bearer(key), cached=True)
        assert isinstance(await counters.reserve(asked_by(caller)), PolicyOutdated)
        with pytest.raises(RevokedKey):
            await gateway.renew(caller, "inference")
        with pytest.raises(RevokedKey):
            await gateway.authenticate(bearer(key), cached=True)
    await client.aclose()


def asked_by(caller: Caller) -> ReservationRequest:
    subjects = (
        Subject("tenant", caller.tenant_id, NO_LIMITS),
        Subject("key", caller.api_key_id, NO_LIMITS),
    )
    return ReservationRequest(
        id=uuid4(),
        tenant_id=caller.tenant_id,
        request_id="r",
        policy_epoch=caller.policy_epoch,
        api_key_id=caller.api_key_id,
        subjects=subjects,
        prompt_tokens=1,
        completion_tokens=0,
    )


async def test_a_database_that_is_down_is_never_a_wrong_key() -> None:
    down = Database(NOWHERE)
    with pytest.raises(DatabaseUnavailable) as caught:
        await Authenticator(down, 1).authenticate(bearer(generate_key("live").plaintext), cached=True)
    assert describe(caught.value).row.status == 503
    await down.close()


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
