"""Delivers events to the tenants' endpoints. Invariant: an error never ends the job, and no tenant has more than
`PER_TENANT` of the attempts that a gateway makes at once.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import structlog

from loraplex.platform.jobs.receiver_client import ReceiverClient, SendResult
from loraplex.platform.observability.webhook_metrics import WebhookMetrics
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError, WebhookSecretUnreadable
from loraplex.tenants.repetition import attempt
from loraplex.tenants.webhooks.deliveries import Attempt, Deliveries
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets
from loraplex.tenants.webhooks.events import event_body
from loraplex.tenants.webhooks.signature import signed_headers

AT_ONCE: Final = 32
PER_TENANT: Final = 4
"""Attempts of a gateway at once: of all tenants, and of one."""
POLL_S: Final = 1.0
RETRY_S: Final = 10.0
"""The wait after an error of the job itself, as while PostgreSQL is away."""
DELAYS_S: Final = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""The wait after each failed attempt but the last, as Standard Webhooks recommends: 10 attempts in 75 hours."""
JITTER: Final = 0.2
"""The largest share by which a wait is longer or shorter, so that deliveries that failed together are not repeated together."""
LOG = structlog.get_logger("loraplex.webhooks")


@dataclass(slots=True, kw_only=True)
class WebhookDispatcher:
    """The delivery of one gateway; `run` runs until it is cancelled. What it has claimed then is repeated after its lease."""

    database: Database
    client: ReceiverClient
    secrets: WebhookSecrets
    metrics: WebhookMetrics
    poll_s: float = POLL_S
    retry_s: float = RETRY_S
    _running: Counter[UUID] = field(default_factory=Counter)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as attempts:
            while True:
                claimed = await attempt(LOG, self._claim(), "webhooks failed", work="webhooks")
                for each in claimed or ():
                    attempts.create_task(self._attempt(each))
                if claimed is None:
                    await asyncio.sleep(self.retry_s)
                await self._pause()

    async def _pause(self) -> None:
        """Wait for the next poll, or for the end of an attempt, whose slot may be of use."""
        self._ended.clear()
        try:
            async with asyncio.timeout(self.poll_s):
                await self._ended.wait()
        except TimeoutError:
            return

    async def _claim(self) -> list[Attempt]:
        """Raises `StoreUnavailable`."""
        async with self.database.as_operator() as session:
            deliveries = Deliveries(session)
            await deliveries.dispatch()
            given_up = await deliveries.give_up()
            self.metrics.set_oldest(await deliveries.oldest_s())
            slots = AT_ONCE - self._running.total()
            claimed = await deliveries.claim(slots, PER_TENANT, self._running)
        self.metrics.attempted("dead", given_up)
        self._running.update(attempt.tenant_id for attempt in claimed)
        return claimed

    async def _attempt(self, attempt: Attempt) -> None:
        try:
            await self._record(attempt, await self._send(attempt))
        except TenantsError as error:
            LOG.warning("result of a delivery not recorded", error=str(error)[:200])
        except Exception:
            LOG.exception("delivery failed", delivery=str(attempt.delivery_id))
        finally:
            self._running[attempt.tenant_id] -= 1
            if not self._running[attempt.tenant_id]:
                del self._running[attempt.tenant_id]
            self._ended.set()

    async def _send(self, attempt: Attempt) -> SendResult:
        body = message(attempt)
        try:
            headers = self._headers(attempt, body)
        except WebhookSecretUnreadable:
            return SendResult(None, "secret_unreadable")
        return await self.client.post(attempt.url, headers, body)

    def _headers(self, attempt: Attempt, body: bytes) -> dict[str, str]:
        """Raises `WebhookSecretUnreadable`."""
        encrypted = (attempt.encrypted_secret, attempt.previous_secret)
        signing = [
            self.secrets.decrypt(attempt.tenant_id, attempt.endpoint_id, each)
            for each in encrypted
            if each is not None
        ]
        now = int(datetime.now(UTC).timestamp())
        signed = signed_headers(signing, str(attempt.event_id), now, body)
        return {"content-type": "application/json", **signed}

    async def _record(self, attempt: Attempt, result: SendResult) -> None:
        async with self.database.as_operator() as session:
            state = await Deliveries(session).finish(
                attempt, result.status, result.error, delay_after(attempt)
            )
        if state is not None:
            self.metrics.attempted("failed" if state == "pending" else state)


def message(attempt: Attempt) -> bytes:
    """Build the body of an event: the same bytes in every attempt."""
    return event_body(attempt.event_id, attempt.type, attempt.created_at, attempt.tenant_id, attempt.data)


def delay_after(attempt: Attempt) -> timedelta:
    """Return the wait after this attempt, if it fails."""
    return timedelta(seconds=DELAYS_S[-attempt.attempts_left] * random.uniform(1 - JITTER, 1 + JITTER))
