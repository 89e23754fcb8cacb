"""The issue's table: which lines answer which row, what is required, what is aimed at, and whether it was reached.

A row whose lines are missing stays open, and dry lines answer nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.benchmarks.gpu.cases import DTYPE
from tests.benchmarks.kernels.attention import decode_problem
from tests.benchmarks.kernels.gemm import gemm_problem
from tests.benchmarks.kernels.lora import layer_problem, pair_problem
from tests.benchmarks.kernels.shapes import LLAMA_3_8B

MODEL = LLAMA_3_8B.name
SKINNY_ROWS = (1, 16)
ONE_ADAPTER_ROWS = (1, 32)


class Lines:
    """The lines of a run by case; those of the last run of a case count."""

    def __init__(self, lines: Iterable[Mapping[str, Any]]) -> None:
        real = [line for line in lines if not line["dry"]]
        self._timed = {line["case"]: line for line in real if line["stage"] == "time" and line["ok"]}
        self._checked = [line for line in real if line["stage"] == "check" and line["ok"] is not None]

    def value(self, case: str, name: str = "value") -> float | None:
        """A figure of a timed case."""
        line = self._timed.get(case)
        return None if line is None or line[name] is None else float(line[name])

    def values(self, cases: Sequence[str], name: str = "value") -> list[float] | None:
        """A figure of several cases; None when one is missing."""
        found = [self.value(case, name) for case in cases]
        return None if None in found else [value for value in found if value is not None]

    def wrong_checks(self) -> float | None:
        """How many checks failed."""
        return float(sum(not line["ok"] for line in self._checked)) if self._checked else None


Figure = Callable[[Lines], float | None]


@dataclass(frozen=True, slots=True)
class Demand:
    """`aim` None: none beyond what is required."""

    name: str
    kind: Literal["at most", "at least"]
    required: float
    aim: float | None
    unit: str
    figure: Figure

    def verdict(self, lines: Lines) -> str:
        """One line of the table."""
        value = self.figure(lines)
        aim = "" if self.aim is None else f" ({self.aim:g})"
        wanted = f"{self.kind} {self.required:g}{aim} {self.unit}"
        if value is None:
            return f"open  {self.name:<44} {wanted}"
        reached = value <= self.required if self.kind == "at most" else value >= self.required
        return f"{'ok' if reached else 'MISS':<5} {self.name:<44} {wanted}: measured {value:.3g}"


def verdicts(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per row of the table."""
    known = Lines(lines)
    return [demand.verdict(known) for demand in demands()]


def demands() -> list[Demand]:
    """In the order of the issue."""
    wrong = Demand("kernels against fp32", "at most", 0, None, "wrong", Lines.wrong_checks)
    return [wrong, *_kernels(), *_lora_steps(), *_base_steps(), *_gemms(), *_attentions(), *_serving()]


def tpot_case(scheme: str, rows: int, load: str, model: str = MODEL) -> str:
    """Case of a time per output token, in milliseconds; `load` base, all-base, one, distinct."""
    return f"tpot/{model}/{scheme}/b{rows}/{load}"


def over_base_case(scheme: str, rows: int, load: str, model: str = MODEL) -> str:
    """Case of the same over that of the base model, both from turns of one run."""
    return f"over base/{model}/{scheme}/b{rows}/{load}"


def share_case(scheme: str, model: str = MODEL) -> str:
    """Case of the share of memcpy bandwidth that a lone row's steps stream weights at, in percent."""
    return f"share of copy/{model}/{scheme}/b1"


def _of(case: str, name: str = "value") -> Figure:
    return lambda lines: lines.value(case, name)


def _worst(cases: Sequence[str], name: str, pick: Callable[[list[float]], float]) -> Figure:
    def figure(lines: Lines) -> float | None:
        values = lines.values(cases, name)
        return None if values is None else pick(values)

    return figure


def _percent_over(cases: Sequence[str]) -> Figure:
    return _worst(cases, "value", lambda values: (max(values) - 1) * 100)


def _ratio(above: str, below: str, name: str) -> Figure:
    def figure(lines: Lines) -> float | None:
        values = lines.values([above, below], name)
        return None if values is None else values[0] / values[1]

    return figure


def _kernels() -> list[Demand]:
    width = LLAMA_3_8B.hidden
    pair = pair_problem(64, 64, 16, width, width, DTYPE, DTYPE).name
    layer, quantized = (layer_problem(LLAMA_3_8B, 64, 64, 16, DTYPE, pages).name for pages in (DTYPE, "int8"))
    return [
        Demand("shrink+expand pair, 64 adapters", "at most", 10, 8, "us", _of(pair, "us_p50")),
        Demand("LoRA kernels of a layer, bf16", "at most", 80, None, "us", _of(layer, "us_p50")),
        Demand("LoRA kernels of a layer, 8-bit", "at most", 60, None, "us", _of(quantized, "us_p50")),
    ]


def _lora_steps() -> list[Demand]:
    found = []
    for scheme in ("none", "int4"):
        cases = [over_base_case(scheme, rows, "all-base") for rows in (1, 64)]
        found.append(Demand(f"all-base batch, {scheme}", "at most", 1, None, "%", _percent_over(cases)))
    for scheme, required, aim in (("none", 10.0, 8.0), ("int4", 20.0, 12.0)):
        cases = [over_base_case(scheme, rows, "one") for rows in ONE_ADAPTER_ROWS]
        found.append(
            Demand(f"one adapter, batch 1-32, {scheme}", "at most", required, aim, "%", _percent_over(cases))
        )
    for scheme, load, required, added in (
        ("none", "distinct", 1.5, 2.6),
        ("int4", "distinct", 1.8, 2.6),
        ("int4", "distinct 8-bit", 1.5, 1.9),
    ):
        name = f"64 {load}, {scheme}"
        found.append(Demand(name, "at most", required, None, "x", _of(over_base_case(scheme, 64, load))))
        found.append(Demand(f"{name}, added", "at most", added, None, "ms", _added(scheme, load)))
    return found


def _added(scheme: str, load: str) -> Figure:
    def figure(lines: Lines) -> float | None:
        values = lines.values([tpot_case(scheme, 64, load), tpot_case(scheme, 64, "base")])
        return None if values is None else values[0] - values[1]

    return figure


def _base_steps() -> list[Demand]:
    found = [
        Demand(
            f"base decode, batch 1, {scheme}", "at least", required, aim, "% of copy", _of(share_case(scheme))
        )
        for scheme, required, aim in (("none", 75, 80), ("int8", 60, None), ("int4", 45, 55))
    ]
    return found + [
        Demand(
            f"base decode, batch 64, {scheme}",
            "at most",
            most,
            None,
            "ms",
            _of(tpot_case(scheme, 64, "base")),
        )
        for scheme, most in (("none", 6.8), ("int4", 4.8))
    ]


def _gemms() -> list[Demand]:
    def names(variant: str, rows: Sequence[int], products: Sequence[str]) -> list[str]:
        shapes = LLAMA_3_8B.products()
        return [gemm_problem(variant, m, *shapes[name], DTYPE).name for m in rows for name in products]

    def slower(lines: Lines) -> float | None:
        products = tuple(LLAMA_3_8B.products())
        ours = lines.values(names("int4", (1, 16, 64), products), "us_p50")
        torchs = lines.values(names("torch mm", (1, 16, 64), products), "us_p50")
        if ours is None or torchs is None:
            return None
        return max(own / peer for own, peer in zip(ours, torchs, strict=True))

    found = []
    for name, rows, products, required in (
        ("gate_up, M 1-16", SKINNY_ROWS, ("gate_up",), 60),
        ("4096x4096, M 1-16", SKINNY_ROWS, ("o",), 40),
        ("M 64", (64,), ("o", "gate_up"), 45),
    ):
        figure = _worst(names("int4", rows, products), "pct_copy", min)
        found.append(Demand(f"int4 GEMM, {name}", "at least", required, None, "% of bound", figure))
    return [*found, Demand("int4 GEMM over torch bf16, M <= 64", "at most", 1, None, "x", slower)]


def _attentions() -> list[Demand]:
    def name(context: int, kv: str) -> str:
        return decode_problem(LLAMA_3_8B, 64, context, DTYPE, kv).name

    faster = _ratio(name(8192, DTYPE), name(8192, "fp8"), "us_p50")
    return [
        Demand("paged decode at 8k", "at least", 80, None, "% of copy", _of(name(8192, DTYPE), "pct_copy")),
        Demand("paged decode at 512", "at least", 55, None, "% of copy", _of(name(512, DTYPE), "pct_copy")),
        Demand("fp8 KV over bf16 KV at 8k", "at least", 1.4, None, "x faster", faster),
    ]


def _serving() -> list[Demand]:
    return [
        Demand("swap of an 84 MB adapter", "at most", 5, None, "ms", _of("swap/ms")),
        Demand("swap, share of the pinned copy", "at least", 80, None, "%", _of("swap/share")),
        Demand("p99 ITL of running rows in swaps", "at most", 1.1, None, "x", _of("swap/p99 itl")),
        Demand("1,000 registered, 64 resident", "at least", 0.9, None, "x", _of("zipf/rate over resident")),
        Demand("transformers + PEFT", "at least", 10, 20, "x", _of("peft/rate over peft")),
    ]
