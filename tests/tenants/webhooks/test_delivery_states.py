"""A delivery against a model of it, whatever two gateways, their deaths, late results and replays do in whatever order."""

from dataclasses import dataclass, field
from datetime import timedelta
from uuid import uuid4

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text
from tests.tenants.registry_records import make_tenant
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched

from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DeliveryPending
from loraplex.tenants.unit_of_work import unit_of_work
from loraplex.tenants.webhooks import use_cases
from loraplex.tenants.webhooks.deliveries import Attempt, Deliveries
from loraplex.tenants.webhooks.records import MAX_ATTEMPTS
from loraplex.tenants.webhooks.tables import WebhookDelivery

ATTEMPTS_LEFT = 2
"""So few that sequences of some steps reach the last one."""
Steps = st.lists(
    st.tuples(
        st.sampled_from(["claim", "deliver", "fail", "end_lease", "give_up", "replay"]), st.integers(0, 3)
    ),
    min_size=4,
    max_size=14,
)


@dataclass
class Model:
    """What the row must be. `claimed`: every attempt that a gateway has begun, the newest last."""

    state: str = "pending"
    attempts: int = 0
    attempts_left: int = ATTEMPTS_LEFT
    is_due: bool = True
    claimed: list[Attempt] = field(default_factory=list)

    def claim(self) -> bool:
        may = self.state == "pending" and self.is_due and self.attempts_left > 0
        if may:
            self.attempts, self.attempts_left, self.is_due = self.attempts + 1, self.attempts_left - 1, False
        return may

    def finish(self, attempt: Attempt, received: bool) -> str | None:
        if self.state != "pending" or attempt.attempts != self.attempts:
            return None
        self.state = "delivered" if received else "dead" if self.attempts_left == 0 else "pending"
        self.is_due = False
        return self.state

    def give_up(self) -> int:
        may = self.state == "pending" and self.is_due and self.attempts_left == 0
        self.state = "dead" if may else self.state
        return int(may)

    def replay(self) -> bool:
        may = self.state != "pending"
        if may:
            self.state, self.attempts_left, self.is_due = "pending", MAX_ATTEMPTS, True
        return may


async def step(database: Database, model: Model, row: WebhookDelivery, action: str, number: int) -> None:
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        session, deliveries = uow.session, Deliveries(uow.session)
        if action == "claim":
            found = await deliveries.claim(1, 1, {})
            assert len(found) == model.claim()
            model.claimed += found
        elif action in ("deliver", "fail") and model.claimed:
            attempt = model.claimed[-1 - number % len(model.claimed)]
            received = action == "deliver"
            status, error = (200, None) if received else (500, "refused")
            state = await deliveries.finish(attempt, status, error, timedelta(hours=1))
            assert state == model.finish(attempt, received)
        elif action == "end_lease" and model.state == "pending":
            due = text("UPDATE webhook_deliveries SET due_at = now() WHERE id = :id")
            await session.execute(due, {"id": row.id})
            model.is_due = True
        elif action == "give_up":
            assert await deliveries.give_up() == model.give_up()
        elif action == "replay":
            try:
                await use_cases.replay(uow, row.tenant_id, row.endpoint_id, row.id)
                replayed = True
            except DeliveryPending:
                replayed = False
            assert replayed == model.replay()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(Steps)
async def test_a_delivery_follows_its_model(database: Database, steps: list[tuple[str, int]]) -> None:
    async with database.as_operator() as session:
        await session.execute(text("DELETE FROM webhook_endpoints"))
    tenant_id = await make_tenant(database, f"tenant-{uuid4().hex[:12]}")
    endpoint_id = await add_webhook(database, tenant_id)
    await add_event(database, tenant_id)
    await dispatched(database, endpoint_id)
    async with database.as_operator() as session:
        left = text("UPDATE webhook_deliveries SET attempts_left = :left")
        await session.execute(left, {"left": ATTEMPTS_LEFT})
        row = (await session.scalars(select(WebhookDelivery))).one()
    model = Model()
    for action, number in steps:
        await step(database, model, row, action, number)
        async with database.as_operator() as session:
            row = (await session.scalars(select(WebhookDelivery))).one()
        assert (row.state, row.attempts, row.attempts_left) == (
            model.state,
            model.attempts,
            model.attempts_left,
        )
        assert (row.ended_at is None) == (row.state == "pending")
