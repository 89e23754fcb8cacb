"""`loraplex adapter alias` and `rollback`: which version an alias points to, and the guard of a canary."""

from typing import Annotated

import typer
from pydantic import ValidationError
from rich.markup import escape

from loraplex.platform.cli.command_context import AdapterName, DataDir, Tenant, TenantCommand, run_on_tenant
from loraplex.platform.cli.output import AsJson, print_table
from loraplex.tenants.administration import gated_aliases
from loraplex.tenants.administration.gated_aliases import GateOverride
from loraplex.tenants.canaries.records import GuardBounds
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.registry import queries
from loraplex.tenants.registry import use_cases as aliases
from loraplex.tenants.registry.records import WHOLE, AliasDocument
from loraplex.tenants.scopes import TENANT_SCOPES

Share = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=WHOLE - 1,
        help="Percent of the requests that VERSION gets; the version before keeps the rest.",
    ),
]
Guard = Annotated[
    str | None,
    typer.Option(
        metavar="BOUND=N,…",
        help="Let the alias go back by itself, for example `max_failure_ratio=2,min_requests=100`; allowed: "
        + ", ".join(GuardBounds.model_fields),
    ),
]


def alias(
    name: AdapterName,
    alias_name: Annotated[str, typer.Argument(metavar="ALIAS", help="For example `production`.")],
    tenant: Tenant,
    version: Annotated[
        int | None, typer.Argument(min=1, help="The version that the alias points to from now on.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the alias instead.")] = False,
    override_gate: Annotated[
        str | None, typer.Option(metavar="REASON", help="Move past the alias's gate. It is audited.")
    ] = None,
    share: Share = None,
    guard: Guard = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias at a version, let the version have a share of its requests, or delete it."""
    if delete == (version is not None):
        raise typer.BadParameter("either VERSION or --delete is needed")
    if share is None and guard is not None:
        raise typer.BadParameter("--guard needs --share")
    bounds = None if guard is None else _read_guard(guard)
    override = None if override_gate is None else GateOverride(override_gate, TENANT_SCOPES)

    async def run(command: TenantCommand) -> AliasDocument:
        async with command.unit_of_work() as uow:
            if version is None:
                return await aliases.delete(uow, command.tenant_id, name, alias_name)
            targets = {version: WHOLE}
            if share is not None:
                before = await queries.alias(uow.session, command.tenant_id, name, alias_name)
                if before.baseline == version:
                    raise InvalidField("share", f"version {version} keeps the rest: name another one")
                targets = {before.baseline: WHOLE - share, version: share}
            return await gated_aliases.move(
                uow, command.tenant_id, name, alias_name, targets, guard=bounds, override=override
            )

    record = run_on_tenant(tenant, data_dir, run, as_json)
    if delete:
        document = {"name": name, "alias": record.alias, "version": None}
        print_table(document, as_json, f"deleted {escape(name)}:{escape(record.alias)}")
    else:
        _print_alias(record, as_json)


def rollback(
    name: AdapterName,
    tenant: Tenant,
    alias_name: Annotated[str, typer.Argument(metavar="[ALIAS]")] = "production",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias back at its previous version."""

    async def run(command: TenantCommand) -> AliasDocument:
        async with command.unit_of_work() as uow:
            return await gated_aliases.roll_back(uow, command.tenant_id, name, alias_name)

    _print_alias(run_on_tenant(tenant, data_dir, run, as_json), as_json)


def _read_guard(text: str) -> GuardBounds:
    """Raises `BadParameter`."""
    bounds = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    try:
        return GuardBounds.model_validate_strings(bounds)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise typer.BadParameter(f"--guard {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _print_alias(record: AliasDocument, as_json: bool) -> None:
    version = record.main_version
    document = {"name": record.name, "alias": record.alias, "version": version}
    print_table(document, as_json, f"{escape(record.name)}:{escape(record.alias)} is version {version}")
