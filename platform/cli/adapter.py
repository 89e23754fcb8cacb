"""`loraplex adapter`: commands on a tenant's adapters, which work on the database itself, without HTTP.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage. With `--json` only JSON reaches standard output.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.adapters.errors import AdapterRejected, AdaptersError, TensorsRejected
from loraplex.adapters.report import ValidationReport
from loraplex.adapters.versions.push import AdapterRegistry, Promotion, PushedVersion, delete_adapter
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.digest import model_digest
from loraplex.engine.errors import EngineError
from loraplex.platform.cli.command_context import open_database
from loraplex.platform.config import load_settings
from loraplex.platform.datastores.blob_storage import BlobStorage
from loraplex.platform.errors import GatewayError
from loraplex.platform.parameters.adapter_profile import read_profile_change
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.platform.server.base_model_file import BaseModelFacts, default_served_name, read_base_model
from loraplex.platform.startup_errors import DependencyFailed, StartError
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.audit_log import Actor, AuditRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField, TenantsError
from loraplex.tenants.models import TOOL_STYLES, AdapterVersion
from loraplex.tenants.registry.adapters import AdapterProfile, AdapterRepository, ProfileChange
from loraplex.tenants.registry.aliases import AliasRepository, AliasState
from loraplex.tenants.registry.versions import VersionStates

NO_STYLE = "none"
BODY_LIMITS = BodyLimits(max_bytes=4096, max_depth=2, max_values=100)

ToolStyle = Annotated[
    str | None,
    typer.Option("--tool-style", help=f"{', '.join(TOOL_STYLES)}, or {NO_STYLE}: that of the base model."),
]
Defaults = Annotated[
    str | None,
    typer.Option("--defaults", help="Sampling defaults as JSON, for example '{\"temperature\": 0.2}'."),
]


def profile_change(tool_style: str | None, defaults: str | None) -> ProfileChange:
    """The profile change of the given options. Raises `typer.BadParameter`."""
    body: dict[str, object] = {}
    try:
        if tool_style is not None:
            body["tool_style"] = None if tool_style == NO_STYLE else tool_style
        if defaults is not None:
            body["defaults"] = parse_object(defaults.encode(), BODY_LIMITS)
        return read_profile_change(body)
    except GatewayError as error:
        raise typer.BadParameter(str(error)) from error


DIGEST_CACHE = "model_digests.json"

app = typer.Typer(name="adapter", help="A tenant's LoRA adapters.", no_args_is_help=True)

Tenant = Annotated[str, typer.Option("--tenant", help="The tenant's name.")]
Name = Annotated[str, typer.Argument(help="The adapter's name.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The server's data directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str | None, typer.Option("--model", help="The base model, where no server has run yet.")]


@app.command()
def push(
    folder: Annotated[
        Path, typer.Argument(help="Contains adapter_config.json and adapter_model.safetensors.")
    ],
    tenant: Tenant,
    name: Annotated[str, typer.Option("--name", help="The adapter's name.")],
    model: Model = None,
    promote: Annotated[
        bool,
        typer.Option(help="Move the alias `production` to this version. The first version always gets it."),
    ] = True,
    no_alias: Annotated[
        bool, typer.Option("--no-alias", help="Move no alias, not even for the first version.")
    ] = False,
    tool_style: ToolStyle = None,
    defaults: Defaults = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Validate an adapter and store it as a new version."""
    change = profile_change(tool_style, defaults)
    promotion: Promotion = "never" if no_alias else "always" if promote else "first"

    async def run(database: Database, tenant_id: UUID, home: Path) -> None:
        with Console(stderr=True).status(f"validating {folder.name}"):
            registry = await asyncio.to_thread(_registry, database, home, model)
            profile = AdapterProfile(**change) if change else None
            pushed = await registry.push(tenant_id, name, folder, promote=promotion, profile=profile)
        _print(_pushed_document(pushed), as_json, _report_table(pushed.report))

    _run(run, tenant, data_dir, as_json)


@app.command("list")
def list_adapters(tenant: Tenant, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List a tenant's adapters."""

    async def run(database: Database, tenant_id: UUID, home: Path) -> None:
        documents = []
        async with database.as_operator() as session:
            for adapter in await AdapterRepository(session, tenant_id).list():
                documents.append(await _adapter_document(session, tenant_id, adapter.name))
        table = Table("name", "versions", "aliases")
        for document in documents:
            aliases = ", ".join(f"{alias}@{version}" for alias, version in document["aliases"].items())
            table.add_row(document["name"], str(len(document["versions"])), aliases)
        _print(documents, as_json, table)

    _run(run, tenant, data_dir, as_json)


@app.command()
def show(name: Name, tenant: Tenant, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show an adapter's versions and aliases."""

    async def run(database: Database, tenant_id: UUID, home: Path) -> None:
        async with database.as_operator() as session:
            document = await _adapter_document(session, tenant_id, name)
        table = Table("version", "state", "rank", "bytes", "aliases", "tool style", "defaults", "digest")
        for version in document["versions"]:
            aliases = [alias for alias, number in document["aliases"].items() if number == version["version"]]
            cells = [version[key] for key in ("version", "state", "rank", "size_bytes")]
            profile = (
                version["tool_style"] or "-",
                json.dumps(version["defaults"]) if version["defaults"] else "-",
            )
            table.add_row(*map(str, cells), ", ".join(aliases), *profile, version["digest"])
        _print(document, as_json, table)

    _run(run, tenant, data_dir, as_json)


@app.command()
def profile(
    name: Name,
    version: Annotated[int, typer.Argument(min=1, help="A version that never had an alias.")],
    tenant: Tenant,
    tool_style: ToolStyle = None,
    defaults: Defaults = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show a version's tool style and sampling defaults, or change them before its first alias."""
    change = profile_change(tool_style, defaults)

    async def run(database: Database, tenant_id: UUID, home: Path) -> None:
        async with database.as_operator() as session:
            adapters = AdapterRepository(session, tenant_id)
            if change:
                record = await adapters.change_profile(name, version, change)
            else:
                record = await adapters.version(name, version)
        document = {"tool_style": record.tool_style, "defaults": record.defaults}
        text = f"{escape(name)}@{version}: tool style {record.tool_style or '-'}, defaults {json.dumps(record.defaults)}"
        _print({"name": name, "version": version} | document, as_json, text)

    _run(run, tenant, data_dir, as_json)


@app.command()
def alias(
    name: Name,
    alias_name: Annotated[str, typer.Argument(metavar="ALIAS", help="For example `production`.")],
    version: Annotated[int, typer.Argument(min=1, help="The version that the alias points to from now on.")],
    tenant: Tenant,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias at a version."""

    async def run(database: Database, tenant_id: UUID, home: Path) -> None:
        async with database.as_operator() as session:
            record = await AliasRepository(session, tenant_id).set(name, alias_name, {version: 100})
        _print_alias(name, record, as_json)

    _run(run, tenant, data_dir, as_json)


@app.command()
def rollback(
    name: Name,
    tenant: Tenant,
    alias_name: Annotated[str, typer.Argument(metavar="[ALIAS]")] = "production",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias back at its previous version."""

    async def run(database: Database, tenant_id: UUID, home: Path) -> None:
        async with database.as_operator() as session:
            record = await AliasRepository(session, tenant_id).rollback(name, alias_name)
        _print_alias(name, record, as_json)

    _run(run, tenant, data_dir, as_json)


@app.command()
def release(
    name: Name,
    version: Annotated[int, typer.Argument(min=1, help="A version that was quarantined.")],
    tenant: Tenant,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Lift the quarantine of a version, when the adapter did not cause the fault.

    An engine that quarantined the version refuses it until the engine restarts: restart it first, then release the version.
    """

    async def run(database: Database, tenant_id: UUID, home: Path) -> None:
        async with database.as_operator() as session:
            record = await AdapterRepository(session, tenant_id).version(name, version)
            audit = AuditRepository(session, Actor("command", "adapter release"), tenant_id)
            states = VersionStates(session, tenant_id, audit)
            moved = await states.move(record.id, "ready", expected=("quarantined",))
        document = {"name": name, "version": version, "state": moved.state}
        _print(document, as_json, f"{escape(name)}@{version} is {moved.state}")

    _run(run, tenant, data_dir, as_json)


@app.command()
def delete(name: Name, tenant: Tenant, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Delete an adapter: its name, its aliases and its stored files."""

    async def run(database: Database, tenant_id: UUID, home: Path) -> None:
        await delete_adapter(database, _blobs(home, "").adapters.delete, tenant_id, name)
        _print({"deleted": name}, as_json, f"deleted {escape(name)}")

    _run(run, tenant, data_dir, as_json)


def _run(
    command: Callable[[Database, UUID, Path], Awaitable[None]],
    tenant: str,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Run a command on a tenant of the database. Every known error becomes one line and an exit code."""

    async def within() -> None:
        async with _tenant(tenant, data_dir) as (database, tenant_id, home):
            await command(database, tenant_id, home)

    try:
        asyncio.run(within())
    except (AdaptersError, TenantsError, EngineError, StartError) as error:
        _print_error(error, as_json)
        usage = isinstance(error, InvalidField)
        code = error.exit_code if isinstance(error, StartError) else 2 if usage else 1
        raise typer.Exit(code) from error


@asynccontextmanager
async def _tenant(name: str, data_dir: Path | None) -> AsyncIterator[tuple[Database, UUID, Path]]:
    home = load_settings({"data_dir": data_dir}).data_dir
    async with open_database(home) as database:
        async with database.as_operator() as session:
            tenant_id = (await TenantRepository(session).get(name)).id
        yield database, tenant_id, home


def _registry(database: Database, home: Path, model: str | None) -> AdapterRegistry:
    facts = read_base_model(home) if model is None else _facts_of(model, home)
    blobs, model_config = _blobs(home, facts.digest), load_model_config(facts.path)
    return AdapterRegistry(
        database,
        blobs.local,
        model_config,
        facts.digest,
        blobs=blobs.adapters,
        served_model_name=facts.served_name,
    )


def _blobs(home: Path, base_model_digest: str) -> BlobStorage:
    """The server's adapter storage. The digest is only needed to fetch an adapter."""
    return BlobStorage(load_settings({"data_dir": home}), base_model_digest)


def _facts_of(model: str, home: Path) -> BaseModelFacts:
    digest = model_digest(model, home / DIGEST_CACHE)
    return BaseModelFacts(served_name=_served_name(model, home), path=model, digest=digest)


def _served_name(model: str, home: Path) -> str:
    """The served name of this data directory's server, or the one that it would use."""
    try:
        return read_base_model(home).served_name
    except DependencyFailed:
        return load_settings({"data_dir": home}).served_model_name or default_served_name(model)


async def _adapter_document(session: AsyncSession, tenant_id: UUID, name: str) -> dict[str, Any]:
    aliases = {state.alias: state.version for state in await AliasRepository(session, tenant_id).list(name)}
    records = await AdapterRepository(session, tenant_id).versions(name)
    versions = [_version_document(version) for version in records]
    return {"name": name, "aliases": aliases, "versions": versions}


def _version_document(version: AdapterVersion) -> dict[str, Any]:
    return {
        "version": version.version,
        "digest": version.digest,
        "state": version.state,
        "rank": version.rank,
        "size_bytes": version.size_bytes,
        "tool_style": version.tool_style,
        "defaults": version.defaults,
        "created_at": version.created_at.isoformat(),
        "report": version.report,
    }


def _pushed_document(pushed: PushedVersion) -> dict[str, Any]:
    return {
        "name": pushed.name,
        "version": pushed.version,
        "digest": pushed.digest,
        "rank": pushed.rank,
        "size_bytes": pushed.size_bytes,
        "promoted": pushed.promoted,
        "report": {"checks": pushed.report.as_dicts()},
    }


def _report_table(report: ValidationReport) -> Table:
    table = Table("check", "result", "detail")
    for check in report.checks:
        result = "warning" if check.warning else "passed" if check.passed else "failed"
        table.add_row(check.name, result, escape(check.detail))
    return table


def _print_alias(name: str, record: AliasState, as_json: bool) -> None:
    document = {"name": name, "alias": record.alias, "version": record.version}
    _print(document, as_json, f"{escape(name)}:{escape(record.alias)} is version {record.version}")


def _print(document: object, as_json: bool, table: Table | str) -> None:
    if as_json:
        typer.echo(json.dumps(document))
    else:
        Console().print(table)


def _print_error(error: Exception, as_json: bool) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(str(error))}")
    if as_json and isinstance(error, AdapterRejected):
        report = error.report.as_dicts() if isinstance(error, TensorsRejected) else []
        failure = {"check": error.check, "subject": error.subject, "message": error.message, "report": report}
        typer.echo(json.dumps({"error": failure}))
