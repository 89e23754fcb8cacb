"""The answer to a question: the probabilities of its options, after the temperature of a calibration, and what sums them up.

`confidence` says how concentrated they are: of n choices (p - 1/n) / (1 - 1/n) with the highest p, of levels 1 - their standard
deviation over the largest possible one. A `score` is the expected level.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.engine.errors import NonFiniteLogits
from loraplex.engine.messages import Failed
from loraplex.platform.errors import EngineFailed
from loraplex.platform.inference.decisions.calibration import softmax
from loraplex.platform.parameters.decision_request import ChoiceQuestion, PredicateQuestion, Question


@dataclass(frozen=True, slots=True)
class OptionProbabilities:
    """Of the options in their order; they sum to 1. `mass`: the probability that the model gave to all options together."""

    probabilities: Sequence[float]
    mass: float


def probabilities_of(logprobs: Sequence[float], temperature: float) -> OptionProbabilities:
    """Return the distribution among options of these log-probabilities. Raises `EngineFailed` where all are impossible."""
    if not math.isfinite(max(logprobs)):
        raise EngineFailed(Failed("", NonFiniteLogits.code, "the model gave no option a probability"))
    mass = min(1.0, math.fsum(map(math.exp, logprobs)))
    return OptionProbabilities(softmax(logprobs, temperature), mass)


def answer_of(question: Question, probabilities: Sequence[float]) -> Mapping[str, Any]:
    """Return the fields of `Answer` in the types of the `openai` package."""
    named = {"type": question.type, "name": question.name}
    if isinstance(question, PredicateQuestion):
        return named | {"probability": probabilities[0]}
    count = len(probabilities)
    if isinstance(question, ChoiceQuestion):
        pairs = list(zip((each.value for each in question.choices), probabilities, strict=True))
        choice, top = max(pairs, key=lambda pair: pair[1])
        return named | {
            "choice": choice,
            "confidence": max(0.0, (top - 1 / count) / (1 - 1 / count)),
            "probabilities": [{"value": value, "probability": each} for value, each in pairs],
        }
    score = math.fsum(level * each for level, each in enumerate(probabilities))
    variance = math.fsum((level - score) ** 2 * each for level, each in enumerate(probabilities))
    return named | {
        "score": score,
        "confidence": max(0.0, 1 - math.sqrt(variance) / ((count - 1) / 2)),
        "probabilities": [
            {"label": level.label, "value": value, "probability": each}
            for value, (level, each) in enumerate(zip(question.levels, probabilities, strict=True))
        ],
    }
