"""The TTFT of requests over two engines of which one is stopped two thirds of the time, with ejection and without.

Invariant: both runs have the same arrivals; times count from them, and only after the slow engine has been found.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Final

import numpy as np
from tests.benchmarks.several_engines import running_engines
from tests.end_to_end.live_server import command_line, descendants

from loraplex.engine.messages import Delta, EngineRequest, Failed
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.slow_engines import SlowEngines

COLUMNS: Final = ("ttft_p50_ms", "ttft_p99_ms", "requests", "slowness")
STOPPED_S, RUNS_S = 0.06, 0.03
TOKENS: Final = 24
PROMPT: Final = 64


class WithoutEjection(SlowEngines):
    """Compares the engines, and changes nothing."""

    def share(self, number: int) -> float:
        return 1.0


async def measure_slow_engine(
    model: str, rate: float, warm_up_s: float, seconds: float, progress: Callable[[str], None]
) -> Report:
    """`rate`: requests per second. Measures `seconds` after a warm-up, in which the slow engine has to be found."""
    report = Report("slow-engine", COLUMNS)
    tails = []
    for name, engines in (("without ejection", WithoutEjection()), ("with ejection", SlowEngines())):
        progress(name)
        times, slowness = await _measure(model, engines, rate, warm_up_s, seconds)
        p50, p99 = (float(np.percentile(times, share)) * 1000 for share in (50, 99))
        figure = {"ttft_p50_ms": p50, "ttft_p99_ms": p99, "requests": len(times), "slowness": slowness}
        report.cases.append(Case(name, {"rate": rate, "tokens": TOKENS, "prompt": PROMPT}, figure))
        tails.append(p99)
    report.ratios.append(Ratio("p99 TTFT: without ejection / with", tails[0] / tails[1], 1.5))
    return report


async def _measure(
    model: str, slow_engines: SlowEngines, rate: float, warm_up_s: float, seconds: float
) -> tuple[list[float], float]:
    """Seconds to the first token of each request after the warm-up, and the slowness that was found."""
    async with running_engines(model, 2, max_num_seqs=8) as pool:
        pool.slow_engines = slow_engines
        victim = min(pid for pid in descendants(os.getpid()) if "engines.main" in command_line(pid))
        async with _stopped_in_turns(victim):
            times = await _traffic(pool, rate, warm_up_s, seconds)
        return times, max(slow_engines.slowness(number) for number in pool.engines)


@asynccontextmanager
async def _stopped_in_turns(pid: int) -> AsyncIterator[None]:
    """Let a process run a third of the time."""

    async def stop_and_go() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(RUNS_S)

    turns = asyncio.create_task(stop_and_go())
    try:
        yield
    finally:
        turns.cancel()
        await asyncio.gather(turns, return_exceptions=True)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def _traffic(pool: EnginePool, rate: float, warm_up_s: float, seconds: float) -> list[float]:
    """Open-loop arrivals: a slow engine delays none."""
    random, times, began = Random(1), list[float](), time.monotonic()
    async with asyncio.TaskGroup() as requests:
        due = 0.0
        while due < warm_up_s + seconds:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            counted = times if due >= warm_up_s else []
            requests.create_task(_request(pool, Random(due), counted))
            due += random.expovariate(rate)
    return times


async def _request(pool: EnginePool, random: Random, times: list[float]) -> None:
    began = time.monotonic()
    request = EngineRequest(
        request_id=f"{random.getrandbits(64):x}",
        namespace=bytes([random.randrange(64)]) * 32,
        prompt_token_ids=[random.randrange(1000, 40_000) for _ in range(PROMPT)],
        sampling=SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
    )
    is_first = True
    async for event in pool.submit(request):
        if isinstance(event, Failed):
            raise BenchFailed(f"a request failed: {event.message}")
        if isinstance(event, Delta) and is_first:
            times.append(time.monotonic() - began)
            is_first = False
