"""The rows of the walk for credits and invoices."""

from typing import Final

from tests.platform.use_cases.use_case import UseCase
from tests.platform.use_cases.walked_world import NO_ID, Outcome, World
from tests.tenants.invoices.billed_tenant import bill

from loraplex.tenants.actors import system_actor
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.invoices.invoices import invoice_id
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.unit_of_work import unit_of_work

JANUARY: Final = Month(2026, 1)
CREDIT: Final = {"amount_micro": 5_000_000, "reason": "welcome", "priority": 7}


async def _use(world: World) -> None:
    """Usage in January, and a credit that pays a part of it."""
    tenant = await bill(world.database, world.tenant_id)
    await tenant.use(JANUARY.begin, 10**7)
    async with unit_of_work(world.database, system_actor("walk"), None, None) as uow:
        await invoices.grant_credit(uow, world.tenant_id, 1_000_000, "welcome")


async def _finalize(world: World) -> None:
    await _use(world)
    async with unit_of_work(world.database, system_actor("walk"), None, None) as uow:
        await invoices.finalize(uow, world.tenant_id, JANUARY)


def _invoice(world: World) -> str:
    return str(invoice_id(world.tenant_id, JANUARY, "USD", 0))


async def _finalize_by_http(world: World, month: str) -> Outcome:
    return await world.operator(
        "POST", "/invoices/finalize", {"tenant_id": str(world.tenant_id), "month": month}
    )


ALL: Final = (
    UseCase(
        function=invoices.grant_credit,
        entries=("credit.grant",),
        http=lambda world: world.operator("POST", f"/tenants/{world.tenant_id}/credits", CREDIT),
        command=lambda world: world.command(
            *("credit", "grant", "5000000", "--tenant", "harbor", "--reason", "welcome", "--priority", "7")
        ),
        refused_http=lambda world: world.operator("POST", f"/tenants/{NO_ID}/credits", CREDIT),
        refused_command=lambda world: world.command(
            "credit", "grant", "0", "--tenant", "harbor", "--reason", "welcome"
        ),
    ),
    UseCase(
        function=invoices.finalize,
        entries=("invoice.finalize",),
        given=_use,
        http=lambda world: _finalize_by_http(world, "2026-01"),
        command=lambda world: world.command(
            "invoice", "finalize", "--tenant", "harbor", "--month", "2026-01"
        ),
        refused_http=lambda world: _finalize_by_http(world, "2099-12"),
        refused_command=lambda world: world.command(
            "invoice", "finalize", "--tenant", "harbor", "--month", "2099-12"
        ),
    ),
    UseCase(
        function=invoices.pay,
        entries=("invoice.pay",),
        given=_finalize,
        http=lambda world: world.operator("POST", f"/invoices/{_invoice(world)}/paid", {"reference": "SEPA"}),
        command=lambda world: world.command("invoice", "paid", _invoice(world), "--reference", "SEPA"),
        refused_http=lambda world: world.operator("POST", f"/invoices/{NO_ID}/paid", {"reference": "SEPA"}),
        refused_command=lambda world: world.command("invoice", "paid", NO_ID, "--reference", "SEPA"),
    ),
    UseCase(
        function=invoices.void,
        entries=("invoice.void",),
        given=_finalize,
        http=lambda world: world.operator("POST", f"/invoices/{_invoice(world)}/void"),
        command=lambda world: world.command("invoice", "void", _invoice(world)),
        refused_http=lambda world: world.operator("POST", f"/invoices/{NO_ID}/void"),
        refused_command=lambda world: world.command("invoice", "void", NO_ID),
    ),
)
