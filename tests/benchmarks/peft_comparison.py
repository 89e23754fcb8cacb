"""Output rate of loraplex over HTTP against `transformers` + PEFT: same machine, model and requests.

Invariant: the two never run at the same time, and every round has new prompts, so that no prefix is cached.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
from tests.benchmarks.peft_peer import PeerCase, PeerJob

from loraplex.platform.bench.client import CompletionRequest
from loraplex.platform.bench.fixtures import adapter_name, open_fixtures, token_pool, write_random_adapter
from loraplex.platform.bench.load import run_load
from loraplex.platform.bench.local_server import BASE_MODEL, LocalServer, run_local_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts
from loraplex.platform.processes.environment import foreign_environment

MIXED, SINGLE, BASE = "mixed adapters", "one row with adapter", "base model"
REQUIRED = {MIXED: 3.5, SINGLE: 2.0, BASE: 1.5}


@dataclass(frozen=True, slots=True)
class PeftComparisonShape:
    """The matrix: `rows` at once over `adapters` of `rank`, one row alone, and `rows` of the base model."""

    rows: int = 16
    adapters: int = 8
    rank: int = 16
    input_len: int = 60
    output_len: int = 64
    repeats: int = 3
    threads: int = 2
    dtype: str = "bfloat16"


def _batches(shape: PeftComparisonShape) -> dict[str, list[str] | None]:
    """The adapter of each row by case; None for the base model."""
    names = [adapter_name(row % shape.adapters) for row in range(shape.rows)]
    return {MIXED: names, SINGLE: names[:1], BASE: None}


async def compare_with_peft(
    model: str, shape: PeftComparisonShape, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Report:
    """Alternate peer and server for `repeats` rounds, each warmed up; medians. Raises `BenchFailed`."""
    if find_spec("peft") is None:
        raise BenchFailed("the comparison needs PEFT: pip install -e '.[test]'")
    peer_rates: dict[str, list[float]] = {name: [] for name in REQUIRED}
    own_rates: dict[str, list[float]] = {name: [] for name in REQUIRED}
    with TemporaryDirectory(prefix="loraplex-bench-") as folder:
        async with run_local_server(model, {"dtype": shape.dtype, **settings}) as server:
            key, pool, folders = await _prepare(server, shape, Path(folder))
            for repeat in range(shape.repeats):
                await server.stop()
                progress(f"round {repeat + 1} of {shape.repeats}: transformers + PEFT")
                rates = await _run_peer(server.model, shape, pool, folders, repeat)
                _append(peer_rates, rates)
                await server.start()
                progress(f"round {repeat + 1} of {shape.repeats}: loraplex")
                _append(own_rates, await _run_own(server, shape, pool, key, repeat))
    return _report(shape, peer_rates, own_rates)


async def _prepare(
    server: LocalServer, shape: PeftComparisonShape, folder: Path
) -> tuple[str, list[int], list[Path]]:
    async with open_fixtures(server) as fixtures:
        tenant = await fixtures.tenant("bench")
        config = fixtures.model_config()
        folders = [
            write_random_adapter(folder / adapter_name(index), config, shape.rank, index)
            for index in range(shape.adapters)
        ]
        await fixtures.push_folders(tenant, folders)
        return tenant.api_key, await token_pool(server.base_url, tenant.api_key, BASE_MODEL), folders


def _prompts(
    shape: PeftComparisonShape, pool: Sequence[int], name: str, repeat: int, warm_up: bool
) -> list[list[int]]:
    """The prompts of a case; both sides get the same."""
    count = 1 if name == SINGLE else shape.rows
    seed = (repeat * 2 + warm_up) * len(REQUIRED) + list(REQUIRED).index(name)
    return draw_prompts(pool, count, shape.input_len, seed)


async def _run_peer(
    model: str, shape: PeftComparisonShape, pool: Sequence[int], folders: Sequence[Path], repeat: int
) -> dict[str, float]:
    """Output tokens per second by case."""
    cases = [
        PeerCase(name=name, prompts=_prompts(shape, pool, name, repeat, warm), adapters=names, warm_up=warm)
        for name, names in _batches(shape).items()
        for warm in (True, False)
    ]
    job = PeerJob(
        model=model,
        dtype=shape.dtype,
        threads=shape.threads,
        output_len=shape.output_len,
        adapters={folder.name: str(folder) for folder in folders},
        cases=cases,
    )
    seconds = await peer_seconds(job)
    return {
        case.name: len(case.prompts) * shape.output_len / seconds[case.name]
        for case in cases
        if not case.warm_up
    }


async def peer_seconds(job: PeerJob) -> dict[str, float]:
    """Run the peer in a process. Raises `BenchFailed` with the end of its standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.benchmarks.peft_peer",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=foreign_environment(),
    )
    try:
        output, errors = await process.communicate(msgspec.json.encode(job))
    except BaseException:
        process.kill()
        raise
    if process.returncode != 0:
        raise BenchFailed(f"transformers + PEFT failed: {errors.decode(errors='replace')[-2000:].strip()}")
    return msgspec.json.decode(output, type=dict[str, float])


async def _run_own(
    server: LocalServer, shape: PeftComparisonShape, pool: Sequence[int], api_key: str, repeat: int
) -> dict[str, float]:
    """Output tokens per second by case, over HTTP."""
    rates: dict[str, float] = {}
    for name, adapters in _batches(shape).items():
        for warm_up in (True, False):
            prompts = _prompts(shape, pool, name, repeat, warm_up)
            requests = [
                CompletionRequest(
                    adapters[row] if adapters else BASE_MODEL, prompt, shape.output_len, api_key
                )
                for row, prompt in enumerate(prompts)
            ]
            result = await run_load(server.base_url, requests)
            rates[name] = result.require_complete().output_rate
    return rates


def _append(rates: dict[str, list[float]], found: Mapping[str, float]) -> None:
    for name, values in rates.items():
        values.append(found[name])


def _report(
    shape: PeftComparisonShape, peer_rates: Mapping[str, list[float]], own_rates: Mapping[str, list[float]]
) -> Report:
    report = Report("speed", ("peer_tokens_per_s", "output_throughput", "peer_runs", "runs"))
    for name, required in REQUIRED.items():
        rows = 1 if name == SINGLE else shape.rows
        peer, own = median(peer_rates[name]), median(own_rates[name])
        figure = {
            "peer_tokens_per_s": peer,
            "output_throughput": own,
            "peer_runs": [round(rate, 2) for rate in peer_rates[name]],
            "runs": [round(rate, 2) for rate in own_rates[name]],
        }
        report.cases.append(Case(f"{name}, {rows} at once", asdict(shape) | {"rows": rows}, figure))
        report.ratios.append(Ratio(f"{name}: loraplex / transformers + PEFT", own / peer, required))
    mixed_share = median(own_rates[MIXED]) / median(own_rates[BASE])
    report.ratios.append(Ratio("loraplex: mixed adapters / base model", mixed_share))
    report.notes.append(
        "peer: `generate` in process without HTTP; loraplex: HTTP streaming; prefill included in both"
    )
    return report
