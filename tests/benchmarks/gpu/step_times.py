"""Times of decode steps: with and without adapters, and with what rows may ask of a step beside greedy tokens.

Invariant: both sides of a ratio take turns in one process, on one set of weights.
"""

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
    running_engine,
    token_seconds,
)
from tests.benchmarks.gpu.model import RandomModel, random_model
from tests.benchmarks.gpu.scripted_masks import FORCED, MASKED, scripted_masks
from tests.benchmarks.gpu.sizes import RANK, ZIPF, Line, Size, line
from tests.benchmarks.gpu.targets import over_base_case, share_case, tpot_case
from tests.benchmarks.kernels.clock import copy_rate

from loraplex.engine.engine import Engine

SAMPLED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 1}


def tpot(scheme: str) -> Callable[[Size, torch.device], Iterator[Line]]:
    """The job that times steps of a base model in this scheme, without adapters and with them."""

    def run(size: Size, device: torch.device) -> Iterator[Line]:
        rate = copy_rate(device, size.copy_bytes)
        turns = Turns(random_model(size.shape, scheme, device), size, rate)
        most = size.most_rows
        with turns.engine() as off:
            with turns.engine(most) as on:
                for rows in size.rows:
                    yield from turns.measure(off, on, turns.rows(rows, 0), "all-base")
                    yield from turns.measure(off, on, turns.rows(rows, 1), "one")
                for zipf, load in ((0.0, "distinct"), (ZIPF, "zipf")):
                    yield from turns.measure(off, on, turns.rows(most, most, zipf), load)
            with turns.engine(most, "int8") as on:
                for zipf, load in ((0.0, "distinct 8-bit"), (ZIPF, "zipf 8-bit")):
                    yield from turns.measure(off, on, turns.rows(most, most, zipf), load)

    return run


@dataclass(slots=True)
class Turns:
    """Engines without and with adapters over one set of weights, stepped in turn (ABAB)."""

    model: RandomModel
    size: Size
    copy_rate: float
    source: AliasedSource = field(init=False)

    def __post_init__(self) -> None:
        self.source = AliasedSource(self.model.loaded.config, RANK, self.model.loaded.dtype)

    def rows(self, count: int, adapters: int, zipf: float = 0.0) -> Rows:
        tokens = self.size.steps * (self.size.rounds + 2) + count + 64
        return Rows(count, adapters, self.size.context, tokens, zipf)

    def engine(self, adapters: int = 0, page_dtype: str = "auto") -> AbstractContextManager[Engine]:
        """For as many rows as any load has, with room for `adapters` and two of them."""
        nbytes = (adapters + 2) * self.source.nbytes if adapters else 0
        options = EngineOptions(adapter_bytes=nbytes, page_dtype=page_dtype)
        return running_engine(self.model, self.source, self.rows(self.size.most_rows, 0), options)

    def measure(self, off: Engine, on: Engine, rows: Rows, load: str) -> Iterator[Line]:
        """Rows of the base model in `off`, and with their adapters in `on`."""
        size, base = self.size, self.rows(rows.count, 0)
        rounds = alternate((off, on), (base, rows), size)
        without, with_them = (median(taken) for taken in zip(*rounds, strict=True))
        shape = {"rows": rows.count, "context": size.context, "adapters": rows.adapters, "rank": RANK}
        scheme, name = self.model.scheme, size.shape.name
        if load == "all-base":
            yield line(tpot_case(scheme, rows.count, "base", name), without * 1000, "ms", **shape)
            if rows.count == 1:
                streamed = self.model.streamed_bytes
                share = 100 * streamed / without / self.copy_rate
                yield line(share_case(scheme, name), share, "% of copy", streamed_bytes=streamed)
        yield line(tpot_case(scheme, rows.count, load, name), with_them * 1000, "ms", **shape)
        ratio = median(b / a for a, b in rounds)
        yield line(over_base_case(scheme, rows.count, load, name), ratio, "x", **shape)


def alternate(
    engines: Sequence[Engine],
    rows: Sequence[Rows],
    size: Size,
    sampling: Sequence[Sequence[dict[str, Any]]] = (({},), ({},)),
    grammars: Sequence[bytes | None] = (None, None),
) -> list[tuple[float, ...]]:
    """Seconds per token of each engine's rows, round by round; the first round does not count."""
    for engine, its, options, grammar in zip(engines, rows, sampling, grammars, strict=True):
        begin(engine, its, options, grammar)
    rounds = [
        tuple(token_seconds(engine, its, size.steps) for engine, its in zip(engines, rows, strict=True))
        for _ in range(size.rounds + 1)
    ]
    for engine, its in zip(engines, rows, strict=True):
        end(engine, its)
    return rounds[1:]


def sampling_steps(size: Size, device: torch.device) -> Iterator[Line]:
    """Full batches of rows that sample, that have masks, and that have forced tokens, over greedy ones."""
    turns = Turns(random_model(size.shape, "none", device), size, copy_rate(device, size.copy_bytes))
    # Forced tokens come in numbers, so that rows of the same number of steps are longer.
    rows = turns.rows(size.most_rows, 0)
    longer = Rows(rows.count, 0, rows.prompt, rows.tokens * 4)
    masks = EngineOptions(mask_factory=scripted_masks(size.shape.vocab))
    with (
        running_engine(turns.model, turns.source, longer, EngineOptions()) as plain,
        running_engine(turns.model, turns.source, longer, masks) as other,
    ):
        for name, options, grammar in (
            ("temperature, top-p, top-k", SAMPLED, None),
            ("masks", {}, MASKED),
            ("masks, sampled", SAMPLED, MASKED),
            ("forced tokens", {}, FORCED),
        ):
            rounds = alternate((plain, other), (longer, longer), size, (({},), (options,)), (None, grammar))
            greedy, asked = (median(taken) for taken in zip(*rounds, strict=True))
            shape = {"rows": rows.count, "context": size.context}
            yield line(f"steps/{name}", asked * 1000, "ms per token", **shape)
            yield line(f"steps/{name} over greedy", asked / greedy, "x", **shape)
