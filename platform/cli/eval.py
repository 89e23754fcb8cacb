"""`loraplex eval run`: runs a suite on a served model, and compares it with a baseline.

Exit codes: 0 it passes, 1 it does not or could not be run, 2 wrong usage.
"""

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final
from uuid import uuid4

import typer
from rich.console import Console
from rich.markup import escape

from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.cli.output import AsJson, table_of
from loraplex.platform.cli.remote_server import open_server, read_key
from loraplex.platform.errors import GatewayError
from loraplex.platform.evaluations.answers import validate_here
from loraplex.platform.evaluations.conformance import NAME, conformance_suite
from loraplex.platform.evaluations.report import Figures, Report, report_bytes
from loraplex.platform.evaluations.runner import CaseResult, asking, evaluate
from loraplex.platform.evaluations.suite import MAX_SUITE_BYTES, Suite, read_suite
from loraplex.platform.processes.progress import shown_progress
from loraplex.platform.startup_errors import StartError

SHOWN: Final = 10
"""Cases in the table; the report has all."""

app = typer.Typer(name="eval", help="Evaluate adapters and models by suites of cases.", no_args_is_help=True)


@app.callback()
def evaluations() -> None:
    """Without it, typer would make `run` the group itself."""


@app.command("run")
def run_command(
    suite: Annotated[str, typer.Option(help=f"A JSONL file of cases, or `{NAME}`, the built-in suite.")],
    key: Annotated[str, typer.Option(help="A key with `inference`; `-` reads it from standard input.")],
    model: Annotated[
        str, typer.Option("--adapter", "--model", help="NAME@VERSION, NAME:ALIAS or a base model.")
    ],
    baseline: Annotated[
        str | None, typer.Option(help="What it is compared with, such as NAME:production.")
    ] = None,
    min_pass: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="The least pass rate: 0.95 is 95 %.")
    ] = None,
    max_regression: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="By how much it may be below that of --baseline: 0.02 is 2 points."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of cases with a temperature.")] = 0,
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    out: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a suite; exit code 1 if the pass rate is below --min-pass, or below the baseline's by more than --max-regression."""
    if max_regression is not None and baseline is None:
        raise typer.BadParameter("--max-regression needs --baseline")
    models = [model] if baseline is None else [model, baseline]
    with exit_codes():
        try:
            report, sides = asyncio.run(_evaluate(_suite(suite), url, read_key(key), models, seed))
        except GatewayError as error:
            raise StartError(str(error)) from error
    if out is not None:
        out.write_bytes(report_bytes(report) + b"\n")
    if as_json:
        typer.echo(report_bytes(report).decode())
    else:
        _print(report, sides)
    if reasons := violations(report, min_pass, max_regression):
        Console(stderr=True, soft_wrap=True).print(f"[red]failed:[/red] {escape('; '.join(reasons))}")
        raise typer.Exit(1)


async def _evaluate(
    suite: Suite, url: str, key: str, models: list[str], seed: int
) -> tuple[Report, list[list[CaseResult]]]:
    """Return the report, and the results of each model."""
    total, sides = len(suite.cases) * len(models), [list[CaseResult]() for _ in models]
    with shown_progress() as progress:
        progress(stage := f"{total} answers")

        async def keep(side: int, result: CaseResult) -> None:
            progress(stage, (sum(map(len, sides)) + 1) / total)

        async with open_server(url, key, "v1") as client:
            asked = (suite, models, seed, uuid4().hex, asking(client), validate_here)
            return await evaluate(*asked, sides, keep), sides


def _suite(name: str) -> Suite:
    """Read a suite. Raises `SuiteInvalid`, `StartError`."""
    if name == NAME:
        return read_suite(conformance_suite())
    try:
        with Path(name).open("rb") as file:
            return read_suite(file.read(MAX_SUITE_BYTES + 1))
    except OSError as error:
        raise StartError(f"--suite {name}: {error.strerror}") from error


def violations(report: Report, min_pass: float | None, max_regression: float | None) -> list[str]:
    """Say which bounds a report does not keep."""
    found = []
    if min_pass is not None and report.figures.pass_rate < min_pass:
        found.append(f"the pass rate is {report.figures.pass_rate:.4g}, but must be at least {min_pass:g}")
    if max_regression is not None and report.regression > max_regression:
        found.append(f"it is {report.regression:.4g} below the baseline; allowed is {max_regression:g}")
    return found


def _print(report: Report, sides: Sequence[Sequence[CaseResult]]) -> None:
    console = Console()
    table = table_of("model", "passed", "rate (95 %)", "prompt", "completion", "median s", "unmet")
    shown = ((report.model, report.figures), (report.baseline, report.baseline_figures))
    for (model, figures), results in zip(shown, sides):
        if model is not None and figures is not None:
            median_s = statistics.median(each.seconds for each in results)
            table.add_row(*_row(escape(model.model), report.total, figures, median_s))
    console.print(table)
    if (compared := report.comparison) is not None:
        console.print(
            f"worse in {compared.worse}, better in {compared.better} cases, p = {compared.p_value:.3g}"
        )
    for case in report.cases[:SHOWN]:
        failed = ", ".join(case.answer.failed) or "passes"
        said = (
            case.answer.error or case.answer.text or str([(c.name, c.arguments) for c in case.answer.calls])
        )
        console.print(f"{case.case}: {failed}: {said[:120]!r}", markup=False, soft_wrap=True)


def _row(model: str, total: int, figures: Figures, median_s: float) -> tuple[str, ...]:
    low, high = figures.interval
    rate = f"{figures.pass_rate:.3f} ({low:.3f} to {high:.3f})"
    unmet = ", ".join(f"{name} {count}" for name, count in figures.unmet.items())
    tokens = (str(figures.prompt_tokens), str(figures.completion_tokens))
    return (model, f"{figures.passed} of {total}", rate, *tokens, f"{median_s:.2f}", unmet)
