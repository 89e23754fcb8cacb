"""A disk that does not answer refuses requests by name, and what it wrote late is neither open nor charged."""

import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.tenants.admission.gateways import (
    SETTINGS,
    check_ledger,
    make_tenant_with_gateways,
    usage,
    used,
)

from loraplex.tenants.database import Database
from loraplex.tenants.errors import JournalUnavailable
from loraplex.tenants.ledger.journal.file import connect
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.journal.statements import FORGET, WRITE


class Disk:
    """Answers while `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()

    def connect(self, path: Path) -> "SlowConnection":
        return SlowConnection(connect(path), self.answers)


class SlowConnection:
    """A connection whose commits wait for the disk."""

    def __init__(self, connection: sqlite3.Connection, answers: threading.Event) -> None:
        self._connection = connection
        self._answers = answers

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> sqlite3.Cursor:
        if sql.startswith((WRITE, FORGET)):
            assert self._answers.wait(60)
        return self._connection.execute(sql, parameters)

    def close(self) -> None:
        self._connection.close()


async def test_a_disk_that_hangs_refuses_by_name(database: Database, valkey_url: str, tmp_path: Path) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    disk = Disk()
    journal = await Journal.open(tmp_path, uuid4(), max_bytes=64 << 20, connect=disk.connect)
    async with tenant.gateway(replace(SETTINGS, journal_s=0.2), journal=journal) as gateway:
        running = await gateway.admit(tenant.request())
        await tenant.shipped()
        assert gateway.journal_trouble() is None
        disk.answers.clear()
        with pytest.raises(JournalUnavailable, match="does not answer"):
            await gateway.admit(tenant.request())
        assert (await used(gateway, tenant.tenant_id))["tokens_per_day"].reserved == 30, (
            "of the one that runs"
        )
        with pytest.raises(JournalUnavailable, match="does not answer"):
            await gateway.admit(
                tenant.request(), lambda: pytest.fail("asked the counters, and waits for the disk")
            )
        assert "does not answer" in str(gateway.journal_trouble())
        disk.answers.set()
        await gateway.maintenance.settlements.retry()
        assert gateway.journal_trouble() is None
        await gateway.settle(running, usage(running))
        assert await check_ledger(tenant, gateway) == (15, 1)
        await gateway.cancel(await gateway.admit(tenant.request()))
    await journal.close()
    assert [*tmp_path.iterdir()] == []
