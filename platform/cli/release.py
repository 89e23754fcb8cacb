"""`loraplex release check OLD NEW`: whether NEW may replace OLD. Exit codes: 0 it may, 1 a check failed, 2 wrong usage."""

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer

from loraplex.engine.errors import EngineError
from loraplex.platform.cli.command_context import end_at_sigterm, exit_codes
from loraplex.platform.cli.output import AsJson
from loraplex.platform.release_check.checks import Bounds, Check, run_checks
from loraplex.platform.release_check.releases import parse_spec
from loraplex.platform.startup_errors import StartError

app = typer.Typer(
    name="release", help="Compare releases before one replaces the other.", no_args_is_help=True
)

Spec = Annotated[
    str,
    typer.Argument(
        help="FOLDER, a hub id or `demo`, then quantization=int4, kv=fp8, template=FILE, adapters=DIR and other "
        "settings behind commas; or https://HOST,key-file=FILE."
    ),
]
Bound = Annotated[float, typer.Option(min=0.0)]
BOUNDS = Bounds()


@app.callback()
def releases() -> None:
    """Without it, typer would make `check` the group itself."""


@app.command("check")
def check_command(
    old: Spec,
    new: Spec,
    max_differing: Bound = BOUNDS.differing,
    max_logprob: Bound = BOUNDS.logprob,
    max_slowdown: Bound = BOUNDS.slowdown,
    quick: Annotated[
        bool, typer.Option(help="Conformance of the base model alone, load of half the length.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare tokens, templates, answers, conformance, speed and memory of two releases, which are served side by side."""
    bounds = Bounds(differing=max_differing, logprob=max_logprob, slowdown=max_slowdown)

    async def work() -> list[Check]:
        end_at_sigterm()
        found = []
        async for check in run_checks(parse_spec(old), parse_spec(new), bounds, quick):
            found.append(check)
            typer.echo(check.line, err=as_json)
        return found

    with exit_codes():
        try:
            found = asyncio.run(work())
        except EngineError as error:
            raise StartError(str(error)) from error
        except asyncio.CancelledError:
            raise StartError("stopped before the end") from None
    if as_json:
        typer.echo(json.dumps([asdict(each) | {"outcome": each.outcome} for each in found]))
    raise typer.Exit(1 if any(each.outcome == "FAIL" for each in found) else 0)
