"""`loraplex adapter`: commands on a tenant's adapters, which work on the database itself, or push over HTTP.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage. With `--json` only JSON reaches standard output.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.adapters.push import VALIDATING, Promotion, PushedVersion, PushRequest
from loraplex.adapters.report import ValidationReport
from loraplex.adapters.storage.garbage_collection import remove_files_of
from loraplex.adapters.versions.pending_folders import PendingFolders
from loraplex.platform.cli.alias import alias, rollback
from loraplex.platform.cli.command_context import (
    AdapterName,
    DataDir,
    Tenant,
    TenantCommand,
    open_tenant_command,
    run_command,
    run_on_tenant,
)
from loraplex.platform.cli.local_push import data_dir_blobs, local_push
from loraplex.platform.cli.output import AsJson, print_for_people, print_rows, print_table, table_of
from loraplex.platform.cli.remote_push import VALIDATION, open_remote_push
from loraplex.platform.cli.remote_server import read_key
from loraplex.platform.errors import GatewayError
from loraplex.platform.parameters.adapter_profile import read_profile_change
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.platform.processes.progress import shown_progress
from loraplex.tenants.administration import adapters, versions
from loraplex.tenants.models import REASONING_STYLES, TOOL_STYLES
from loraplex.tenants.registry import queries
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.records import (
    AdapterProfile,
    ProfileChange,
    ReasoningStyle,
    VersionDocument,
)

NO_STYLE = "none"
BASE_STYLE = "base"
BODY_LIMITS = BodyLimits(max_bytes=4096, max_depth=2, max_values=100)

ToolStyle = Annotated[
    str | None,
    typer.Option("--tool-style", help=f"{', '.join(TOOL_STYLES)}, or {NO_STYLE}: that of the base model."),
]
ReasoningStyleOption = Annotated[
    str | None,
    typer.Option(
        "--reasoning-style",
        help=f"{', '.join(REASONING_STYLES)}, START,END: own markers, or {BASE_STYLE}: that of the base model.",
    ),
]
Defaults = Annotated[
    str | None,
    typer.Option("--defaults", help="Defaults of parameters as JSON, for example '{\"temperature\": 0.2}'."),
]
DecisionRead = Annotated[
    str | None,
    typer.Option(
        "--decision-read",
        help="How decisions read options: labels, or values for an adapter that writes them.",
    ),
]


def profile_change(
    tool_style: str | None,
    reasoning_style: str | None,
    defaults: str | None,
    decision_read: str | None = None,
) -> ProfileChange:
    """The profile change of the given options. Raises `typer.BadParameter`."""
    body: dict[str, object] = {}
    try:
        if tool_style is not None:
            body["tool_style"] = None if tool_style == NO_STYLE else tool_style
        if reasoning_style is not None:
            start, comma, end = reasoning_style.partition(",")
            style = {"start": start, "end": end} if comma else reasoning_style
            body["reasoning_style"] = None if style == BASE_STYLE else style
        if defaults is not None:
            body["defaults"] = parse_object(defaults.encode(), BODY_LIMITS)
        if decision_read is not None:
            body["decision"] = {"read": decision_read}
        return read_profile_change(body)
    except GatewayError as error:
        raise typer.BadParameter(str(error)) from error


app = typer.Typer(name="adapter", help="A tenant's LoRA adapters.", no_args_is_help=True)

Folder = Annotated[
    Path,
    typer.Argument(
        help="Contains adapter_config.json and adapter_model.safetensors.", exists=True, file_okay=False
    ),
]
PushedName = Annotated[str, typer.Option("--name", help="The adapter's name.")]
Url = Annotated[
    str | None, typer.Option("--url", help="A server elsewhere, which gets the folder over HTTP.")
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        help="A key of the tenant for that server (adapters:write); `-` reads it from standard input.",
    ),
]
NoProbe = Annotated[
    bool, typer.Option("--no-probe", help="Let no engine probe the adapter first. It is audited.")
]
Model = Annotated[str | None, typer.Option("--model", help="The base model, where no server has run yet.")]
Promote = Annotated[
    bool,
    typer.Option(
        help="Move the alias `production` to the version once it is ready; --no-promote: only to an adapter's first one."
    ),
]
NoAlias = Annotated[
    bool, typer.Option("--no-alias", help="Move no alias, as an upload in the console or by the API.")
]
VERSION_COLUMNS = ("version", "state", "rank", "size_bytes", "aliases", "profile", "created_at", "digest")


@app.command()
def push(
    folder: Folder,
    tenant: Tenant,
    name: PushedName,
    url: Url = None,
    key: Key = None,
    no_probe: NoProbe = False,
    model: Model = None,
    promote: Promote = True,
    no_alias: NoAlias = False,
    tool_style: ToolStyle = None,
    reasoning_style: ReasoningStyleOption = None,
    defaults: Defaults = None,
    decision_read: DecisionRead = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Store an adapter as a new version, once a server has validated and probed it, and move `production` to it.

    The server is the one that runs on this data directory, or the one at --url. Without a server the files are validated here, and
    the next start probes them.
    """
    change = profile_change(tool_style, reasoning_style, defaults, decision_read)
    promotion: Promotion = "never" if no_alias else "always" if promote else "first"
    profile = AdapterProfile(**change) if change else None
    request = PushRequest(name=name, folder=folder, promote=promotion, profile=profile)
    key = None if key is None else read_key(key)
    if (url is None) != (key is None):
        raise typer.BadParameter("--url and --key need each other")
    if url is not None and (no_probe or model is not None):
        raise typer.BadParameter("--no-probe and --model are for this data directory, not for --url")

    async def run() -> PushedVersion:
        with shown_progress() as progress:
            if url is not None and key is not None:
                async with open_remote_push(url, key, tenant, progress) as remote:
                    return await remote.push(request)
            async with open_tenant_command(tenant, data_dir) as command:
                progress(VALIDATION)
                local = await local_push(command, model)
                use_case = local.push_unprobed if no_probe else local.push
                return await use_case(command.tenant_id, request)

    pushed = run_command(run(), as_json=as_json)
    document = asdict(pushed) | {"report": {"checks": pushed.report.as_dicts()}}
    print_table(document, as_json, _report_table(pushed.report))
    if pushed.state == VALIDATING:
        _explain_waiting(pushed)


@app.command("list")
def list_adapters(tenant: Tenant, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List a tenant's adapters."""

    async def run(command: TenantCommand) -> list[dict[str, Any]]:
        async with command.query() as session:
            names = await queries.names(session, command.tenant_id)
            return [await _adapter_document(session, command, name) for name in names]

    documents = run_on_tenant(tenant, data_dir, run, as_json)
    table = table_of("name", "versions", "aliases")
    for document in documents:
        aliases = ", ".join(f"{alias}@{version}" for alias, version in document["aliases"].items())
        table.add_row(document["name"], str(len(document["versions"])), aliases)
    print_table(documents, as_json, table)


@app.command()
def show(name: AdapterName, tenant: Tenant, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show an adapter's versions and aliases."""

    async def run(command: TenantCommand) -> dict[str, Any]:
        async with command.query() as session:
            return await _adapter_document(session, command, name)

    document = run_on_tenant(tenant, data_dir, run, as_json)
    if as_json:
        typer.echo(json.dumps(document))
        return
    for version in document["versions"]:
        shares = {alias: split.get(version["version"], 0) for alias, split in document["shares"].items()}
        aliases = [f"{alias} {share} %" if share < 100 else alias for alias, share in shares.items() if share]
        defaults = json.dumps(version["defaults"]) if version["defaults"] else None
        profile = [version["tool_style"], _style_text(version["reasoning_style"]), defaults]
        version |= {"aliases": aliases, "profile": [*filter(None, profile)]}
    print_rows(document["versions"], as_json, VERSION_COLUMNS)
    for alias_name, guard in document["guards"].items():
        if guard is not None:
            print_for_people(f"{escape(f'{name}:{alias_name}')} {_guard_text(guard)}")


@app.command()
def profile(
    name: AdapterName,
    version: Annotated[int, typer.Argument(min=1, help="A version that never had an alias.")],
    tenant: Tenant,
    tool_style: ToolStyle = None,
    reasoning_style: ReasoningStyleOption = None,
    defaults: Defaults = None,
    decision_read: DecisionRead = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show a version's styles and defaults of parameters, or change them before its first alias."""
    change = profile_change(tool_style, reasoning_style, defaults, decision_read)

    async def run(command: TenantCommand) -> VersionDocument:
        if change:
            async with command.unit_of_work() as uow:
                return await versions.change_profile(uow, command.tenant_id, name, version, change)
        async with command.query() as session:
            return await queries.version(session, command.tenant_id, name, version)

    record = run_on_tenant(tenant, data_dir, run, as_json)
    styles = {"tool_style": record.tool_style, "reasoning_style": record.reasoning_style}
    document = {**styles, "defaults": record.defaults, "decision": record.decision}
    style = (
        f"tool style {record.tool_style or '-'}, reasoning style {_style_text(record.reasoning_style) or '-'}"
    )
    read = (record.decision or {"read": "labels"})["read"]
    text = f"{escape(name)}@{version}: {escape(style)}, defaults {json.dumps(record.defaults)}, decisions by {read}"
    print_table({"name": name, "version": version} | document, as_json, text)


app.command()(alias)
app.command()(rollback)


@app.command()
def release(
    name: AdapterName,
    version: Annotated[int, typer.Argument(min=1, help="A version that was quarantined.")],
    tenant: Tenant,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Lift the quarantine of a version, when the adapter did not cause the fault.

    An engine that quarantined the version refuses it until the engine restarts: restart it first, then release the version.
    """

    async def run(command: TenantCommand) -> VersionDocument:
        async with command.unit_of_work() as uow:
            return await versions.lift_quarantine(uow, command.tenant_id, name, version)

    moved = run_on_tenant(tenant, data_dir, run, as_json)
    document = {"name": name, "version": version, "state": moved.state}
    print_table(document, as_json, f"{escape(name)}@{version} is {moved.state}")


@app.command()
def delete(
    name: AdapterName,
    tenant: Tenant,
    version: Annotated[int | None, typer.Option("--version", min=1, help="Delete this version only.")] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Delete even while requests use it; a whole adapter also with its aliases."
        ),
    ] = False,
    end_running: Annotated[
        bool, typer.Option(help="With --force: end the requests that use it, on every gateway.")
    ] = True,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Delete an adapter and its stored files, or one version.

    Refused while an alias points to it, it is being validated, or requests use it.
    """

    async def run(command: TenantCommand) -> None:
        blobs = data_dir_blobs(command.home)
        # Before the change: where the folder of another user cannot be read, nothing is deleted.
        is_served = PendingFolders(blobs.local.root).is_watched()
        async with command.unit_of_work() as uow:
            target = command.tenant_id, name
            if version is not None and force:
                adapter_id = await versions.force_delete(uow, *target, version, end_running=end_running)
            elif version is not None:
                adapter_id = await versions.delete(uow, *target, version)
            elif force:
                adapter_id = await adapters.force_delete(uow, *target, end_running=end_running)
            else:
                adapter_id = await adapters.delete(uow, *target)
        if not is_served:
            await remove_files_of(command.database, blobs.adapters.delete, adapter_id)

    run_on_tenant(tenant, data_dir, run, as_json)
    deleted = name if version is None else f"{name}@{version}"
    print_table({"deleted": deleted}, as_json, f"deleted {escape(deleted)}")


async def _adapter_document(session: AsyncSession, command: TenantCommand, name: str) -> dict[str, Any]:
    aliases = await AliasRepository(session, command.tenant_id).list(name)
    records = await AdapterRepository(session, command.tenant_id).versions(name)
    return {
        "name": name,
        "aliases": {each.alias: each.main_version for each in aliases},
        "shares": {each.alias: each.targets for each in aliases},
        "guards": {each.alias: each.guard and each.guard.model_dump(mode="json") for each in aliases},
        "versions": [VersionDocument.of(name, each).model_dump(mode="json") for each in records],
    }


def _guard_text(guard: dict[str, Any]) -> str:
    counts = guard["counts"]
    near = ", ".join(f"{bound}={guard[bound]:g} {share:.0%}" for bound, share in guard["evidence"].items())
    return (
        f"goes back from version {guard['canary']} to {guard['baseline']} at 100 %: {near}; "
        f"{counts['canary_requests']} of at least {guard['min_requests']} requests"
    )


def _style_text(style: ReasoningStyle | None) -> str | None:
    """Write a reasoning style as its option has it."""
    return f"{style['start']},{style['end']}" if isinstance(style, dict) else style


def _explain_waiting(pushed: PushedVersion) -> None:
    place = f"{pushed.name}@{pushed.version}"
    text = (
        f"{place} is validating: no server runs on this data directory. The next start of one probes it; "
        "then move an alias to it. A server elsewhere takes the folder with --url and --key."
    )
    Console(stderr=True, soft_wrap=True).print(escape(text))


def _report_table(report: ValidationReport) -> Table:
    table = table_of("check", "result", "detail")
    for check in report.checks:
        result = "warning" if check.warning else "passed" if check.passed else "failed"
        table.add_row(check.name, result, escape(check.detail))
    return table
