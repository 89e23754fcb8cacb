"""Invoices and credits under random steps on a real PostgreSQL, compared with a model that knows only what was used and granted.

At any time every used pico-unit is on exactly one living invoice or still due, numbers have no gaps, a final invoice never
changes, and grants are what they were less what living invoices use.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString, TypeVar
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.conftest import EMPTY
from tests.tenants.invoices.billed_tenant import BilledTenant, make_billed_tenant

from loraplex.tenants.actors import system_actor
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvoiceStateForbids, NothingToBill
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.invoices.invoices import InvoiceDetails, InvoiceRepository, invoice_id
from loraplex.tenants.invoices.lines import PICO_PER_MICRO
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.unit_of_work import unit_of_work

Answer = TypeVar("Answer")
MONTHS = tuple(Month(2026, number) for number in (1, 2))
NOW = datetime(2026, 6, 1, tzinfo=UTC)
ADAPTER = UUID(int=5)
PRICE = Price(prompt=1_333_333, cached_prompt=77_777, completion=5_999_999, reasoning=7_111_111)
STEPS = 15
ROLLUP_KEY: LiteralString = "tenant_id, adapter_id, price_version_id, currency"
MONTHLY_ROLLUPS: LiteralString = f"""
    SELECT {ROLLUP_KEY}, month, requests, uncached_tokens, cached_tokens, completion_tokens, amount_pico,
        reasoning_tokens FROM monthly_rollups
    ORDER BY {ROLLUP_KEY}, month
"""
SUMS_OF_HOURS: LiteralString = f"""
    SELECT {ROLLUP_KEY}, date_trunc('month', hour, 'UTC') AS month, sum(requests), sum(uncached_tokens),
        sum(cached_tokens), sum(completion_tokens), sum(amount_pico), sum(reasoning_tokens)
    FROM usage_rollups GROUP BY {ROLLUP_KEY}, month ORDER BY {ROLLUP_KEY}, month
"""
months = st.sampled_from(MONTHS)
tenants = st.integers(0, 1)


class BillingMachine(RuleBasedStateMachine):
    """`used`: the pico-units of each tenant's months. `final`: every invoice as it was when it became final."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        with psycopg.connect(self.url) as owner:
            owner.execute(EMPTY)
        self.database = Database(self.url, pool_size=3)
        self.tenants: list[BilledTenant] = []
        self.used: dict[tuple[int, Month], int] = {}
        self.granted: dict[UUID, int] = {}
        self.final: dict[UUID, InvoiceDetails] = {}
        self.states: dict[UUID, str] = {}

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return self.runner.run(work)

    def work(self) -> Any:
        return unit_of_work(self.database, system_actor("machine"), None, None)

    @initialize(minimum=st.sampled_from([0, 40]), tax=st.sampled_from([0, 190_000]))
    def have_tenants(self, minimum: int, tax: int) -> None:
        """Each has used something in every month, and has a credit that does not pay it all."""

        async def make(name: str) -> BilledTenant:
            tenant = await make_billed_tenant(self.database, name, {"USD": PRICE})
            await tenant.set_terms(minimum_micro=minimum, tax_rate_ppm=tax, issuer="Serving Ltd")
            return tenant

        self.tenants = [self.run(make(name)) for name in ("acme", "rival")]
        for tenant in range(2):
            self.grant(tenant=tenant, amount=90, priority=0, expires=False)
            for month in MONTHS:
                self.use(tenant=tenant, month=month, tokens=40, adapter=ADAPTER)

    @rule(tenant=tenants, month=months, tokens=st.integers(-60, 60), adapter=st.sampled_from([None, ADAPTER]))
    def use(self, tenant: int, month: Month, tokens: int, adapter: UUID | None) -> None:
        """Usage, or a correction of negative tokens."""
        kind = "correction" if tokens < 0 else "usage"
        self.run(
            self.tenants[tenant].use(month.begin, tokens, 1, 2, reasoning=1, adapter_id=adapter, kind=kind)
        )
        amount = PRICE.amount_pico(tokens + 1, 1, 2, 1)
        self.used[tenant, month] = self.used.get((tenant, month), 0) + amount

    @rule(tenant=tenants, amount=st.integers(1, 100), priority=st.integers(0, 1), expires=st.booleans())
    def grant(self, tenant: int, amount: int, priority: int, expires: bool) -> None:
        expires_at = datetime.now(UTC) + timedelta(days=1) if expires else None

        async def grant() -> UUID:
            async with self.work() as uow:
                granted = await invoices.grant_credit(
                    *(uow, self.tenants[tenant].id, amount, "machine"),
                    priority=priority,
                    expires_at=expires_at,
                )
                return granted.id

        self.granted[self.run(grant())] = amount

    @rule(tenant=tenants, month=months, fail=st.booleans(), drafted=st.booleans())
    def finalize(self, tenant: int, month: Month, fail: bool, drafted: bool) -> None:
        """Two at once; where `fail`, one of them dies before its commit."""

        async def draft() -> None:
            async with self.work() as uow:
                await invoices.draft(uow, self.tenants[tenant].id, month, "USD", month.end)

        async def once(dies: bool) -> None:
            async with self.work() as uow:
                await invoices.finalize(uow, self.tenants[tenant].id, month, now=NOW)
                if dies:
                    raise ZeroDivisionError

        async def both() -> Sequence[BaseException | None]:
            return await asyncio.gather(once(fail), once(False), return_exceptions=True)

        if drafted:
            self.run(draft())
        for error in self.run(both()):
            assert error is None or isinstance(error, NothingToBill | ZeroDivisionError), error
        for attempt in range(len(self.final) + 1):
            identity = invoice_id(self.tenants[tenant].id, month, "USD", attempt)
            shown = self.run(self.find(identity))
            if shown is not None and shown.state != "draft" and identity not in self.final:
                self.final[identity], self.states[identity] = shown, "final"

    @precondition(lambda self: self.final)
    @rule(data=st.data(), step=st.sampled_from(["paid", "void", "void"]))
    def end(self, data: st.DataObject, step: str) -> None:
        # Not sorted: ids differ from run to run, and equal draws must end the same invoice.
        identity = data.draw(st.sampled_from([*self.final]))

        async def end() -> None:
            async with self.work() as uow:
                await (
                    invoices.pay(uow, identity, "SEPA") if step == "paid" else invoices.void(uow, identity)
                )

        if self.states[identity] in ("final", step):
            self.run(end())
            self.states[identity] = step
        else:
            with pytest.raises(InvoiceStateForbids):
                self.run(end())

    @invariant()
    def final_invoices_never_change(self) -> None:
        for identity, was in self.final.items():
            shown = self.run(self.find(identity))
            assert shown is not None and shown.content == was.content and shown.number == was.number
            assert shown.state == self.states[identity]

    @invariant()
    def numbers_have_no_gaps(self) -> None:
        numbers = sorted(each.number or 0 for each in self.final.values())
        assert numbers == list(range(1, len(numbers) + 1))

    @invariant()
    def every_pico_unit_is_billed_once(self) -> None:
        for number, tenant in enumerate(self.tenants):
            billed: dict[Month, int] = {}
            for each in self.living(tenant.id):
                for line in each.content.totals.lines:
                    if line.token_class is not None:
                        billed[line.month] = billed.get(line.month, 0) + line.amount_pico
            preview = self.run(self.preview(tenant, MONTHS[-1]))
            if preview.state == "draft":
                for line in preview.content.totals.lines:
                    if line.token_class is not None:
                        billed[line.month] = billed.get(line.month, 0) + line.amount_pico
                used = {month: self.used.get((number, month), 0) for month in MONTHS}
                assert {month: billed.get(month, 0) for month in MONTHS} == used

    @invariant()
    def months_are_the_sums_of_their_hours(self) -> None:
        with psycopg.connect(self.url) as owner:
            stored, summed = (owner.execute(each).fetchall() for each in (MONTHLY_ROLLUPS, SUMS_OF_HOURS))
        assert stored == summed

    @invariant()
    def credits_are_what_living_invoices_leave(self) -> None:
        consumed: dict[UUID, int] = {}
        for tenant in self.tenants:
            for each in self.living(tenant.id):
                totals = each.content.totals
                assert totals.credits_micro <= max(0, totals.subtotal_micro)
                assert (
                    abs(sum(line.rounding_pico for line in totals.lines))
                    <= len(totals.lines) * PICO_PER_MICRO // 2
                )
                for use in totals.credit_uses:
                    consumed[use.grant_id] = consumed.get(use.grant_id, 0) + use.amount_micro
        left = {identity: amount - consumed.get(identity, 0) for identity, amount in self.granted.items()}
        with psycopg.connect(self.url) as owner:
            rows = owner.execute(
                "SELECT grant_id, sum(amount_micro) FROM credit_entries WHERE account = 'available' GROUP BY 1"
            ).fetchall()
            unbalanced = owner.execute(
                "SELECT FROM credit_entries GROUP BY transaction_id HAVING sum(amount_micro) <> 0"
            ).fetchall()
        assert {identity: int(amount) for identity, amount in rows} == left
        assert min(left.values(), default=0) >= 0 and unbalanced == []

    def living(self, tenant_id: UUID) -> list[InvoiceDetails]:
        return [
            each
            for identity, each in self.final.items()
            if each.tenant_id == tenant_id and self.states[identity] != "void"
        ]

    async def find(self, identity: UUID) -> InvoiceDetails | None:
        async with self.database.as_operator() as session:
            repository = InvoiceRepository(session)
            found = [row for row in await repository.page({"id": identity}, None, 1)]
            return await repository.details(found[0]) if found else None

    async def preview(self, tenant: BilledTenant, month: Month) -> InvoiceDetails:
        async with self.database.as_operator() as session:
            return await InvoiceRepository(session).preview(tenant.id, month, None)

    def teardown(self) -> None:
        self.run(self.database.close())
        self.runner.close()


def check(url: str, examples: int) -> None:
    BillingMachine.url = url
    run_state_machine_as_test(
        BillingMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=[*HealthCheck],
        ),
    )


def test_bills_and_credits_agree_with_the_model(database_url: str) -> None:
    check(database_url, 6)


@pytest.mark.long
def test_bills_and_credits_agree_with_the_model_for_long(database_url: str) -> None:
    check(database_url, 200)
