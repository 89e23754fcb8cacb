"""Authentication: addresses, kinds of keys, freshness, and hostile headers."""

import asyncio
from functools import partial
from uuid import uuid4

import pytest
from sqlalchemy import event, text
from tests.platform.auth.authentication import NOWHERE, Uses, bearer, make_key, request_from, revoke
from tests.tenants.suspension import resume, suspend

from loraplex.platform.auth.authenticator import (
    Authenticator,
    Caller,
    OperatorCaller,
)
from loraplex.platform.auth.client_address import ClientAddresses
from loraplex.platform.errors import AddressNotAllowed, InsufficientScope, describe
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.key_format import ParsedKey, generate_key
from loraplex.tenants.api_keys.keys import AuthenticatedKey, KeyRepository
from loraplex.tenants.api_keys.networks import parse_network
from loraplex.tenants.counters.counter_replies import Admitted, PolicyOutdated
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    DatabaseUnavailable,
    RevokedKey,
    TenantSuspended,
    UnknownKey,
)
from loraplex.tenants.quotas.limits import NO_LIMITS, Subject
from loraplex.tenants.quotas.reservation import ReservationRequest
from loraplex.tenants.valkey import open_valkey


async def test_a_caller_is_its_key_and_its_tenant(database: Database) -> None:
    key, uses = await make_key(database, ["tenant:admin"]), Uses()
    authenticator = Authenticator(database, 0, key_use=uses)
    caller = await authenticator.authorize(request_from("203.0.113.9", key), "keys:write")
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
    authorized = partial(authenticator.authorize, scope="inference", cached=cached)
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
    operator = await authenticator.authorize_operator(request_from("10.0.0.1", operators))
    assert isinstance(operator, OperatorCaller)
    assert (operator.key_id, operator.address) == (operators.split("_")[2], "10.0.0.1")
    for refused, error in (
        (authenticator.authorize_operator(request_from("10.0.0.1", tenants)), InsufficientScope),
        (authenticator.authorize(request_from("10.0.0.1", operators)), InsufficientScope),
        (authenticator.authorize(request_from("10.0.0.1", tenants), "usage:write"), InsufficientScope),
        (authenticator.authorize_operator(request_from("11.0.0.1", operators)), AddressNotAllowed),
    ):
        with pytest.raises(error) as caught:
            await refused
        assert describe(caught.value).row.status == 403
    assert isinstance(await authenticator.authorize(request_from("10.0.0.1", tenants)), Caller)


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
        await suspend(session, "acme")
    with pytest.raises(TenantSuspended):
        await there.renew(stale, "inference")
    async with database.as_operator() as session:
        await resume(session, "acme")
    await revoke(database, key)
    assert (await here.authenticate(bearer(key), cached=True)).key_id == stale.key_id
    here.forget(stale.tenant_id)
    for authenticator in (here, there):
        with pytest.raises(RevokedKey):
            await authenticator.renew(stale, "inference")
        with pytest.raises(RevokedKey):
            await authenticator.authenticate(bearer(key), cached=True)
    await there._database.close()


async def test_requests_with_one_outdated_policy_share_a_look_up(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, authenticator = await make_key(database), Authenticator(database, 3600)
    stale = await authenticator.authenticate(bearer(key), cached=True)
    async with database.as_operator() as session:
        await session.execute(text("UPDATE tenants SET weight = 7"))
    looked_up: list[str] = []
    find = KeyRepository.find

    async def counting(repository: KeyRepository, key_id: str) -> AuthenticatedKey | None:
        looked_up.append(key_id)
        return await find(repository, key_id)

    monkeypatch.setattr(KeyRepository, "find", counting)
    renewed = await asyncio.gather(*(authenticator.renew(stale, "inference") for _ in range(20)))
    assert {each.weight for each in renewed} == {7} and looked_up == [stale.key_id]


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
