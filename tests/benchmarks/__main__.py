"""`python -m tests.benchmarks`: one command for each measurement behind this repository's figures.

Invariant: each command writes result lines with the fields of earlier ones, so that figures stay comparable.
"""

from pathlib import Path
from typing import Annotated

import typer
from tests.benchmarks.commands import engine, gateway, installation, kernels, serving, stores

from loraplex.platform.bench.report import RESULTS, checkout_root
from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.startup_errors import SettingsError

PAGE = Path("deploy", "benchmarks.html")
COMMANDS = (
    engine.quantization,
    engine.decode,
    engine.thought_step,
    engine.grammar_masks,
    engine.steps,
    serving.peft,
    serving.scoring,
    serving.decisions,
    serving.noisy_neighbours,
    serving.fair_share,
    serving.attacks,
    gateway.gateway,
    gateway.throughput,
    gateway.observers,
    gateway.bodies,
    gateway.admission,
    gateway.journal,
    gateway.anonymous,
    stores.ledger,
    stores.console,
    installation.ray,
    installation.placement,
    installation.several_engines,
    installation.slow_engine,
    installation.rolling_upgrade,
    installation.chaos,
    kernels.attention,
    kernels.gemm,
    kernels.lora_kernels,
)

app = typer.Typer(
    name="python -m tests.benchmarks",
    help="Measure what the README's figures show. Quiet machines give steady figures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
for command in COMMANDS:
    app.command()(command)


@app.command("report")
def results_page(
    results: Annotated[
        Path | None, typer.Option(help="Folder of JSON lines; default tests/benchmarks/results.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help=f"The page; default {PAGE} of a checkout.")] = None,
) -> None:
    """Render the result lines as one HTML page, with rooflines."""
    from tests.benchmarks.results_page import read_lines, render

    root = checkout_root()
    with exit_codes():
        if root is None and (results is None or to is None):
            raise SettingsError("outside a checkout --results and --to are needed")
        folder, target = results or Path(root or "", RESULTS), to or Path(root or "", PAGE)
        lines = read_lines(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(lines), encoding="utf-8")
    typer.echo(f"wrote {target}: {len(lines)} lines of {folder}", err=True)


if __name__ == "__main__":
    app()
