"""The commands that load a server of their own over HTTP, and compare two sides of it."""

from typing import Annotated

import typer
from tests.benchmarks.attackers.registry import ATTACKERS
from tests.benchmarks.attacks import AttackShape, measure_attacks
from tests.benchmarks.decisions import DecisionsShape, measure_decisions
from tests.benchmarks.fair_share import MIN_ADAPTERS, FairShareShape, measure_fair_share
from tests.benchmarks.noisy_neighbours import NoisyNeighboursShape, measure_noisy_neighbours
from tests.benchmarks.peft_comparison import PeftComparisonShape, compare_with_peft
from tests.benchmarks.scoring import ScoringShape, measure_scoring

from loraplex.platform.bench.report import available_cores
from loraplex.platform.cli.bench import (
    AsJson,
    Dtype,
    Length,
    Model,
    Out,
    Rank,
    Repeats,
    Setting,
    parse_settings,
    resolve_model,
    run_bench,
)


def peft(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    adapters: Annotated[int, typer.Option(min=1, help="Random adapters to register.")] = 8,
    rank: Rank = 16,
    input_len: Length = 60,
    output_len: Length = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of both; the median counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the peer; default all cores.")] = None,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Output rate over HTTP against `transformers` + PEFT: mixed adapters, one row, base model."""
    shape = PeftComparisonShape(
        rows=concurrency,
        adapters=adapters,
        rank=rank,
        input_len=input_len,
        output_len=output_len,
        repeats=repeats,
        threads=threads or available_cores(),
        dtype=dtype,
    )
    run_bench(
        lambda progress: compare_with_peft(
            resolve_model(model, progress), shape, parse_settings(setting), progress
        ),
        out,
        as_json,
    )


def scoring(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    rows: Annotated[int, typer.Option(min=1, help="Streaming rows.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a load.")] = 200,
    output_len: Annotated[int, typer.Option(min=32, help="Of the streaming rows.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of a load; its lowest p99 counts.")] = 5,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Inter-token latency of streaming rows beside scored prompts, and beside as many ordinary ones."""
    shape = ScoringShape(rows=rows, prompts=prompts, output_len=output_len, repeats=repeats, dtype=dtype)
    run_bench(
        lambda progress: measure_scoring(
            resolve_model(model, progress), shape, parse_settings(setting), progress
        ),
        out,
        as_json,
    )


def decisions(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    questions: Annotated[int, typer.Option(min=1, max=400, help="About one input.")] = 60,
    adapters: Annotated[int, typer.Option(min=1, max=64, help="Over one conversation.")] = 20,
    beside: Annotated[int, typer.Option(min=1, max=400, help="Questions beside streaming rows.")] = 200,
    rank: Rank = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; their medians count.")] = 5,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Decisions: many questions beside one prompt, many adapters beside one and beside chats, rows beside questions."""
    shape = DecisionsShape(
        questions=questions, adapters=adapters, beside=beside, rank=rank, repeats=repeats, dtype=dtype
    )
    run_bench(
        lambda progress: measure_decisions(
            resolve_model(model, progress), shape, parse_settings(setting), progress
        ),
        out,
        as_json,
    )


def noisy_neighbours(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    neighbours: Annotated[int, typer.Option(min=1, help="Plain rows next to hostile grammars.")] = 8,
    output_len: Annotated[int, typer.Option(min=64, help="Tokens of a plain row.")] = 256,
    repeats: Repeats = 3,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Inter-token latency of plain rows while another tenant sends hostile grammars."""
    shape = NoisyNeighboursShape(rows=neighbours, output_len=output_len, repeats=repeats, dtype=dtype)
    run_bench(
        lambda progress: measure_noisy_neighbours(
            resolve_model(model, progress), shape, parse_settings(setting), progress
        ),
        out,
        as_json,
    )


def fair_share(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    seconds: Annotated[float, typer.Option(min=5.0, help="Of each case in each round.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1)] = 6,
    load: Annotated[
        float, typer.Option(min=0.01, max=0.5, help="Of the quiet tenant, of the capacity.")
    ] = 0.4,
    adapters: Annotated[
        int,
        typer.Option(
            help=f"Of the other tenant, at least {MIN_ADAPTERS}; a quarter of them fit in memory. 0: the base model."
        ),
    ] = 0,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """TTFT of a tenant beside one that offers ten times its share; shares of tenants that are both backlogged."""
    if adapters != 0 and adapters < MIN_ADAPTERS:
        raise typer.BadParameter(
            f"{adapters}: allowed are 0 and at least {MIN_ADAPTERS}", param_hint="--adapters"
        )
    shape = FairShareShape(seconds=seconds, rounds=rounds, quiet_load=load, dtype=dtype, adapters=adapters)
    run_bench(
        lambda progress: measure_fair_share(
            resolve_model(model, progress), shape, parse_settings(setting), progress
        ),
        out,
        as_json,
    )


def attacks(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    attack: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(ATTACKERS)}; repeatable. Default all.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second of the other tenant.")] = 4.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of each case in each round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """TTFT and errors of one tenant while another one attacks the server, against the same attacker at a stub."""
    names = tuple(attack or ATTACKERS)
    for name in set(names) - set(ATTACKERS):
        raise typer.BadParameter(f"{name!r}: allowed are {', '.join(ATTACKERS)}", param_hint="--attack")
    shape = AttackShape(attacks=names, rate=rate, seconds=seconds, rounds=rounds, dtype=dtype)
    run_bench(
        lambda progress: measure_attacks(
            resolve_model(model, progress), shape, parse_settings(setting), progress
        ),
        out,
        as_json,
    )
