"""How much of everything a job of the whole model does: as much as the target table says, or hardly anything."""

from dataclasses import dataclass
from typing import Any

from tests.benchmarks.kernels.shapes import LLAMA_3_8B, TINY, LayerShape

RANK = 16
ZIPF = 1.1
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """`copy_bytes` None: the yardstick's own. `seconds`: of one stretch of open traffic. Lengths are in tokens."""

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
    requests=512,
    tokens=64,
    host_bytes=16 << 30,
    copy_bytes=None,
    prompt=512,
    output=128,
    seconds=5.0,
    shares=(0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0),
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
    shares=(0.01,),
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
