"""What every `loraplex bench` command does with its measurement: run it, print it, write its lines."""

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loraplex.engine.errors import EngineError
from loraplex.platform.bench.report import RESULTS, Report, checkout_root, write_lines
from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.startup_errors import StartError

Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the JSON lines; default tests/benchmarks/results in a checkout."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of tables.")]


def run_bench(
    work: Callable[[], Coroutine[Any, Any, Report]],
    out: Path | None,
    as_json: bool,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Measure, print, write. SIGTERM ends the started server like Ctrl-C does.

    `loop_factory` is a gateway's, for what measures a part of it in this process.
    """

    async def within() -> Report:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work()

    with exit_codes():
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                report = runner.run(within())
        except EngineError as error:
            raise StartError(str(error)) from error
        except asyncio.CancelledError:
            raise StartError("stopped before the end; nothing was written") from None
    root = checkout_root()
    folder = out or (root / RESULTS if root else None)
    if as_json or folder is None:
        for line in report.lines():
            typer.echo(json.dumps(line))
    if not as_json:
        report.print(Console())
    if folder is not None:
        say(f"wrote {write_lines(report, folder)}")


def say(text: str) -> None:
    """A note beside the results."""
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
