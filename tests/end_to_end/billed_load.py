"""Clients that keep what they were charged for, and the comparison of that with the ledger and all its sums.

Invariant: a request is finished once its client has its end: the non-streaming answer, or `[DONE]`.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
import msgspec
import psycopg
from sqlalchemy import select

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.invoices.content import compute_contents
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.models import Quota, Tenant

PRICE = Price(prompt=1_500_001, cached_prompt=150_007, completion=6_000_011)
# A busy machine lets Valkey wait too, which is not what is tested.
SETTINGS = {
    "valkey_timeout_s": "1",
    "price_prompt": str(PRICE.prompt),
    "price_cached_prompt": str(PRICE.cached_prompt),
    "price_completion": str(PRICE.completion),
}
LIMITS = {"tokens_per_day": 10**9, "tokens_per_month": 10**10, "budget_per_month": 10**12}
CACHED_TOKENS = 3
ROWS = """
SELECT client_request_id, outcome, uncached_tokens + cached_tokens, cached_tokens, completion_tokens, amount_pico, tenant_id
FROM usage_records
"""
OF_ROLLUPS = (
    "SELECT coalesce(sum(requests), 0)::bigint, coalesce(sum(amount_pico), 0)::bigint FROM usage_rollups"
)


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, as the last of its answer says, or as its row does. `cached` are among `prompt`."""

    prompt: int
    cached: int
    completion: int

    @property
    def amount_pico(self) -> int:
        return PRICE.amount_pico(self.prompt, self.cached, self.completion)


@dataclass(frozen=True)
class Row:
    """A row of the ledger."""

    outcome: str
    usage: Usage
    amount_pico: int
    tenant_id: UUID


@dataclass
class Answers:
    """What clients know by the ids of their requests. `errors`: every answer that was not served."""

    finished: dict[str, Usage] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    broken: dict[str, int] = field(default_factory=dict)
    """Connections that were lost, with the tokens received until then."""
    errors: Counter[str] = field(default_factory=Counter)


class BilledLoad(threading.Thread):
    """Clients of a gateway at work until `end`. `longest`: most tokens of an answer."""

    def __init__(self, url: str, model: str, keys: list[str], *, workers: int = 6, longest: int = 12) -> None:
        super().__init__(daemon=True)
        self.answers = Answers()
        self._url, self._model, self._keys = url, model, keys
        self._workers, self._longest = workers, longest
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        asyncio.run(self._load())

    def end(self) -> Answers:
        """Let the requests in progress end, and return what all clients know."""
        self._over.set()
        self.join(120)
        assert not self.is_alive()
        return self.answers

    async def _load(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            await asyncio.gather(*(self._work(client, seed) for seed in range(self._workers)))

    async def _work(self, client: httpx.AsyncClient, seed: int) -> None:
        drawn = random.Random(seed)
        while not self._over.is_set():
            name = f"req-{uuid4().hex}"
            headers = {"authorization": f"Bearer {drawn.choice(self._keys)}", "x-request-id": name}
            body = {
                "model": self._model,
                "prompt": [drawn.randrange(3, 400) for _ in range(drawn.randrange(4, 30))],
                "n": drawn.choice((1, 1, 2)),
                "max_tokens": drawn.randrange(2, self._longest),
                "ignore_eos": True,
            }
            try:
                if drawn.random() < 0.5:
                    await self._whole(client, name, headers, body)
                else:
                    await self._streamed(client, name, headers, body, drawn.random() < 0.2)
            except httpx.TransportError:
                self.answers.broken.setdefault(name, 0)
                await asyncio.sleep(0.05)

    async def _whole(
        self, client: httpx.AsyncClient, name: str, headers: dict[str, str], body: dict[str, Any]
    ) -> None:
        response = await client.post("/v1/completions", json=body, headers=headers)
        if response.status_code == httpx.codes.OK:
            self._finish(name, response.json()["usage"])
        else:
            self.answers.errors[f"{response.status_code} {response.text[:200]}"] += 1

    async def _streamed(
        self,
        client: httpx.AsyncClient,
        name: str,
        headers: dict[str, str],
        body: dict[str, Any],
        leaves: bool,
    ) -> None:
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        usage: dict[str, Any] | None = None
        received = 0
        try:
            async with client.stream("POST", "/v1/completions", json=streamed, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode()
                    self.answers.errors[f"{response.status_code} {text[:200]}"] += 1
                    return
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        assert usage is not None
                        return self._finish(name, usage)
                    if line.startswith("data: "):
                        event = msgspec.json.decode(line.removeprefix("data: "))
                        if "error" in event:
                            self.answers.errors[str(event["error"])[:200]] += 1
                            return
                        usage = event.get("usage") or usage
                        received += bool(event["choices"])
                        if leaves and received:
                            self.answers.left.add(name)
                            return
        except httpx.TransportError:
            self.answers.broken[name] = received

    def _finish(self, name: str, usage: dict[str, Any]) -> None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.answers.finished[name] = Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])


def make_callers(database_url: str) -> list[str]:
    """The keys of two tenants with limits."""

    async def make() -> list[str]:
        database, keys = Database(database_url), []
        async with database.as_operator() as session:
            for name in ("acme", "other"):
                tenant = await TenantRepository(session).create(name)
                session.add(Quota(tenant_id=tenant.id, **LIMITS))
                issued = await KeyRepository(session).create(tenant.id, "key", ["inference", "usage:read"])
                keys.append(issued.plaintext)
        await database.close()
        return keys

    return asyncio.run(make())


def query(database_url: str, statement: str) -> list[tuple[Any, ...]]:
    """Rows of all tenants."""
    with psycopg.connect(database_url, options="-c role=app_writer") as connection:
        return connection.execute(statement.encode()).fetchall()


def ledger_rows(database_url: str) -> dict[str, Row]:
    """All rows by the ids of their clients, of which each may have one row only."""
    rows = query(database_url, ROWS)
    found = {row[0]: Row(row[1], Usage(*row[2:5]), row[5], row[6]) for row in rows}
    assert len(found) == len(rows), "a request has two rows"
    return found


def all_shipped(database_url: str) -> bool:
    """Whether nothing is reserved, and the ledger has not grown for a second."""
    before = query(database_url, "SELECT count(*) FROM usage_records")
    time.sleep(1)
    after = query(database_url, "SELECT count(*) FROM usage_records")
    return before == after and query(database_url, "SELECT id FROM reservations") == []


def check_sums(database_url: str) -> int:
    """Rows, rollups and the lines of the bills of this month are equal to the pico-unit; return their sum."""
    rows = ledger_rows(database_url)
    for row in rows.values():
        assert row.amount_pico == row.usage.amount_pico
    total = sum(row.amount_pico for row in rows.values())
    assert query(database_url, OF_ROLLUPS) == [(len(rows), total)]
    assert asyncio.run(billed_pico(database_url)) == total
    return total


async def billed_pico(database_url: str) -> int:
    """What the lines of all bills of this month add up to before they are rounded."""
    database, billed = Database(database_url), 0
    async with database.as_operator() as session:
        for tenant_id in [*await session.scalars(select(Tenant.id))]:
            contents = await compute_contents(session, tenant_id, Month.of(datetime.now(UTC)))
            billed += sum(line.amount_pico for content in contents.values() for line in content.totals.lines)
    await database.close()
    return billed
