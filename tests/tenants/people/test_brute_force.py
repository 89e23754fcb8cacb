"""Failed sign-ins are slowed per account and per network; no account is locked, and a guess costs the same without one."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import delete, select
from tests.tenants.people.people_world import PASSWORD, add_person, cheap_passwords, signed_in
from tests.tenants.registry_records import make_tenant

from loraplex.platform.auth.mail import MailServer
from loraplex.platform.auth.mailed_links import MailedLinks
from loraplex.tenants.database import Database
from loraplex.tenants.errors import SignInRefused, SignInSlowed
from loraplex.tenants.models import SignInThrottle
from loraplex.tenants.people import passwords
from loraplex.tenants.people.throttle import (
    FORGOTTEN,
    FREE_TRIES,
    MAX_WAIT_S,
    SignInTries,
    subject,
    wait_s,
)

__all__ = ["cheap_passwords"]
pytestmark = pytest.mark.usefixtures("cheap_passwords")
MARA, NOW = "mara@example.com", datetime.now(UTC)
HOME, ELSEWHERE = "192.0.2.7", "203.0.113.9"


@pytest.fixture(autouse=True)
async def acme(database: Database) -> UUID:
    tenant_id = await make_tenant(database, "acme")
    await add_person(database, MARA, roles={tenant_id: "admin"})
    return tenant_id


async def guess(database: Database, email: str, address: str, now: datetime = NOW) -> int:
    """Present a wrong password; return the seconds to wait, 0 for a try that was compared."""
    try:
        await signed_in(database, email, "a wrong password", address=address, now=now)
    except SignInSlowed as slowed:
        return slowed.retry_after_s
    except SignInRefused:
        return 0
    raise AssertionError("a wrong password signed in")


def test_waits_grow_to_a_cap() -> None:
    waits = [wait_s(failures) for failures in range(FREE_TRIES - 1, FREE_TRIES + 10)]
    assert waits == [0, 2, 4, 8, 16, 32, 64, 128, 256, MAX_WAIT_S, MAX_WAIT_S]
    assert wait_s(1 << 40) == MAX_WAIT_S


async def test_an_account_is_slowed_from_every_network_and_never_locked(database: Database) -> None:
    for number in range(FREE_TRIES):
        assert await guess(database, MARA, f"203.0.113.{number}") == 0
    assert await guess(database, MARA, "203.0.113.200") == 2
    with pytest.raises(SignInSlowed):
        await signed_in(database, MARA, now=NOW)
    # A slowed try is not counted: repeating it does not push the end of the wait away.
    assert await guess(database, MARA, "203.0.113.201") == 2
    assert (await signed_in(database, MARA, now=NOW + timedelta(seconds=2))).token
    assert await guess(database, MARA, "203.0.113.202", NOW + timedelta(seconds=3)) == 0


async def test_guesses_from_elsewhere_do_not_slow_where_the_account_is_known(database: Database) -> None:
    await signed_in(database, MARA, address=HOME, now=NOW)
    for number in range(FREE_TRIES):
        assert await guess(database, MARA, f"203.0.113.{number}") == 0
    assert await guess(database, MARA, "203.0.113.200") > 0
    assert (await signed_in(database, MARA, address=HOME, now=NOW)).token


async def test_no_name_that_is_entered_slows_the_mails_of_an_address(database: Database) -> None:
    server = MailServer.parse("smtp://localhost:25", "loraplex@example.com")
    # Ahead of the clock that counts mails, so that the whole wait is left there.
    ahead = NOW + timedelta(hours=1)
    for number in range(FREE_TRIES):
        await guess(database, f"mail:{MARA}", f"203.0.113.{number}", ahead)
    assert await guess(database, f"mail:{MARA}", "203.0.113.200", ahead) == 2
    await MailedLinks(database, server, "https://console.test").count(MARA, HOME)


async def test_a_try_that_is_given_back_leaves_the_failures_of_elsewhere(database: Database) -> None:
    await signed_in(database, MARA, address=HOME, now=NOW)
    for number in range(FREE_TRIES):
        assert await guess(database, MARA, f"203.0.113.{number}") == 0
    async with database.as_writer() as session:
        tries = SignInTries(session, MARA, HOME)
        await tries.take(NOW)
        await tries.give_back(NOW)
    assert await guess(database, MARA, "203.0.113.200") == 2


async def test_a_network_is_slowed_over_all_accounts(database: Database) -> None:
    for number in range(FREE_TRIES):
        assert await guess(database, f"person{number}@example.com", ELSEWHERE) == 0
    assert await guess(database, "another@example.com", ELSEWHERE) == 2
    assert await guess(database, "another@example.com", HOME) == 0
    forgotten = NOW + FORGOTTEN + timedelta(seconds=1)
    assert [await guess(database, "another@example.com", ELSEWHERE, forgotten) for _ in range(2)] == [0, 0]


async def test_a_network_that_others_guess_from_does_not_slow_whom_it_knows(database: Database) -> None:
    await signed_in(database, MARA, address=HOME, now=NOW)
    for number in range(FREE_TRIES):
        assert await guess(database, f"person{number}@example.com", HOME) == 0
    assert await guess(database, "another@example.com", HOME) > 0
    assert (await signed_in(database, MARA, address=HOME, now=NOW)).token
    # Its own failures slow it there, and count for the network.
    for _ in range(FREE_TRIES):
        assert await guess(database, MARA, HOME) == 0
    assert await guess(database, MARA, HOME) == 2
    assert await guess(database, "another@example.com", HOME) == MAX_WAIT_S
    assert (await signed_in(database, MARA, address=HOME, now=NOW + timedelta(seconds=2))).token


async def test_a_right_pair_is_no_failure(database: Database) -> None:
    for _ in range(FREE_TRIES + 5):
        await signed_in(database, MARA, now=NOW)
    assert await guess(database, MARA, HOME) == 0


async def test_tries_at_the_same_time_are_all_counted(database: Database) -> None:
    waits = await asyncio.gather(*(guess(database, MARA, ELSEWHERE) for _ in range(FREE_TRIES + 6)))
    assert waits.count(0) == FREE_TRIES


async def test_a_try_is_counted_whose_row_a_sign_in_deletes_meanwhile(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deleted(tries: SignInTries, *_: object) -> dict[bytes, tuple[int, datetime]]:
        await tries._session.execute(delete(SignInThrottle))
        return {}

    monkeypatch.setattr(SignInTries, "_locked", deleted)
    assert await guess(database, MARA, ELSEWHERE) == 0
    async with database.as_writer() as session:
        assert (await session.scalars(select(SignInThrottle.failures))).all() == [1, 1]


async def test_a_slowed_try_waits_for_no_other_one(database: Database) -> None:
    for number in range(FREE_TRIES):
        await guess(database, MARA, f"203.0.113.{number}")
    async with database.as_writer() as session:
        locked = await session.scalars(select(SignInThrottle.subject).with_for_update())
        assert subject("account", MARA) in locked.all()
        async with asyncio.timeout(5):
            assert await guess(database, MARA, ELSEWHERE) == 2


async def test_sign_ins_at_the_same_time_do_not_hinder_each_other(database: Database) -> None:
    opened = await asyncio.gather(*(signed_in(database, MARA, now=NOW) for _ in range(FREE_TRIES // 2)))
    assert len({each.token for each in opened}) == FREE_TRIES // 2
    assert await guess(database, MARA, HOME) == 0


async def test_an_unknown_account_costs_one_comparison_too(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str | None] = []
    verify = passwords._verify

    def noted(stored: str | None, password: str) -> bool:
        compared.append(stored)
        return verify(stored, password)

    monkeypatch.setattr(passwords, "_verify", noted)
    await guess(database, MARA, HOME)
    await guess(database, "unknown@example.com", HOME)
    assert len(compared) == 2 and compared[0] is not None and compared[1] is None
    assert not verify(None, PASSWORD) and not verify(None, "an account without a password")


async def test_too_many_comparisons_at_once_are_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passwords, "MAX_WAITING", 0)
    assert await guess(database, MARA, HOME) == 1
