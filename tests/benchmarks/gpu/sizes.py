"""How much of everything a job of the whole model does: as much as the target table says, or hardly anything."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.kernels.shapes import LLAMA_3_8B, TINY, LayerShape

RANK = 16
ZIPF = 1.1
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """`copy_bytes` None: the yardstick's own. `seconds`: of one stretch of open traffic. Lengths are in tokens.

    `rows` of batches, rising; `shares` of the decode rate, rising. `prefills`: (tokens of a prompt, prompts at once).
    """

    shape: LayerShape
    context: int
    steps: int
    rounds: int
    rows: tuple[int, ...]
    registered: int
    resident: int
    requests: int
    tokens: int
    host_bytes: int
    copy_bytes: int | None
    prompt: int
    output: int
    seconds: float
    shares: tuple[float, ...]
    prefills: tuple[tuple[int, int], ...]

    @property
    def most_rows(self) -> int:
        return self.rows[-1]


REAL = Size(
    LLAMA_3_8B,
    context=512,
    steps=16,
    rounds=5,
    rows=(1, 32, 64),
    registered=1000,
    resident=64,
    requests=384,
    tokens=64,
    host_bytes=16 << 30,
    copy_bytes=None,
    prompt=512,
    output=128,
    seconds=4.0,
    shares=(0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0),
    prefills=((2048, 4), (8192, 2)),
)
DRY = Size(
    TINY,
    context=8,
    steps=1,
    rounds=2,
    rows=(1, 2),
    registered=6,
    resident=3,
    requests=6,
    tokens=3,
    host_bytes=1 << 20,
    copy_bytes=1 << 20,
    prompt=6,
    output=4,
    seconds=0.2,
    shares=(0.005, 0.01),
    prefills=((4, 2), (6, 2)),
)


def line(case: str, value: float, unit: str, **shape: Any) -> Line:
    """A line of a job: one figure of the whole model."""
    return {
        "stage": "time",
        "op": "model",
        "variant": case.partition("/")[0],
        "shape": shape,
        "case": case,
        "ok": True,
        "value": value,
        "unit": unit,
    }


def left_out(*cases: str) -> Iterator[Line]:
    """The lines of cases for which the job had no time left."""
    for case in cases:
        yield {"stage": "run", "case": case, "ok": None, "error": "not run: its job had no time left"}
