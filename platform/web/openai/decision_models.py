"""The response of `/v1/decisions` (OpenAI Decisions API), as its OpenAPI document has it."""

from typing import Literal

from loraplex.platform.web.openai.responses.models import ResponseUsage
from loraplex.platform.web.responses import ResponseModel


class PredicateAnswer(ResponseModel):
    """`probability`: that the statement is true."""

    type: Literal["predicate"]
    name: str | None
    probability: float


class OptionProbability(ResponseModel):
    """Of one choice, by its value."""

    value: str | bool
    probability: float


class ChoiceAnswer(ResponseModel):
    """`choice`: the likeliest one. `confidence`: how concentrated the probabilities are, 0 where all are alike, 1 where one is sure."""

    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[OptionProbability]


class LevelProbability(ResponseModel):
    """Of one level; `value` counts from 0."""

    label: str
    value: int
    probability: float


class ScoreAnswer(ResponseModel):
    """`score`: the expected level. `confidence`: as of a choice, by the spread around it."""

    type: Literal["score"]
    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class DecisionResponse(ResponseModel):
    """The answers in the order of the questions. `usage`: for each adapter the input once, and its questions; nothing is generated."""

    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    model: str
    usage: ResponseUsage
