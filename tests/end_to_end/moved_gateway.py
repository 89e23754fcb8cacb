"""A gateway in this process, with real stores and a scripted engine, whose time is ahead of the machine's.

Invariant: the three clocks that decide on bills are ahead by the same: the counters' (`admitted_at` and months), that of ids
(partitions), and the gateway's own (bounds of prices). PostgreSQL's is the machine's: it only says when a row was settled.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from hashlib import sha1
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from tests.end_to_end.gateway_farm import JOURNAL_BYTES, services
from tests.platform.web.gateway import served

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.web.app import create_app
from loraplex.tenants import ids
from loraplex.tenants.admission import reserve
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.counters import counters
from loraplex.tenants.counters.script_runner import Script, ScriptName, load_script
from loraplex.tenants.database import Database
from loraplex.tenants.ledger import drift, usage_ledger
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.valkey import open_valkey

# A busy machine lets Valkey wait too, which is not what is tested.
VALKEY_S = 5.0
SERVERS_TIME = "redis.call('TIME')"


@dataclass(frozen=True)
class MovedClock:
    """Time that is `ahead` of the machine's, by whole seconds."""

    ahead: timedelta

    @classmethod
    def before(cls, moment: datetime, seconds: float) -> "MovedClock":
        """A clock that shows `moment` in about so many seconds."""
        ahead = moment - datetime.now(UTC) - timedelta(seconds=seconds)
        return cls(timedelta(seconds=ahead // timedelta(seconds=1)))

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Move the time of ids, of the gateway and of `usage reconcile`; that of the counters in the one line that reads it."""
        ahead, seconds = self.ahead, self.ahead // timedelta(seconds=1)

        class Moved(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Any:
                return datetime.now(tz) + ahead

        def moved_script(name: ScriptName) -> Script:
            text = load_script(name).text
            assert text.count(SERVERS_TIME) == 1
            text = text.replace(SERVERS_TIME, f"{SERVERS_TIME}\ntime[1] = time[1] + {seconds}")
            return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())

        monkeypatch.setattr(ids, "time", SimpleNamespace(time_ns=lambda: time.time_ns() + seconds * 10**9))
        for module in (reserve, usage_ledger, drift):
            monkeypatch.setattr(module, "datetime", Moved)
        monkeypatch.setattr(counters, "load_script", moved_script)


@asynccontextmanager
async def moved_gateway(
    database: Database, valkey_url: str, folder: Path, script: FakeScript
) -> AsyncIterator[str]:
    """The address of a gateway that follows the rate cards, with its journal in `folder`. At its end everything is shipped."""
    valkey, gateway_id = open_valkey(valkey_url, command_s=VALKEY_S), uuid4()
    journal = await Journal.open(folder, gateway_id, max_bytes=JOURNAL_BYTES)
    prices = await PriceBook.open(database)
    settings = AdmissionConfig(valkey_s=VALKEY_S)
    admissions = QuotaAdmissionController(database, valkey, prices, gateway_id, settings, journal=journal)
    dependencies = services(script, database, admissions)
    app = create_app(dependencies)
    tasks = [asyncio.create_task(admissions.maintenance.run()), asyncio.create_task(prices.run(database))]
    async with served(app) as url:
        yield url
    await dependencies.background_tasks.join()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await admissions.close()
    await journal.close()
    await valkey.aclose()
