"""Opens the stores of a command, runs its use cases, and maps its errors to exit codes.

Invariant: an embedded database is migrated before it is used; a production one is only checked.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar
from uuid import UUID

import typer
from rich.console import Console
from rich.markup import escape
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.adapters.errors import AdapterRejected, AdaptersError, TensorsRejected
from loraplex.engine.errors import EngineError
from loraplex.platform.config import Settings, load_settings
from loraplex.platform.datastores.connections import ensure_schema, open_stores
from loraplex.platform.datastores.embedded.servers import running_redis_url
from loraplex.platform.datastores.installation import require_installation
from loraplex.platform.startup_errors import StartError
from loraplex.platform.web.adapters.validation_report import remediation_of
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import command_actor
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.errors import CountersNewer, InvalidField, TenantsError, ValkeyUnavailable
from loraplex.tenants.unit_of_work import PolicyPublisher, UnitOfWork, unit_of_work
from loraplex.tenants.valkey import open_valkey

P = ParamSpec("P")
Result = TypeVar("Result")
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The server's data directory.")]
Tenant = Annotated[str, typer.Option("--tenant", help="The tenant's name.")]
AdapterName = Annotated[str, typer.Argument(help="The adapter's name.")]


@dataclass(frozen=True, slots=True)
class CommandStores:
    """Stores of a command. `redis_url` None: no Valkey is configured, and none runs in the data directory."""

    database: Database
    redis_url: str | None = field(repr=False)


@asynccontextmanager
async def open_database(data_dir: Path | None = None) -> AsyncIterator[Database]:
    """Open the migrated database for the duration of a command. Raises `StartError`."""
    async with open_command_stores(data_dir) as stores:
        yield stores.database


@asynccontextmanager
async def open_command_stores(data_dir: Path | None = None) -> AsyncIterator[CommandStores]:
    """Open the migrated database, and find the Valkey of the running servers. Raises `StartError`."""
    settings = load_settings({"data_dir": data_dir})
    require_installation(settings)
    async with store_addresses(settings) as (url, embedded, redis_url):
        folder = settings.data_dir if embedded else None
        await asyncio.to_thread(ensure_schema, url, migrate=embedded, embedded_in=folder)
        database = Database(url, pool_size=2, limits=settings.default_limits)
        try:
            yield CommandStores(database, redis_url)
        finally:
            await database.close()


@asynccontextmanager
async def store_addresses(settings: Settings) -> AsyncIterator[tuple[str, bool, str | None]]:
    """Yield the database's address, whether it is embedded, and Valkey's address. With DATABASE_URL no server is started."""
    redis_url = None if settings.redis_url is None else settings.redis_url.get_secret_value()
    if settings.database_url is not None:
        redis_url = redis_url or running_redis_url(settings.data_dir)
        yield settings.database_url.get_secret_value(), False, redis_url
        return
    async with open_stores(settings, transient=True) as addresses:
        yield addresses.database_url, True, redis_url or addresses.redis_url


@asynccontextmanager
async def command_unit_of_work(data_dir: Path | None) -> AsyncIterator[UnitOfWork]:
    """Open the stores and a unit of work with an operator's rights. Its author is the user who runs the command."""
    async with (
        open_command_stores(data_dir) as stores,
        open_publisher(stores) as publisher,
        unit_of_work(stores.database, command_actor(), None, publisher) as uow,
    ):
        yield uow


@dataclass(frozen=True, slots=True)
class TenantCommand:
    """A command on one tenant of the database. `home` is the data directory."""

    database: Database
    tenant_id: UUID
    home: Path
    publisher: PolicyPublisher | None

    def query(self) -> AbstractAsyncContextManager[AsyncSession]:
        """Open a transaction that changes nothing."""
        return self.database.as_tenant(self.tenant_id)

    def unit_of_work(self) -> AbstractAsyncContextManager[UnitOfWork]:
        """Open a unit of work in the tenant's role. Its author is the user who runs the command."""
        return unit_of_work(self.database, command_actor(), self.tenant_id, self.publisher)


@asynccontextmanager
async def open_tenant_command(tenant: str, data_dir: Path | None) -> AsyncIterator[TenantCommand]:
    """Open the stores for a command on the tenant of this name. Raises `StartError`, `TenantNotFound`."""
    async with open_command_stores(data_dir) as stores, open_publisher(stores) as publisher:
        async with stores.database.as_operator() as session:
            tenant_id = (await TenantRepository(session).get(tenant)).id
        home = load_settings({"data_dir": data_dir}).data_dir
        yield TenantCommand(stores.database, tenant_id, home, publisher)


class CommandPublisher:
    """Notifies the gateways that share the command's Valkey."""

    def __init__(self, database: Database, counters: Counters) -> None:
        self._database = database
        self._counters = counters

    async def publish(self, tenant_id: UUID) -> None:
        """Publish the tenant's policy epoch. Without Valkey, gateways see the change when their caches expire."""
        async with self._database.as_operator() as session:
            tenant = await TenantRepository(session).by_id(tenant_id)
        try:
            await self._counters.publish_policy(tenant_id, tenant.policy_epoch)
        except (ValkeyUnavailable, CountersNewer) as error:
            typer.echo(f"{error}: running servers see the change within a second", err=True)


@asynccontextmanager
async def open_publisher(stores: CommandStores) -> AsyncIterator[PolicyPublisher | None]:
    """Return None without Valkey. It is connected to on first use. Raises `InvalidField` for a malformed address."""
    if stores.redis_url is None:
        yield None
        return
    client = open_valkey(stores.redis_url)
    try:
        yield CommandPublisher(stores.database, Counters(client))
    finally:
        await client.aclose()


def async_command(work: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a command of an asynchronous function, with its options and its help."""

    @wraps(work)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        run_command(work(*args, **kwargs))

    return command


def run_command(work: Coroutine[Any, Any, Result], *, as_json: bool = False) -> Result:
    """Run a command to its end, as `exit_codes`."""
    with exit_codes(as_json=as_json):
        return asyncio.run(work)


def run_on_tenant(
    tenant: str, data_dir: Path | None, work: Callable[[TenantCommand], Awaitable[Result]], as_json: bool
) -> Result:
    """Run `work` on a tenant of the database to its end, as `exit_codes`."""

    async def run() -> Result:
        async with open_tenant_command(tenant, data_dir) as command:
            return await work(command)

    return run_command(run(), as_json=as_json)


def end_at_sigterm() -> None:
    """Cancel the current task at SIGTERM, as Ctrl-C does."""
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


@contextmanager
def exit_codes(*, as_json: bool = False) -> Iterator[None]:
    """A known error becomes one line on standard error and exit code 1 (2: wrong usage).

    `as_json`: a rejected adapter is printed with its report, too.
    """
    try:
        yield
    except (AdaptersError, EngineError, TenantsError, StartError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(str(error))}")
        if isinstance(error, AdapterRejected):
            typer.echo(f"How to mend it: {remediation_of(error.check)}", err=True)
        if as_json and isinstance(error, AdapterRejected):
            report = error.report.as_dicts() if isinstance(error, TensorsRejected) else []
            failure = {"check": error.check, "subject": error.subject, "message": error.message}
            failure["remediation"] = remediation_of(error.check)
            typer.echo(json.dumps({"error": {**failure, "report": report}}))
        code = (
            error.exit_code if isinstance(error, StartError) else 2 if isinstance(error, InvalidField) else 1
        )
        raise typer.Exit(code) from error
