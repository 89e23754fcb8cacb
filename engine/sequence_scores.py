"""`SequenceScores`: the positions of one sequence whose next token is scored, and the scores so far.

Invariant: positions are scored in their order, each once, also when a preempted sequence is computed again.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from loraplex.engine.messages import EngineRequest, ScoreRequest, TokenScore

_POSITION = attrgetter("position")


@dataclass(frozen=True, slots=True)
class ScoredPosition:
    """`token_ids` are scored as the successor of the token at `position`.

    `top` None: they are given. Else the first is the prompt's own: it gets a rank and so many of the likeliest tokens.
    """

    position: int
    token_ids: tuple[int, ...]
    top: int | None = None


@dataclass(frozen=True, slots=True)
class PositionScore:
    """Results in nats. `logprobs`: of `token_ids`; `rank` of the first; `top`, best first: as many as the target's `top`."""

    target: ScoredPosition
    logprobs: list[float]
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SequenceScores:
    """Made by `scores_of` for each sequence that scores."""

    def __init__(self, targets: list[ScoredPosition], with_prompt: bool = False) -> None:
        """`targets` in the order of their positions. `with_prompt`: the prompt's own tokens are among them."""
        self._targets = targets
        self._with_prompt = with_prompt
        self._results: list[PositionScore] = []

    @property
    def next_position(self) -> int | None:
        """The first position that is not scored yet; None once all are."""
        known = len(self._results)
        return self._targets[known].position if known < len(self._targets) else None

    def within(self, start: int, stop: int) -> tuple[ScoredPosition, ...]:
        """The positions in `start ... stop - 1` that are not scored yet."""
        first = max(len(self._results), bisect_left(self._targets, start, key=_POSITION))
        return tuple(self._targets[first : bisect_left(self._targets, stop, key=_POSITION)])

    def add(self, results: Iterable[PositionScore]) -> None:
        """Add the results of the next positions."""
        self._results += results

    @property
    def prompt(self) -> list[TokenScore] | None:
        """The prompt's own tokens from the second on; None unless they are scored."""
        if not self._with_prompt:
            return None
        own = (result for result in self._results if result.target.top is not None)
        return [
            TokenScore(each.target.token_ids[0], each.logprobs[0], list(each.top), each.rank) for each in own
        ]

    @property
    def token_ids(self) -> dict[int, list[float]]:
        """Log-probabilities of the given tokens by position."""
        return {
            each.target.position: each.logprobs[each.target.top is not None :]
            for each in self._results
            if len(each.logprobs) > (each.target.top is not None)
        }


def scores_of(request: EngineRequest, choice: int) -> SequenceScores | None:
    """Return what a choice scores. The prompt is scored by the first one."""
    wanted = request.scores
    if wanted is None or (choice and not wanted.continuations):
        return None
    if wanted.continuations:
        begin, tokens = len(request.prompt_token_ids) - 1, wanted.continuations[choice]
        targets = [ScoredPosition(begin + index, (token,)) for index, token in enumerate(tokens)]
        if wanted.ending_ids:
            targets.append(ScoredPosition(begin + len(tokens), tuple(wanted.ending_ids)))
        return SequenceScores(targets)
    return SequenceScores(_in_prompt(request.prompt_token_ids, wanted), wanted.prompt_logprobs is not None)


def _in_prompt(prompt: list[int], wanted: ScoreRequest) -> list[ScoredPosition]:
    given = {position: tuple(ids) for position, ids in sorted(wanted.token_ids.items()) if ids}
    top = wanted.prompt_logprobs
    if top is None:
        return [ScoredPosition(position, ids) for position, ids in given.items()]
    own = [
        ScoredPosition(position, (token, *given.get(position, ())), top)
        for position, token in enumerate(prompt[1:])
    ]
    last = len(prompt) - 1
    return [*own, ScoredPosition(last, given[last])] if last in given else own
