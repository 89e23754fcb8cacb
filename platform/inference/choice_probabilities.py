"""The probability of each text that `structured_outputs.choice` allows, from the model's own distribution.

Invariant: a choice is scored as the tokenizer encodes it behind the prompt, and with the end: log-probabilities of its tokens,
then that of any end token. The probabilities of all choices add up to 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.engine.messages import Scored, ScoreRequest
from loraplex.engine.sampling_params import MAX_CHOICES
from loraplex.grammar.constraints import Choice
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.parameters.request_models import GenerationBody

PARAM: Final = "structured_outputs.probabilities"
MAX_BYTES: Final = 16_384
"""Of all choices, in UTF-8. A token has at least one byte."""


@dataclass(frozen=True, slots=True)
class ChoiceProbability:
    """One of the allowed choices. `logprob` in nats: of the text and its end; `probability` among the choices."""

    text: str
    logprob: float
    probability: float


@dataclass(frozen=True, slots=True)
class ScoredChoices:
    """The choices of a request, each once, and their tokens."""

    texts: list[str]
    scores: ScoreRequest

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.scores.continuations))

    def probabilities(self, events: list[Scored]) -> list[ChoiceProbability]:
        """Return the choices in the order of the request; `events` are those of one prompt, in any order."""
        logprobs = [logprob_of(event) for event in sorted(events, key=lambda event: event.choice)]
        total = sum_of_logs(logprobs)
        pairs = zip(self.texts, logprobs, strict=True)
        return [ChoiceProbability(text, value, math.exp(value - total)) for text, value in pairs]


def scored_choices(
    values: GenerationBody, encode: Callable[[str], list[int]], text_of: TokenText, ending_ids: list[int]
) -> ScoredChoices | None:
    """Return the choices to score; None for a request that does not ask. Raises `InvalidParameter`.

    `encode` encodes a text that follows others.
    """
    structure = values.structured_outputs
    if structure is None or not structure.probabilities or not isinstance(structure.format, Choice):
        return None
    texts = list(dict.fromkeys(structure.format.options))
    if len(texts) > MAX_CHOICES or sum(len(text.encode()) for text in texts) > MAX_BYTES:
        raise InvalidParameter(
            f"`{PARAM}` allows at most {MAX_CHOICES} choices of {MAX_BYTES} bytes in all.", param=PARAM
        )
    continuations = [continuation_of(text, encode, text_of) for text in texts]
    return ScoredChoices(texts, ScoreRequest(continuations=continuations, ending_ids=ending_ids))


def continuation_of(
    text: str, encode: Callable[[str], list[int]], text_of: TokenText, param: str = PARAM
) -> list[int]:
    """Encode a choice. Some tokenizers begin a text with a blank of their own: then it is encoded behind a line break."""
    for before in ("", "\n"):
        ids = encode(before + text)
        for begin in range(min(len(ids), 4)):
            if b"".join(text_of(token)[1] for token in ids[begin:]) == text.encode():
                return ids[begin:]
    raise InvalidParameter(f"`{param}`: the tokenizer cannot write the choice {text[:64]!r}.", param=param)


def logprob_of(event: Scored) -> float:
    """Return the log-probability of a scored text with its end."""
    *tokens, ends = (values for _, values in sorted(event.token_ids.items()))
    return sum(values[0] for values in tokens) + sum_of_logs(ends)


def sum_of_logs(logprobs: Sequence[float]) -> float:
    """Return the logarithm of the sum of probabilities."""
    most = max(logprobs)
    if most == -math.inf:
        return most
    return most + math.log(sum(math.exp(value - most) for value in logprobs))
