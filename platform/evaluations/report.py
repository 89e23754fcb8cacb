"""The report of an evaluation: pass rates with their intervals, the comparison with a baseline, and each case that differs.

Invariant: the bytes of a report follow from suite, models, fingerprint, seed and answers alone: no id, no time, no cache salt.
"""

import msgspec

from loraplex.platform.evaluations.answers import Answer
from loraplex.platform.evaluations.statistics import paired_p_value, wilson_interval
from loraplex.platform.evaluations.suite import Suite

MAX_SHOWN = 1000
"""Cases that a report shows with their answers; `failing` and `differing` count all."""
_DECIMALS = 6


class EvaluatedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model as it answered: its name, and the digest of its adapter; empty for the base model."""

    model: str
    digest: str = ""
    system_fingerprint: str = ""


class Figures(msgspec.Struct, frozen=True):
    """Of one model over all cases. `interval`: of the pass rate, at 95 %. `unmet`: cases per expectation that was not met."""

    passed: int
    pass_rate: float
    interval: tuple[float, float]
    unmet: dict[str, int]
    prompt_tokens: int
    completion_tokens: int


class ShownCase(msgspec.Struct, frozen=True, omit_defaults=True):
    """A case that the version fails, or that one of the two models fails."""

    case: str
    answer: Answer
    baseline: Answer | None = None


class Comparison(msgspec.Struct, frozen=True):
    """`worse`: cases that only the baseline passes; `better`: those that only the version passes. `p_value`: McNemar's, exact."""

    worse: int
    better: int
    p_value: float


class Report(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`cases`: at most `MAX_SHOWN`, those that differ first."""

    suite_sha256: str
    seed: int
    total: int
    model: EvaluatedModel
    figures: Figures
    baseline: EvaluatedModel | None = None
    baseline_figures: Figures | None = None
    comparison: Comparison | None = None
    cases: list[ShownCase]

    @property
    def regression(self) -> float:
        """By how much the pass rate is below the baseline's; 0 without one."""
        other = self.baseline_figures
        return 0.0 if other is None else round(other.pass_rate - self.figures.pass_rate, _DECIMALS)


def make_report(
    suite: Suite,
    seed: int,
    model: tuple[EvaluatedModel, list[Answer]],
    baseline: tuple[EvaluatedModel, list[Answer]] | None = None,
) -> Report:
    """Report the answers to all cases of a suite, in their order."""
    answers, others = model[1], None if baseline is None else baseline[1]
    shown: list[tuple[bool, ShownCase]] = []
    worse = better = 0
    for index, answer in enumerate(answers):
        other = None if others is None else others[index]
        worse += other is not None and bool(answer.failed) and not other.failed
        better += other is not None and bool(other.failed) and not answer.failed
        if answer.failed or (other is not None and other.failed):
            differs = other is not None and bool(other.failed) != bool(answer.failed)
            shown.append((not differs, ShownCase(suite.name_of(index), answer, other)))
    shown.sort(key=lambda item: item[0])
    return Report(
        suite_sha256=suite.sha256,
        seed=seed,
        total=len(answers),
        model=model[0],
        figures=_figures(answers),
        baseline=None if baseline is None else baseline[0],
        baseline_figures=None if others is None else _figures(others),
        comparison=None
        if others is None
        else Comparison(worse, better, round(paired_p_value(worse, better), _DECIMALS)),
        cases=[each for _, each in shown[:MAX_SHOWN]],
    )


def report_bytes(report: Report) -> bytes:
    """Return the JSON text of a report: the same for equal reports."""
    return msgspec.json.format(msgspec.json.encode(report, order="deterministic"), indent=1)


def _figures(answers: list[Answer]) -> Figures:
    passed = sum(not answer.failed for answer in answers)
    low, high = wilson_interval(passed, len(answers))
    unmet: dict[str, int] = {}
    for answer in answers:
        for name in answer.failed:
            unmet[name] = unmet.get(name, 0) + 1
    return Figures(
        passed,
        round(passed / len(answers), _DECIMALS),
        (round(low, _DECIMALS), round(high, _DECIMALS)),
        dict(sorted(unmet.items())),
        sum(answer.prompt_tokens for answer in answers),
        sum(answer.completion_tokens for answer in answers),
    )
