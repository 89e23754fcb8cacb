"""Upload leases: renewed in time, and ended before another request's lease begins, whatever the database replies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from loraplex.adapters.uploads.lease import UploadLease
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, UploadClaimed
from loraplex.tenants.models import Upload

LEASE_S = 1.0


class ScriptedDatabase:
    """A database whose renewals raise the next of `errors`; the last one repeats."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = [*errors]
        self.asked: list[float] = []

    @asynccontextmanager
    async def as_tenant(self, _: UUID) -> AsyncIterator[Any]:
        self.asked.append(asyncio.get_running_loop().time())
        error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        if error is not None:
            raise error
        yield None


@pytest.fixture(autouse=True)
def renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def renew(*_: object) -> None:
        pass

    monkeypatch.setattr("loraplex.adapters.uploads.lease.UploadRepository.renew", renew)


def lease_of(database: ScriptedDatabase, began_ago_s: float = 0.0) -> UploadLease:
    upload = Upload(id=UUID(int=1), tenant_id=UUID(int=2), claimed_until=datetime.now(UTC))
    began = asyncio.get_running_loop().time() - began_ago_s
    return UploadLease(cast(Database, database), upload, LEASE_S, began)


async def keep(lease: UploadLease, seconds: float) -> None:
    async with lease.renewed():
        await asyncio.sleep(seconds)


async def test_a_lease_that_the_database_did_not_renew_is_its_fault() -> None:
    with pytest.raises(DatabaseUnavailable, match="could not be renewed"):
        await keep(lease_of(ScriptedDatabase(DatabaseUnavailable("down"))), 10)


async def test_a_lease_taken_by_another_request_is_a_conflict() -> None:
    with pytest.raises(UploadClaimed):
        await keep(lease_of(ScriptedDatabase(DatabaseUnavailable("down"), UploadClaimed("another"))), 10)


async def test_the_lease_counts_from_before_its_transaction() -> None:
    with pytest.raises(DatabaseUnavailable):
        await keep(lease_of(ScriptedDatabase(DatabaseUnavailable("down")), 0.8 * LEASE_S), 0.5 * LEASE_S)
    late = ScriptedDatabase(None)
    await keep(lease_of(late, 0.5 * LEASE_S), 1.5 * LEASE_S)
    assert len(late.asked) >= 3


async def test_an_unexpected_error_is_logged_and_the_lease_goes_on() -> None:
    with capture_logs() as logs:
        await keep(lease_of(ScriptedDatabase(ValueError("a defect"), None)), 2 * LEASE_S)
    (entry,) = logs
    assert (entry["log_level"], entry["event"]) == ("error", "an upload's lease was not renewed")


async def test_an_error_of_the_request_is_its_own() -> None:
    with pytest.raises(TimeoutError):
        async with lease_of(ScriptedDatabase(None)).renewed():
            raise TimeoutError
