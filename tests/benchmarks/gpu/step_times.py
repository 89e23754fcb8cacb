"""Times of decode steps and of prompts: with and without adapters, and with what rows may ask of a step.

Invariant: both sides of a ratio take turns in one process, on one set of weights.

Seconds on an H100, of the cap of 90 s of `tpot int4`, estimated before any run: 6 until CUDA answers, 2 for the weights, 2 for
four adapters on the host, 1 for each engine's warm-up and 0.06 for each captured step (17 without adapters, 47 with them),
7 for 64 loads of 84 MB by one core, 1.3 to 2.6 for 64 prompts of 512 tokens, 0.2 for a round of both engines. A load of full
batches so takes 4 s, the first and the prompts 7, the second engine in 8-bit pages 10: 75 s in all.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from tests.benchmarks.gpu.engine_rows import (
    AliasedSource,
    EngineOptions,
    Rows,
    begin,
    end,
    prefill_rate,
    quantized_once,
    release,
    running_engine,
    token_seconds,
)
from tests.benchmarks.gpu.model import RandomModel, random_model
from tests.benchmarks.gpu.scripted_masks import FORCED, MASKED, scripted_masks
from tests.benchmarks.gpu.sizes import RANK, ZIPF, Line, Size, left_out, line
from tests.benchmarks.gpu.targets import (
    FEW,
    over_base_case,
    prefill_case,
    prefill_over_base_case,
    share_case,
    tpot_case,
)
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.benchmarks.kernels.clock import copy_rate

from loraplex.engine.engine import Engine

SAMPLED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 1}
LOAD_S = 5.0
"""Estimate of a load of a full batch: its prompts in one engine or both, and a round or two."""
PAGES_S = 14.0
"""Estimate of an engine's start with 8-bit pages, its 64 loads, and a load of rows."""
PAGE_LOADS = {"distinct 8-bit": 0.0, "zipf 8-bit": ZIPF}
"""Loads of 8-bit pages, with the exponent of their rows."""
PREFILL_SHARE = 4
"""One of so many rows of a full batch at once has its prompt timed, each with an adapter of its own."""


def tpot(scheme: str) -> Callable[[Size, torch.device, TimeLeft], Iterator[Line]]:
    """The job that times steps of a base model in this scheme, without adapters and with them."""

    def run(size: Size, device: torch.device, left: TimeLeft) -> Iterator[Line]:
        rate = copy_rate(device, size.copy_bytes)
        turns = Turns(random_model(size.shape, scheme, device), size, rate, left)
        most = size.most_rows
        with turns.engine() as off:
            with turns.engine(most) as on:
                yield turns.started()
                yield from turns.measure(off, on, turns.rows(most, most), "distinct")
                yield from turns.measure(off, on, turns.rows(most, FEW), f"{FEW} adapters")
                yield from turns.prefill(off, on)
                for rows in size.rows[:-1]:
                    yield from turns.measure(off, on, turns.rows(rows, 1), "one")
                yield from turns.measure(off, on, turns.rows(most, most, ZIPF), "zipf")
                for rows in (most, size.rows[0]):
                    yield from turns.measure(off, on, turns.rows(rows, 0), "all-base")
            # Two engines with pages of different types cannot share the model's sites, and both would take memory.
            del on
            release(device)
            if not left.fits(PAGES_S):
                for load in PAGE_LOADS:
                    yield from turns.leave_out(most, load)
                return
            with quantized_once(), turns.engine(most, "int8") as on:
                for load, zipf in PAGE_LOADS.items():
                    yield from turns.measure(off, on, turns.rows(most, most, zipf), load)

    return run


@dataclass(slots=True)
class Turns:
    """Engines without and with adapters over one set of weights, stepped in turn (ABAB)."""

    model: RandomModel
    size: Size
    copy_rate: float
    left: TimeLeft
    source: AliasedSource = field(init=False)
    began: float = field(default_factory=time.perf_counter)
    known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.source = AliasedSource(self.model.loaded.config, RANK, self.model.loaded.dtype)

    def rows(self, count: int, adapters: int, zipf: float = 0.0) -> Rows:
        tokens = self.size.steps * (self.size.rounds + 2) + count + 64
        return Rows(count, min(adapters, count), self.size.context, tokens, zipf)

    def engine(self, adapters: int = 0, page_dtype: str = "auto") -> AbstractContextManager[Engine]:
        """For as many rows as any load has, with room for `adapters` and two of them.

        It keeps prompts, which are the same in every load of the base model.
        """
        nbytes = (adapters + 2) * self.source.nbytes if adapters else 0
        options = EngineOptions(adapter_bytes=nbytes, page_dtype=page_dtype, prefix_caching=True)
        return running_engine(self.model, self.source, self.rows(self.size.most_rows, 0), options)

    def started(self) -> Line:
        """Seconds since the model is there: two engines' warm-ups and captures, which every job pays."""
        case = f"start/{self.size.shape.name}/{self.model.scheme}/two engines"
        return line(case, time.perf_counter() - self.began, "s")

    def measure(self, off: Engine, on: Engine, rows: Rows, load: str) -> Iterator[Line]:
        """Rows of the base model in `off`, and with their adapters in `on`."""
        size, base = self.size, self.rows(rows.count, 0)
        scheme, name = self.model.scheme, size.shape.name
        if not self.left.fits(LOAD_S * rows.count / size.most_rows):
            yield from self.leave_out(rows.count, load)
            return
        rounds = alternate((off, on), (base, rows), size, self.left)
        without, with_them = (median(taken) for taken in zip(*rounds, strict=True))
        shape = {
            "rows": rows.count,
            "context": size.context,
            "adapters": rows.adapters,
            "rank": RANK,
            "rounds": len(rounds),
        }
        if rows.count not in self.known:
            self.known.add(rows.count)
            yield line(tpot_case(scheme, rows.count, "base", name), without * 1000, "ms", **shape)
            if rows.count == 1:
                streamed = self.model.streamed_bytes
                share = 100 * streamed / without / self.copy_rate
                yield line(share_case(scheme, name), share, "% of copy", streamed_bytes=streamed)
        yield line(tpot_case(scheme, rows.count, load, name), with_them * 1000, "ms", **shape)
        ratio = median(b / a for a, b in rounds)
        yield line(over_base_case(scheme, rows.count, load, name), ratio, "x", **shape)

    def leave_out(self, rows: int, load: str) -> Iterator[Line]:
        """In place of `measure`."""
        scheme, name = self.model.scheme, self.size.shape.name
        base = [] if rows in self.known else [tpot_case(scheme, rows, "base", name)]
        return left_out(*base, *(make(scheme, rows, load, name) for make in (tpot_case, over_base_case)))

    def prefill(self, off: Engine, on: Engine) -> Iterator[Line]:
        """Prompts of an adapter each over prompts of the base model, new ones in every round."""
        size, scheme, name = self.size, self.model.scheme, self.size.shape.name
        count = max(size.most_rows // PREFILL_SHARE, 1)
        over = prefill_over_base_case(scheme, name)
        if not self.left.fits(LOAD_S):
            yield from left_out(over)
            return
        base, adapted = self.rows(count, 0), self.rows(count, count)
        rounds = [
            (prefill_rate(off, base, 2 + number), prefill_rate(on, adapted, 2 + number))
            for number in self.left.rounds(size.rounds)
        ]
        # Like the first of `alternate`.
        rounds = rounds[1:] or rounds
        shape = {"rows": count, "prompt": size.context, "adapters": count, "rounds": len(rounds)}
        without, with_them = (median(rates) for rates in zip(*rounds, strict=True))
        yield line(prefill_case(scheme, "base", name), without, "tokens/s", **shape)
        yield line(prefill_case(scheme, "distinct", name), with_them, "tokens/s", **shape)
        yield line(over, median(b / a for a, b in rounds), "x", **shape)


def alternate(
    engines: Sequence[Engine],
    rows: Sequence[Rows],
    size: Size,
    left: TimeLeft,
    sampling: Sequence[Sequence[dict[str, Any]]] = (({},), ({},)),
    grammars: Sequence[bytes | None] = (None, None),
) -> list[tuple[float, ...]]:
    """Seconds per token of each engine's rows, round by round as long as time is left; the first round does not count."""
    for engine, its, options, grammar in zip(engines, rows, sampling, grammars, strict=True):
        begin(engine, its, options, grammar)
    rounds = [
        tuple(token_seconds(engine, its, size.steps) for engine, its in zip(engines, rows, strict=True))
        for _ in left.rounds(size.rounds + 1)
    ]
    for engine, its in zip(engines, rows, strict=True):
        end(engine, its)
    return rounds[1:] or rounds


def sampling_steps(size: Size, device: torch.device, left: TimeLeft) -> Iterator[Line]:
    """Full batches of rows that sample, that have masks, and that have forced tokens, over greedy ones."""
    turns = Turns(random_model(size.shape, "none", device), size, 0.0, left)
    # Forced tokens come in numbers, so that rows of the same number of steps are longer.
    rows = turns.rows(size.most_rows, 0)
    longer = Rows(rows.count, 0, rows.prompt, rows.tokens * 4)
    keeps = EngineOptions(prefix_caching=True)
    masks = EngineOptions(mask_factory=scripted_masks(size.shape.vocab), prefix_caching=True)
    with (
        running_engine(turns.model, turns.source, longer, keeps) as plain,
        running_engine(turns.model, turns.source, longer, masks) as other,
    ):
        for name, options, grammar in (
            ("temperature, top-p, top-k", SAMPLED, None),
            ("masks", {}, MASKED),
            ("masks, sampled", SAMPLED, MASKED),
            ("forced tokens", {}, FORCED),
        ):
            if not left.fits(LOAD_S):
                yield from left_out(f"steps/{name} over greedy")
                continue
            both, grammars = (longer, longer), (None, grammar)
            rounds = alternate((plain, other), both, size, left, (({},), (options,)), grammars)
            greedy, asked = (median(taken) for taken in zip(*rounds, strict=True))
            shape = {"rows": rows.count, "context": size.context, "rounds": len(rounds)}
            yield line(f"steps/{name}", asked * 1000, "ms per token", **shape)
            yield line(f"steps/{name} over greedy", asked / greedy, "x", **shape)
