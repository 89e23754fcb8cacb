"""Answers given in a crowd beside the same requests run alone on the same server afterwards.

A difference is forgiven only where the lone run's two best tokens lay closer than `MARGIN` at the first token that differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from loraplex.platform.bench.client import Answer
from loraplex.platform.bench.load import LoadResult, run_load
from loraplex.platform.bench.report import Case, Ratio, Report

MARGIN = 1e-3


@dataclass(slots=True)
class Parity:
    """`margins`: log-probability margin at the first differing token of every answer that differs."""

    compared: int = 0
    margins: list[float] = field(default_factory=list)

    @property
    def explained(self) -> int:
        """Answers that are equal or differ first where the margin is below `MARGIN`."""
        return self.compared - sum(margin > MARGIN for margin in self.margins)

    def add_to(self, report: Report) -> None:
        """As a case and a ratio."""
        figure = {
            "compared": self.compared,
            "equal": self.compared - len(self.margins),
            "margins": [round(margin, 5) for margin in self.margins],
        }
        report.cases.append(Case("parity with lone runs", {"margin": MARGIN}, figure))
        report.notes.append(
            f"parity: {figure['equal']} of {self.compared} equal; margins {figure['margins']}"
        )
        if self.compared:
            share = self.explained / self.compared
            report.ratios.append(Ratio("answers equal to lone runs, or within the margin", share, 1.0))


async def compare_alone(base_url: str, crowd: LoadResult, samples: int) -> Parity:
    """Repeat every n-th request of `crowd` alone, with log-probabilities. Raises `BenchFailed`."""
    parity = Parity()
    step = max(len(crowd.requests) // max(samples, 1), 1)
    for index in range(0, len(crowd.requests), step)[:samples]:
        request = replace(crowd.requests[index], options={"logprobs": 2})
        alone = (await run_load(base_url, [request])).require_complete().answers[0]
        parity.compared += 1
        if (margin := margin_at_difference(crowd.answers[index].text, alone)) is not None:
            parity.margins.append(margin)
    return parity


def margin_at_difference(text: str, alone: Answer) -> float | None:
    """Margin of the lone run's two best tokens where `text` leaves it; None when the texts are equal."""
    if text == alone.text:
        return None
    common = next(
        (at for at, (one, other) in enumerate(zip(text, alone.text)) if one != other),
        min(len(text), len(alone.text)),
    )
    end = 0
    for token, top in zip(alone.tokens, alone.tops):
        end += len(token)
        if end > common:
            return _margin(top)
    return float("inf")


def _margin(top: Mapping[str, float]) -> float:
    best = sorted(top.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")
