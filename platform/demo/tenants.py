"""The demo's three tenants, each with its own adapter and keys.

Invariant: idempotent. A restart keeps keys that still work, replaces the others, and never moves an alias.
"""

from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.demo.demo_file import DemoAccess, DemoTenantAccess, read_demo_file, write_demo_file
from loraplex.platform.demo.errors import TenantIsNotTheDemos
from loraplex.platform.services.push import FolderPush, PushRequest
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.scopes import INFERENCE, OPERATOR, TENANT_ADMIN
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidApiKey, NameTaken, TenantSuspended
from loraplex.tenants.models import Tenant

ADAPTERS_FOLDER = Path(__file__).resolve().parent / "adapters"
# A tenant with keys of these names was created by the demo.
INFERENCE_KEY = "demo inference"
ADMIN_KEY = "demo admin"
OPERATOR_KEY = "demo operator"


@dataclass(frozen=True)
class DemoTenant:
    """A tenant and the bundled adapters it owns."""

    name: str
    adapters: tuple[str, ...]


DEMO_TENANTS = (
    DemoTenant("harbor", ("pirate",)),
    DemoTenant("ledger", ("records",)),
    DemoTenant("acme", ("support",)),
)


async def prepare_demo(
    database: Database,
    push: FolderPush,
    data_dir: Path,
    *,
    base_url: str,
    console_url: str | None,
    model: str,
) -> DemoAccess:
    """Create missing tenants, keys and adapters, write `demo.json` in `data_dir` and return its content.

    `model` is the served name of the base model. Raises `TenantIsNotTheDemos` if a name is in use by another tenant.
    """
    written = read_demo_file(data_dir)
    async with database.as_operator() as session:
        tenants = [(plan, await _tenant(session, plan.name)) for plan in DEMO_TENANTS]
        access = DemoAccess(
            base_url=base_url,
            console_url=console_url,
            model=model,
            operator_key=await _key(
                session, None, OPERATOR_KEY, OPERATOR, None if written is None else written.operator_key
            ),
            tenants=tuple(
                [await _tenant_access(session, plan, tenant.id, written) for plan, tenant in tenants]
            ),
        )
    # Before the adapters: if one of them fails, the keys that are already in the database must not be lost.
    write_demo_file(data_dir, access)
    for plan, tenant in tenants:
        for adapter in plan.adapters:
            request = PushRequest(name=adapter, folder=ADAPTERS_FOLDER / adapter, promote="first")
            await push.push_unprobed(tenant.id, request)
    return access


async def _tenant(session: AsyncSession, name: str) -> Tenant:
    repository = TenantRepository(session)
    try:
        return await repository.create(name)
    except NameTaken:
        tenant = await repository.get(name)
        if not any(key.name == INFERENCE_KEY for key in await KeyRepository(session).list(tenant.id)):
            raise TenantIsNotTheDemos(name) from None
        return tenant


async def _tenant_access(
    session: AsyncSession, plan: DemoTenant, tenant_id: UUID, written: DemoAccess | None
) -> DemoTenantAccess:
    known = {} if written is None else {tenant.name: tenant for tenant in written.tenants}
    before = known.get(plan.name)
    api_key, admin_key = (None, None) if before is None else (before.api_key, before.admin_key)
    return DemoTenantAccess(
        name=plan.name,
        api_key=await _key(session, tenant_id, INFERENCE_KEY, INFERENCE, api_key),
        admin_key=await _key(session, tenant_id, ADMIN_KEY, TENANT_ADMIN, admin_key),
        adapters=plan.adapters,
    )


async def _key(
    session: AsyncSession, tenant_id: UUID | None, name: str, scope: str, written: str | None
) -> str:
    """Return the key of `demo.json` if it still works, else a new key that replaces all keys of that name."""
    repository = KeyRepository(session)
    if written is not None and await _still_works(repository, tenant_id, name, written):
        return written
    for record in await repository.list(tenant_id):
        if record.name == name and record.revoked_at is None:
            await repository.revoke(tenant_id, record.key_id)
    return (await repository.create(tenant_id, name, [scope])).plaintext


async def _still_works(repository: KeyRepository, tenant_id: UUID | None, name: str, text: str) -> bool:
    try:
        record = await repository.authenticate(text)
    except InvalidApiKey:
        return False
    except TenantSuspended:
        return True
    named = [key.key_id for key in await repository.list(tenant_id) if key.name == name]
    return record.tenant_id == tenant_id and record.key_id in named
