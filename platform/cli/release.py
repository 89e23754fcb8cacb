"""`loraplex release check OLD NEW`: whether NEW may replace OLD. Exit codes: 0 it may, 1 a check failed, 2 wrong usage."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Annotated

import typer

from loraplex.engine.errors import EngineError
from loraplex.platform.cli.command_context import end_at_sigterm, exit_codes
from loraplex.platform.cli.output import AsJson
from loraplex.platform.release_check.checks import Bounds, Check, Pair, run_checks
from loraplex.platform.release_check.releases import ReleaseSpec, open_release, parse_spec
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
    """A command of its own name."""


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
        return await _check(parse_spec(old), parse_spec(new), bounds, quick, as_json)

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


async def _check(
    old: ReleaseSpec, new: ReleaseSpec, bounds: Bounds, quick: bool, as_json: bool
) -> list[Check]:
    found: list[Check] = []
    kv = new.settings.get("kv_cache_dtype", "auto")
    if kv not in ("auto", old.settings.get("kv_cache_dtype")) and new.key_file is None:
        found.append(await asyncio.to_thread(kv_check, new, kv))
        typer.echo(found[0].line, err=as_json)
    async with AsyncExitStack() as stack:
        sides = [await stack.enter_async_context(open_release(spec)) for spec in (old, new)]
        async for check in run_checks(Pair(sides[0], sides[1], bounds, quick)):
            found.append(check)
            typer.echo(check.line, err=as_json)
    return found


def kv_check(spec: ReleaseSpec, kv: str) -> Check:
    """The quality gate of a KV type, with the quantization that is served."""
    from loraplex.engine.offline_quantization.kv_gate import KV_BOUNDS, check_kv, kv_config

    given = {
        name: spec.settings[name] for name in ("dtype", "device", "quantization") if name in spec.settings
    }
    measured = check_kv(kv_config(spec.model, **given), kv, None, lambda text: typer.echo(text, err=True))
    figures = "; ".join(
        f"{where}: perplexity {each.perplexity_ratio:.3f} x, top-1 {each.top1_agreement:.3f}, KL {each.kl:.4f}"
        for where, each in (("all", measured.whole), ("late positions", measured.late))
    )
    return Check(f"kv {kv}", len(measured.violations(KV_BOUNDS)), 0, f"figures out of bounds; {figures}")
