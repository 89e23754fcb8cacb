"""`loraplex drill`: makes a fault in a running installation on purpose, and reports what it cost.

Exit codes: 0 every promise was kept, 1 one was broken, 2 the drill could not be run. Invariant: nothing is done before it was
said and confirmed.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

from loraplex.platform.cli.command_context import DataDir, end_at_sigterm, exit_codes
from loraplex.platform.cli.output import AsJson
from loraplex.platform.config import load_settings
from loraplex.platform.drills.drill import run_drill
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.bad_version import BadVersion
from loraplex.platform.drills.faults.db_outage import DatabaseOutage
from loraplex.platform.drills.faults.disk_full import GIB, DiskFull
from loraplex.platform.drills.faults.engine_loss import EngineHang, EngineKill
from loraplex.platform.drills.faults.fault import Fault
from loraplex.platform.drills.faults.gateway_kill import GatewayKill
from loraplex.platform.drills.faults.overload import Overload
from loraplex.platform.drills.faults.redis_flush import RedisFlush
from loraplex.platform.drills.installation import Installation, find_installation
from loraplex.platform.drills.report import DrillReport
from loraplex.platform.drills.traffic import DrillLoad
from loraplex.platform.processes.progress import shown_progress
from loraplex.platform.startup_errors import DependencyFailed
from loraplex.tenants.errors import TenantsError

app = typer.Typer(
    name="drill",
    help="Faults on purpose, in a running installation. Exit code 0: survived, 1: a promise was broken, 2: not run.",
    no_args_is_help=True,
)

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
BaseUrls = Annotated[
    list[str] | None,
    typer.Option(
        "--base-url",
        help="Each gateway that gets requests; repeatable. Default: those of the data directory.",
    ),
]
Seconds = Annotated[float, typer.Option(min=1, max=300, help="How long the fault lasts.")]
Rate = Annotated[float, typer.Option(min=0.1, max=100, help="Requests per second.")]
MaxTokens = Annotated[int, typer.Option(min=1, max=1024, help="Tokens of each response.")]
RecoverSeconds = Annotated[
    float, typer.Option("--recover-seconds", min=1, max=1800, help="Longest wait for recovery.")
]
MakeFault: TypeAlias = Callable[..., Fault]


def drill_command(name: str) -> Callable[[MakeFault], MakeFault]:
    """Make a command of a function that builds its fault: with the options of the function, then those of every drill."""

    def register(make_fault: MakeFault) -> MakeFault:
        def command(
            rate: Rate = 4.0,
            max_tokens: MaxTokens = 16,
            recover: RecoverSeconds = 120.0,
            base_url: BaseUrls = None,
            data_dir: DataDir = None,
            yes: Yes = False,
            as_json: AsJson = False,
            **own: Any,
        ) -> None:
            load = DrillLoad(rate_per_s=rate, max_tokens=max_tokens, recover_s=recover)
            drill(lambda found: make_fault(found, load, **own), load, base_url, data_dir, yes, as_json)

        _, _, *options = signature(make_fault).parameters.values()
        *shared, _ = signature(command).parameters.values()
        # Where typer reads the options and the help of a command.
        command.__doc__ = make_fault.__doc__
        vars(command)["__signature__"] = Signature([*options, *shared])
        app.command(name)(command)
        return make_fault

    return register


@drill_command("redis-flush")
def redis_flush(found: Installation, _: DrillLoad, seconds: Seconds = 10.0) -> Fault:
    """Valkey loses all counters; they are rebuilt from the ledger and the journals."""
    return RedisFlush(installation=found, seconds=seconds)


@drill_command("db-outage")
def db_outage(found: Installation, _: DrillLoad, seconds: Seconds = 15.0) -> Fault:
    """PostgreSQL refuses all connections; known callers are served on."""
    return DatabaseOutage(installation=found, seconds=seconds)


@drill_command("gateway-kill")
def gateway_kill(
    found: Installation,
    load: DrillLoad,
    restart: Annotated[
        str | None, typer.Option(help="A command that starts the gateway again; it outlives the drill.")
    ] = None,
) -> Fault:
    """A gateway is killed; its supervisor starts it again, and its journal settles what was open."""
    return GatewayKill(installation=found, seconds=load.recover_s, restart=restart)


@drill_command("engine-kill")
def engine_kill(found: Installation, _: DrillLoad) -> Fault:
    """The engine is killed; its gateway starts another one."""
    return EngineKill(installation=found)


@drill_command("engine-hang")
def engine_hang(found: Installation, _: DrillLoad) -> Fault:
    """The engine stops and answers nothing, until the watchdog of its gateway replaces it."""
    return EngineHang(installation=found)


@drill_command("disk-full")
def disk_full(
    found: Installation,
    _: DrillLoad,
    seconds: Seconds = 10.0,
    max_ballast: Annotated[
        float,
        typer.Option(min=0.001, max=10_000, help="GiB that the drill may take; with more free it refuses."),
    ] = 4.0,
) -> Fault:
    """The data directory's file system has no space left; requests are refused before admission."""
    return DiskFull(
        installation=found,
        seconds=seconds,
        max_ballast_bytes=int(max_ballast * GIB),
        ballast=DiskFull.ballast_of(found.data_dir),
    )


@drill_command("overload")
def overload(found: Installation, _: DrillLoad, seconds: Seconds = 30.0) -> Fault:
    """Two tiers offer twice the capacity, which sets their rates; the higher one waits no longer, the lower one is refused."""
    return Overload(installation=found, seconds=Overload.seconds_of(seconds))


@drill_command("bad-version")
def bad_version(found: Installation, _: DrillLoad, seconds: Seconds = 120.0) -> Fault:
    """A version whose answers miss their schema is released behind a guard, which sets the alias back."""
    return BadVersion(installation=found, seconds=seconds)


def drill(
    make_fault: Callable[[Installation], Fault],
    load: DrillLoad,
    base_urls: list[str] | None,
    data_dir: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Find the installation, ask, run and report. SIGTERM ends the drill as Ctrl-C does: the fault is taken back."""

    async def within() -> DrillReport:
        end_at_sigterm()
        installation = await find_installation(load_settings({"data_dir": data_dir}), base_urls or ())
        fault = make_fault(installation)
        await fault.check()
        confirm(fault, yes)
        with shown_progress() as progress:
            return await run_drill(fault, load, progress)

    with exit_codes():
        try:
            report = asyncio.run(within())
        except (TenantsError, DependencyFailed) as error:
            raise DrillImpossible(str(error)) from error
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise DrillImpossible("stopped before the end; the fault was taken back") from None
    if as_json:
        typer.echo(json.dumps(report.document()))
    else:
        report.print(Console())
    if not report.survived:
        raise typer.Exit(1)


def confirm(fault: Fault, yes: bool) -> None:
    """Say what will be done, and ask unless `yes`. Raises `DrillImpossible` without a terminal, or where the answer is no."""
    typer.echo(f"drill {fault.name}: this will {fault.plan()}", err=True)
    if yes:
        return
    if not is_terminal():
        raise DrillImpossible("nothing was done: confirm with --yes where there is no terminal to ask at")
    if not typer.confirm("Do it?", err=True):
        raise DrillImpossible("nothing was done")


def is_terminal() -> bool:
    """Whether this command's input comes from a person."""
    return sys.stdin.isatty()
