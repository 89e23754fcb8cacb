"""`loraplex drill`: makes a fault in a running installation on purpose, and reports what it cost.

Exit codes: 0 every promise was kept, 1 one was broken, 2 the drill could not be run. Invariant: nothing is done before it was
said and confirmed.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loraplex.platform.cli.bench import print_progress
from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.config import load_settings
from loraplex.platform.drills.drill import DrillLoad, run_drill
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.db_outage import DatabaseOutage
from loraplex.platform.drills.faults.disk_full import GIB, DiskFull
from loraplex.platform.drills.faults.engine_loss import EngineHang, EngineKill, longest_loss_s
from loraplex.platform.drills.faults.fault import Fault
from loraplex.platform.drills.faults.gateway_kill import GatewayKill
from loraplex.platform.drills.faults.redis_flush import RedisFlush
from loraplex.platform.drills.installation import Installation, find_installation
from loraplex.platform.drills.report import DrillReport
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
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The server's data directory.")]
Seconds = Annotated[float, typer.Option(min=1, max=300, help="How long the fault lasts.")]
Rate = Annotated[float, typer.Option(min=0.1, max=100, help="Requests per second.")]
MaxTokens = Annotated[int, typer.Option(min=1, max=1024, help="Tokens of each response.")]
RecoverSeconds = Annotated[
    float, typer.Option("--recover-seconds", min=1, max=1800, help="Longest wait for recovery.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("redis-flush")
def redis_flush(
    seconds: Seconds = 10.0,
    rate: Rate = 4.0,
    max_tokens: MaxTokens = 16,
    recover: RecoverSeconds = 120.0,
    base_url: BaseUrls = None,
    data_dir: DataDir = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Valkey loses all counters; they are rebuilt from the ledger and the journals."""
    load = DrillLoad(rate_per_s=rate, max_tokens=max_tokens, recover_s=recover)
    drill(
        lambda found: RedisFlush(installation=found, seconds=seconds), load, base_url, data_dir, yes, as_json
    )


@app.command("db-outage")
def db_outage(
    seconds: Seconds = 15.0,
    rate: Rate = 4.0,
    max_tokens: MaxTokens = 16,
    recover: RecoverSeconds = 120.0,
    base_url: BaseUrls = None,
    data_dir: DataDir = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """PostgreSQL refuses all connections; known callers are served on."""
    load = DrillLoad(rate_per_s=rate, max_tokens=max_tokens, recover_s=recover)
    drill(
        lambda found: DatabaseOutage(installation=found, seconds=seconds),
        load,
        base_url,
        data_dir,
        yes,
        as_json,
    )


@app.command("gateway-kill")
def gateway_kill(
    restart: Annotated[
        str | None, typer.Option(help="A command that starts the gateway again; it outlives the drill.")
    ] = None,
    rate: Rate = 4.0,
    max_tokens: MaxTokens = 16,
    recover: RecoverSeconds = 120.0,
    base_url: BaseUrls = None,
    data_dir: DataDir = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """A gateway is killed; its supervisor starts it again, and its journal settles what was open."""
    load = DrillLoad(rate_per_s=rate, max_tokens=max_tokens, recover_s=recover)
    drill(
        lambda found: GatewayKill(installation=found, seconds=recover, restart=restart),
        load,
        base_url,
        data_dir,
        yes,
        as_json,
    )


@app.command("engine-kill")
def engine_kill(
    rate: Rate = 4.0,
    max_tokens: MaxTokens = 16,
    recover: RecoverSeconds = 120.0,
    base_url: BaseUrls = None,
    data_dir: DataDir = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """The engine is killed; its gateway starts another one."""
    load = DrillLoad(rate_per_s=rate, max_tokens=max_tokens, recover_s=recover)
    drill(
        lambda found: EngineKill(installation=found, seconds=longest_loss_s(found.settings)),
        load,
        base_url,
        data_dir,
        yes,
        as_json,
    )


@app.command("engine-hang")
def engine_hang(
    rate: Rate = 4.0,
    max_tokens: MaxTokens = 16,
    recover: RecoverSeconds = 120.0,
    base_url: BaseUrls = None,
    data_dir: DataDir = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """The engine stops and answers nothing, until the watchdog of its gateway replaces it."""
    load = DrillLoad(rate_per_s=rate, max_tokens=max_tokens, recover_s=recover)
    drill(
        lambda found: EngineHang(installation=found, seconds=longest_loss_s(found.settings)),
        load,
        base_url,
        data_dir,
        yes,
        as_json,
    )


@app.command("disk-full")
def disk_full(
    seconds: Seconds = 10.0,
    max_ballast: Annotated[
        float,
        typer.Option(min=0.001, max=10_000, help="GiB that the drill may take; with more free it refuses."),
    ] = 4.0,
    rate: Rate = 4.0,
    max_tokens: MaxTokens = 16,
    recover: RecoverSeconds = 120.0,
    base_url: BaseUrls = None,
    data_dir: DataDir = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """The data directory's file system has no space left; requests are refused before admission."""
    load = DrillLoad(rate_per_s=rate, max_tokens=max_tokens, recover_s=recover)

    def fault(found: Installation) -> Fault:
        return DiskFull(
            installation=found,
            seconds=seconds,
            max_ballast_bytes=int(max_ballast * GIB),
            ballast=DiskFull.ballast_of(found.data_dir),
        )

    drill(fault, load, base_url, data_dir, yes, as_json)


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
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        installation = await find_installation(load_settings({"data_dir": data_dir}), base_urls or ())
        fault = make_fault(installation)
        await fault.check()
        confirm(fault, yes)
        return await run_drill(fault, load, print_progress)

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
    print_progress(f"drill {fault.name}: this will {fault.plan()}")
    if yes:
        return
    if not is_terminal():
        raise DrillImpossible("nothing was done: confirm with --yes where there is no terminal to ask at")
    if not typer.confirm("Do it?", err=True):
        raise DrillImpossible("nothing was done")


def is_terminal() -> bool:
    """Whether this command's input comes from a person."""
    return sys.stdin.isatty()
