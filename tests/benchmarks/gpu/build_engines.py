"""What engines launch, compiled before they start: each of the harness's engines starts without a GPU, and its launches are kept.

An engine launches every kernel of its steps once at its start (`engine/runner/warm_up.py`), and again in each step that it
captures. `test_build_engines.py` runs the jobs themselves in the same way and finds no launch that is not here.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from tests.benchmarks.gpu.build import built, recorder
from tests.benchmarks.gpu.engine_rows import AliasedSource, EngineOptions, Rows, running_engine
from tests.benchmarks.gpu.model import MAX_LENGTH, random_model
from tests.benchmarks.gpu.sizes import DRY, RANK, REAL, Line, Size
from tests.benchmarks.gpu.unfilled_engine import LAYERS, META, Launch, Launches, unfilled_engines
from tests.benchmarks.gpu.whole_model import REFERENCE_ROWS, longest_row

DTYPE = "bfloat16"
"""Of the random models."""
SCHEMES = ("int4", "none", "int8")
SHARES_OF_CORE = 2
DRY_SHARES = 60
"""Dry, one of so many is built: two or three kernels."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What decides which kernels an engine launches. `page_dtype` None: it serves no adapters."""

    scheme: str
    rows: int
    page_dtype: str | None
    max_length: int = MAX_LENGTH


def engine_kinds(size: Size) -> list[EngineKind]:
    """Those of the jobs, in the jobs' order. One of fewer rows launches nothing that one of more does not."""
    pages = (None, "auto", "int8")
    return [
        EngineKind("none", REFERENCE_ROWS, None, longest_row(size)),
        *(EngineKind(scheme, size.most_rows, dtype) for scheme in SCHEMES for dtype in pages),
    ]


def engine_launches(size: Size) -> Launches:
    """The launches of all kinds of engines at their start, each distinct one once: a third of a second for each kind."""
    shape = replace(size.shape, layers=LAYERS)
    with unfilled_engines() as launches:
        for kind in engine_kinds(size):
            model = random_model(shape, kind.scheme, META, kind.max_length)
            source = AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
            nbytes = 0 if kind.page_dtype is None else kind.rows * source.nbytes
            options = EngineOptions(nbytes, host_bytes=0, page_dtype=kind.page_dtype or "auto")
            with running_engine(model, source, Rows(kind.rows, 0, 1, 1), options):
                pass
    return launches


@cache
def _every_launch(is_dry: bool) -> tuple[Launch, ...]:
    return tuple(engine_launches(DRY if is_dry else REAL).found.values())


def engine_builds(*, is_dry: bool) -> dict[str, Callable[[], Iterator[Line]]]:
    """Shares of the launches, by their names: each yields a line per kernel, in a process that may be its own.

    The processes number the launches alike; those of the first jobs come first in every share.
    """
    shares = DRY_SHARES if is_dry else SHARES_OF_CORE * len(os.sched_getaffinity(0))
    return {
        f"engine launches {share + 1} of {shares}": partial(_build_share, share, shares, is_dry=is_dry)
        for share in range(1 if is_dry else shares)
    }


def _build_share(share: int, shares: int, *, is_dry: bool) -> Iterator[Line]:
    kernels, launches = recorder(), _every_launch(is_dry)
    kernels.take()
    for number in range(share, len(launches), shares):
        launches[number].compile()
        for recorded in kernels.take():
            shape = {name: str(value) for name, value in recorded.constants.items()}
            head = {"op": "engine", "dtype": DTYPE, "shape": shape, "case": f"engine launch {number}"}
            yield built(recorded, DTYPE) | head
