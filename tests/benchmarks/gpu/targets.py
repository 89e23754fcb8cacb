"""The target table: which cases answer which row, what is required, what is aimed at, and what was found.

Invariant: every row has an outcome and, where it was not measured, the reason. Dry lines answer nothing, and those of one
device never answer for another.

Times that the device's memory bounds were written for an H200, which copies 4.3 TB/s; they are scaled by what the probe copied
on the same device, and both figures are shown. Ratios and shares are not scaled, nor what the link to the host bounds.

The best published shares of base tokens per second with adapters: 0.53 for a dense model of 70B with one adapter, 0.83 to 0.89 for
a mixture of experts, 0.70 to 0.79 for four adapters mixed. Beside an int4 step of 4.8 ms, reading 64 adapters of 84 MB allows 0.79
in bfloat16 pages and 0.88 in 8-bit pages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.benchmarks.gpu.cases import DTYPE, ZIPF, kernel_cases
from tests.benchmarks.gpu.sizes import REAL
from tests.benchmarks.kernels.attention import decode_problem
from tests.benchmarks.kernels.gemm import gemm_problem
from tests.benchmarks.kernels.lora import layer_problem, pair_problem
from tests.benchmarks.kernels.shapes import LLAMA_3_8B

MODEL = LLAMA_3_8B.name
COPY = "probe/copy, read and written"
WRITTEN_GBS = 4300.0
"""GB read and written per second by a copy on the device that times were written for, an H200."""
FEW = 8
"""Adapters of the load of few."""
SKINNY_ROWS = (1, 16)
ONE_ADAPTER_ROWS = (1, 32)
INT4 = "int4 zeros"
"""The served scheme: with zero points."""
NO_LINE = "no line: its stage was not run"
Outcome = Literal["ok", "MISS", "failed", "not run"]
Combine = Callable[[Sequence[float]], float]


class Lines:
    """The lines of one or more runs by case; those of the last run of a case count."""

    def __init__(self, lines: Iterable[Mapping[str, Any]]) -> None:
        real = [line for line in lines if not line["dry"]]
        self._timed = {
            line["case"]: line for line in real if line["stage"] in ("time", "probe") and line["ok"]
        }
        self.checks = {
            line["case"]: line for line in real if line["stage"] == "check" and line["ok"] is not None
        }
        self._missed = {line["case"]: line for line in real if not line["ok"]}

    def value(self, case: str, name: str) -> float | None:
        """A figure of a timed case."""
        line = self._timed.get(case)
        return None if line is None or line[name] is None else float(line[name])

    def missing(self, cases: Iterable[str]) -> tuple[Outcome, str]:
        """Whether one of the cases failed or none was run, and why."""
        found = [self._missed[case] for case in cases if case in self._missed]
        failed = [line for line in found if line["ok"] is False]
        for line in failed or found:
            return "failed" if failed else "not run", f"{line['case']}: {line['error']}"
        return "not run", NO_LINE


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report."""

    name: str
    required: str
    outcome: Outcome
    found: str

    def text(self) -> str:
        return f"{self.outcome:<7} {self.name:<46} {self.required:<38} {self.found}"


@dataclass(frozen=True, slots=True)
class Target:
    """`combine` makes the row's figure of the field `name` of its cases; `job` is the job that measures them, if one does.

    `is_scaled`: a time that grows as the device's copy rate falls.
    """

    name: str
    kind: Literal["at most", "at least"]
    required: float
    aim: float | None
    unit: str
    cases: Sequence[str]
    field: str = "value"
    combine: Combine = max
    job: str = ""
    is_scaled: bool = False

    def row(self, lines: Lines) -> Row:
        """What the lines say of it."""
        aim = "" if self.aim is None else f" ({self.aim:g})"
        required = f"{self.kind} {self.required:g}{aim} {self.unit}"
        bound, copied = self.required, lines.value(COPY, "value")
        if self.is_scaled and copied is not None:
            bound *= WRITTEN_GBS / copied
            required += f", here {bound:.3g}"
        values = [lines.value(case, self.field) for case in self.cases]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            absent = [case for case, value in zip(self.cases, values, strict=True) if value is None]
            outcome, reason = lines.missing([*absent, self.job])
            return Row(self.name, required, outcome, reason)
        figure = self.combine(known)
        reached = figure <= bound if self.kind == "at most" else figure >= bound
        return Row(self.name, required, "ok" if reached else "MISS", f"measured {figure:.3g} {self.unit}")


def rows(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One per row of the table, of the lines of one device."""
    known = Lines(lines)
    return [_checks(known), *(target.row(known) for target in targets())]


def by_device(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The lines of each GPU, by its name; "" for lines that name none. Dry lines are in none."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if not line["dry"]:
            found.setdefault((line.get("hardware") or {}).get("gpu") or "", []).append(line)
    return found or {"": []}


def _checks(lines: Lines) -> Row:
    name, required = "every kernel against float32", "no wrong case"
    checks, cases = (
        lines.checks,
        [case.name for case in kernel_cases(is_dry=False) if not case.problem.is_peer],
    )
    unchecked = [case for case in cases if case not in checks]
    if len(unchecked) == len(cases):
        return Row(name, required, *lines.missing(cases))
    wrong = sum(not line["ok"] for line in checks.values())
    worst = max((line["rel_err"] or 0.0 for line in checks.values()), default=0.0)
    found = f"{len(checks)} of {len(cases)} cases, {wrong} wrong, largest error {worst:.1e}"
    if wrong or not unchecked:
        return Row(name, required, "MISS" if wrong else "ok", found)
    # A case whose process died or hung has no check, and is not right for that.
    outcome, reason = lines.missing(unchecked)
    return Row(name, required, outcome, f"{found}; {reason}")


def targets() -> list[Target]:
    """In the order of the table."""
    return [
        *_kernels(),
        *_lora_steps(),
        *_base_steps(),
        *_gemms(),
        *_attentions(),
        *_shares_of_base(),
        *_prefills(),
        *_serving(),
    ]


def tpot_case(scheme: str, rows: int, load: str, model: str = MODEL) -> str:
    """Case of a time per output token, in milliseconds; `load` base, all-base, one, 8 adapters, distinct, zipf."""
    return f"tpot/{model}/{scheme}/b{rows}/{load}"


def over_base_case(scheme: str, rows: int, load: str, model: str = MODEL) -> str:
    """Case of the same over that of the base model, both from turns of one run."""
    return f"over base/{model}/{scheme}/b{rows}/{load}"


def share_case(scheme: str, model: str = MODEL) -> str:
    """Case of the share of memcpy bandwidth that a lone row's steps stream weights at, in percent."""
    return f"share of copy/{model}/{scheme}/b1"


def prefill_case(scheme: str, load: str, model: str = MODEL) -> str:
    """Case of prompt tokens per second; `load` base or distinct."""
    return f"prefill/{model}/{scheme}/{load}"


def prefill_over_base_case(scheme: str, model: str = MODEL) -> str:
    """Case of the same with an adapter for each prompt over that of the base model, both from turns of one run."""
    return f"prefill over base/{model}/{scheme}/distinct"


def prefill_over_sdpa_case(prompt: int, what: str) -> str:
    """Case of prompts of so many tokens over `transformers` with torch's attention; `what` is ttft or rate."""
    return f"prefill/{prompt}/{what} over sdpa"


def _percent_over(values: Sequence[float]) -> float:
    return (max(values) - 1) * 100


def _difference(values: Sequence[float]) -> float:
    return values[0] - values[1]


def _quotient(values: Sequence[float]) -> float:
    return values[0] / values[1]


def _inverse(values: Sequence[float]) -> float:
    """Tokens per second over others, of seconds per token over theirs."""
    return 1 / values[0]


def _worst_pair(values: Sequence[float]) -> float:
    """The largest quotient of two values that follow each other."""
    return max(values[i] / values[i + 1] for i in range(0, len(values), 2))


def _kernels() -> list[Target]:
    width = LLAMA_3_8B.hidden
    pair = pair_problem(64, 64, 16, width, width, DTYPE, DTYPE).name
    skewed = pair_problem(64, 64, 16, width, width, DTYPE, DTYPE, ZIPF).name
    layer, quantized = (layer_problem(LLAMA_3_8B, 64, 64, 16, DTYPE, pages).name for pages in (DTYPE, "int8"))
    return [
        Target("shrink+expand pair, 64 adapters", "at most", 10, 8, "us", [pair], "us_p50", is_scaled=True),
        Target("the same, rows by Zipf 1.1", "at most", 10, 8, "us", [skewed], "us_p50", is_scaled=True),
        Target(
            "LoRA kernels of a layer, bf16 pages",
            "at most",
            80,
            None,
            "us",
            [layer],
            "us_p50",
            is_scaled=True,
        ),
        Target(
            "LoRA kernels of a layer, 8-bit pages",
            "at most",
            60,
            None,
            "us",
            [quantized],
            "us_p50",
            is_scaled=True,
        ),
    ]


def _lora_steps() -> list[Target]:
    found = []
    for scheme in ("none", "int4"):
        cases = [over_base_case(scheme, rows, "all-base") for rows in (1, 64)]
        found.append(_step(f"all-base batch, {scheme}", 1, None, "%", cases, _percent_over, scheme))
    for scheme, required, aim in (("none", 10.0, 8.0), ("int4", 20.0, 12.0)):
        cases = [over_base_case(scheme, rows, "one") for rows in ONE_ADAPTER_ROWS]
        name = f"one adapter, batch 1-32, {scheme}"
        found.append(_step(name, required, aim, "%", cases, _percent_over, scheme))
    for scheme, load, required, added in (
        ("none", "distinct", 1.5, 2.6),
        ("int4", "distinct", 1.8, 2.6),
        ("int4", "distinct 8-bit", 1.5, 1.9),
    ):
        name, over = f"64 {load}, {scheme}", over_base_case(scheme, 64, load)
        skewed = over_base_case(scheme, 64, load.replace("distinct", "zipf"))
        both = [tpot_case(scheme, 64, load), tpot_case(scheme, 64, "base")]
        found += [
            _step(name, required, None, "x", [over], max, scheme),
            _step(f"{name}, added", added, None, "ms", both, _difference, scheme),
            _step(f"{name}, Zipf 1.1 over even rows", 1.0, None, "x", [skewed, over], _quotient, scheme),
        ]
    return found


def _step(
    name: str,
    required: float,
    aim: float | None,
    unit: str,
    cases: Sequence[str],
    combine: Combine,
    scheme: str,
) -> Target:
    job, is_time = f"tpot {scheme}", unit == "ms"
    return Target(name, "at most", required, aim, unit, cases, combine=combine, job=job, is_scaled=is_time)


def _base_steps() -> list[Target]:
    found = []
    for scheme, required, aim in (("none", 75, 80), ("int8", 60, 63), ("int4", 45, 55)):
        name, cases = f"base decode, batch 1, {scheme}", [share_case(scheme)]
        job = f"tpot {scheme}"
        found.append(Target(name, "at least", required, aim, "% of copy", cases, job=job))
    for scheme, most in (("none", 6.8), ("int4", 4.8)):
        cases = [tpot_case(scheme, 64, "base")]
        found.append(_step(f"base decode, batch 64, {scheme}", most, None, "ms", cases, max, scheme))
    return found


def _gemms() -> list[Target]:
    shapes = LLAMA_3_8B.products()

    def names(variant: str, rows: Sequence[int], products: Iterable[str]) -> list[str]:
        return [gemm_problem(variant, m, *shapes[name], DTYPE).name for m in rows for name in products]

    found = []
    for name, rows, products, required in (
        ("gate_up, M 1-16", SKINNY_ROWS, ("gate_up",), 60),
        ("4096x4096, M 1-16", SKINNY_ROWS, ("o",), 40),
        ("M 64", (64,), ("o", "gate_up"), 45),
    ):
        cases, title = names(INT4, rows, products), f"int4 GEMM, {name}"
        found.append(Target(title, "at least", required, None, "% of bound", cases, "pct_copy", min))
    own, peers = (names(variant, (1, 16, 64), shapes) for variant in (INT4, "torch mm"))
    both = [case for pair in zip(own, peers, strict=True) for case in pair]
    name = "int4 GEMM over torch bf16, M <= 64"
    return [*found, Target(name, "at most", 1, None, "x", both, "us_p50", _worst_pair)]


def _attentions() -> list[Target]:
    def case(context: int, kv: str) -> str:
        return decode_problem(LLAMA_3_8B, 64, context, DTYPE, kv).name

    long, short, small = case(8192, DTYPE), case(512, DTYPE), case(8192, "fp8")
    name = "fp8 KV over bf16 KV at 8k"
    return [
        Target("paged decode at 8k", "at least", 80, None, "% of copy", [long], "pct_copy"),
        Target("paged decode at 512", "at least", 55, None, "% of copy", [short], "pct_copy"),
        Target(name, "at least", 1.4, None, "x faster", [long, small], "us_p50", _quotient),
    ]


def _shares_of_base() -> list[Target]:
    """Of the base model's tokens per second, with adapters on every row."""
    found = []
    for scheme in ("int4", "none"):
        job = f"tpot {scheme}"
        for load, required in ((f"{FEW} adapters", 0.90), ("distinct", 0.85), ("distinct 8-bit", 0.85)):
            name = f"{load.replace('distinct', '64 adapters')} over base decode, {scheme}"
            cases = [over_base_case(scheme, 64, load)]
            found.append(Target(name, "at least", required, None, "x", cases, combine=_inverse, job=job))
        cases = [prefill_over_base_case(scheme)]
        name = f"prefill with adapters over base, {scheme}"
        found.append(Target(name, "at least", 0.90, None, "x", cases, job=job))
    return found


def _prefills() -> list[Target]:
    """Against `transformers` with `scaled_dot_product_attention`, on the same weights in the same type."""
    found = []
    for prompt, count in REAL.prefills:
        rate, ttft = (prefill_over_sdpa_case(prompt, what) for what in ("rate", "ttft"))
        name = f"prefill of {count} x {prompt:,} over torch SDPA"
        found.append(Target(name, "at least", 1, None, "x tokens/s", [rate], job="logits"))
        name = f"TTFT at {prompt:,} over torch SDPA"
        found.append(Target(name, "at most", 1, None, "x", [ttft], job="logits"))
    return found


def _serving() -> list[Target]:
    mixed, json = "mixed traffic 512 in / 128 out over decode", "JSON rows, fast-forward on, over free rows"
    return [
        Target(
            "sampled over greedy rows",
            *("at most", 1.15, None, "x", ["steps/temperature, top-p, top-k over greedy"]),
            job="steps",
        ),
        Target(mixed, "at least", 0.85, None, "x", ["mixed/rate over decode"], job="mixed"),
        Target(json, "at least", 0.95, 1, "x", ["json/rate over free"], job="json"),
        Target("swap of an 84 MB adapter", "at most", 5, None, "ms", ["swap/ms"], job="swap"),
        Target("swap, share of the pinned copy", "at least", 80, None, "%", ["swap/share"], job="swap"),
        Target("p99 between tokens beside swaps", "at most", 1.1, None, "x", ["swap/p99 itl"], job="swap"),
        Target(
            "1,000 registered, 64 resident, Zipf 1.1",
            *("at least", 0.9, None, "x", ["zipf/rate over resident"]),
            job="zipf",
        ),
        Target("transformers + PEFT", "at least", 10, 20, "x", ["peft/rate over peft"], job="peft"),
        Target(
            "error of log-probabilities over transformers'",
            *("at most", 1.5, None, "x", ["logits/error over transformers"]),
            job="logits",
        ),
        Target(
            "replayed over plain steps, not deterministic",
            *("at least", 99, None, "% equal tokens", ["graphs/equal tokens"]),
            job="graphs",
        ),
    ]
