"""The demo's three tenants, each with its own adapter, keys and sample usage.

Invariant: idempotent. A restart keeps keys that still work, replaces the others, and never moves an alias.
"""

from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from loraplex.adapters.push import FolderPush, PushRequest
from loraplex.platform.demo.demo_file import DemoAccess, DemoTenantAccess, read_demo_file, write_demo_file
from loraplex.platform.demo.errors import TenantIsNotTheDemos
from loraplex.platform.demo.history import announce_history, write_history
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import system_actor
from loraplex.tenants.administration import tenants
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.use_cases import Operator
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidApiKey, NameTaken, TenantSuspended
from loraplex.tenants.people import accounts
from loraplex.tenants.people.records import link_address
from loraplex.tenants.scopes import INFERENCE, OPERATOR, TENANT_ADMIN
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work

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
    console_root: str | None,
    model: str,
) -> DemoAccess:
    """Create missing tenants with keys, adapters and sample usage, write `demo.json` in `data_dir` and return its content.

    `console_root`: the address of the console, None without one; `console_url` becomes a link that signs in once, as an admin of
    the first tenant. `model` is the served name of the base model. Raises `TenantIsNotTheDemos` if a name is in use by another tenant.
    """
    written = read_demo_file(data_dir)
    async with unit_of_work(database, system_actor("demo"), None, None) as uow:
        owners = [(plan, await _tenant(uow, plan.name)) for plan in DEMO_TENANTS]
        access = DemoAccess(
            base_url=base_url,
            console_url=None if console_root is None else await _console_url(uow, console_root, owners[0][1]),
            model=model,
            operator_key=await _key(
                uow, None, OPERATOR_KEY, OPERATOR, None if written is None else written.operator_key
            ),
            tenants=tuple([await _tenant_access(uow, plan, owner, written) for plan, owner in owners]),
        )
    # Before the adapters: if one of them fails, the keys that are already in the database must not be lost.
    write_demo_file(data_dir, access)
    for plan, owner in owners:
        for adapter in plan.adapters:
            request = PushRequest(name=adapter, folder=ADAPTERS_FOLDER / adapter, promote="first")
            await push.push_unprobed(owner.tenant_id, request)
        await write_history(database, owner.tenant_id, plan.adapters[0])
    return access


async def _console_url(uow: UnitOfWork, root: str, owner: "_Owner") -> str:
    return link_address(root, await accounts.demo_link(uow, owner.tenant_id))


@dataclass(frozen=True, slots=True)
class _Owner:
    """A tenant of the demo. `first_key`: the administrator's key of a tenant that is new."""

    tenant_id: UUID
    first_key: str | None = None


async def _tenant(uow: UnitOfWork, name: str) -> _Owner:
    try:
        created = await tenants.create(uow, name, first_key_name=ADMIN_KEY)
        await announce_history(uow, created.id)
        return _Owner(created.id, created.api_key)
    except NameTaken:
        tenant = await TenantRepository(uow.session).get(name)
        if not any(key.name == INFERENCE_KEY for key in await KeyRepository(uow.session).list(tenant.id)):
            raise TenantIsNotTheDemos(name) from None
        return _Owner(tenant.id)


async def _tenant_access(
    uow: UnitOfWork, plan: DemoTenant, owner: _Owner, written: DemoAccess | None
) -> DemoTenantAccess:
    known = {} if written is None else {tenant.name: tenant for tenant in written.tenants}
    before = known.get(plan.name)
    api_key, admin_key = (None, None) if before is None else (before.api_key, before.admin_key)
    return DemoTenantAccess(
        name=plan.name,
        api_key=await _key(uow, owner.tenant_id, INFERENCE_KEY, INFERENCE, api_key),
        admin_key=await _key(uow, owner.tenant_id, ADMIN_KEY, TENANT_ADMIN, owner.first_key or admin_key),
        adapters=plan.adapters,
    )


async def _key(uow: UnitOfWork, tenant_id: UUID | None, name: str, scope: str, known: str | None) -> str:
    """Return the key `known` if it still works, else a new key that replaces all keys of that name."""
    repository, operator = KeyRepository(uow.session), Operator(tenant_id)
    if known is not None and await _still_works(repository, tenant_id, name, known):
        return known
    for record in await repository.list(tenant_id):
        if record.name == name and record.revoked_at is None:
            await api_keys.revoke(uow, operator, record.key_id)
    return (await api_keys.create(uow, operator, name, [scope])).api_key


async def _still_works(repository: KeyRepository, tenant_id: UUID | None, name: str, text: str) -> bool:
    try:
        record = await repository.authenticate(text)
    except InvalidApiKey:
        return False
    except TenantSuspended:
        return True
    named = [key.key_id for key in await repository.list(tenant_id) if key.name == name]
    return record.tenant_id == tenant_id and record.key_id in named
