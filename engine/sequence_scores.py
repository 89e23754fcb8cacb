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
    top: list[tuple[int, float]]


class SequenceScores:
    """Made by `scores_of` for each sequence that scores.

    `prompt`: the prompt's own tokens from the second on; None unless they are scored. `token_ids`: log-probabilities of the
    given tokens by position.
    """

    def __init__(self, targets: list[ScoredPosition], with_prompt: bool = False) -> None:
        """`targets` in the order of their positions. `with_prompt`: the prompt's own tokens are among them."""
        self.targets = targets
        self.prompt: list[TokenScore] | None = [] if with_prompt else None
        self.token_ids: dict[int, list[float]] = {}
        self._num_known = 0

    @property
    def next_position(self) -> int | None:
        """The first position that is not scored yet; None once all are."""
        return self.targets[self._num_known].position if self._num_known < len(self.targets) else None

    def within(self, start: int, stop: int) -> tuple[ScoredPosition, ...]:
        """The positions in `start ... stop - 1` that are not scored yet."""
        first = max(self._num_known, bisect_left(self.targets, start, key=_POSITION))
        return tuple(self.targets[first : bisect_left(self.targets, stop, key=_POSITION)])

    def add(self, results: Iterable[PositionScore]) -> None:
        """Add the results of the next positions."""
        for result in results:
            self._num_known += 1
            target, given = result.target, result.logprobs
            if target.top is not None and self.prompt is not None:
                self.prompt.append(TokenScore(target.token_ids[0], given[0], result.top, result.rank))
                given = given[1:]
            if given:
                self.token_ids[target.position] = given


def scores_of(request: EngineRequest, choice: int) -> SequenceScores | None:
    """Return what a choice scores. The prompt is scored by the first one."""
    wanted = request.scores
    if wanted is None or (choice and not wanted.continuations):
        return None
    if wanted.continuations:
        begin, tokens = len(request.prompt_token_ids) - 1, request.continuation(choice)
        targets = [ScoredPosition(begin + index, (token,)) for index, token in enumerate(tokens)]
        if wanted.ending_ids:
            targets.append(ScoredPosition(begin + len(tokens), tuple(wanted.ending_ids)))
        return SequenceScores(targets)
    return SequenceScores(_in_prompt(request.prompt_token_ids, wanted), wanted.prompt_logprobs is not None)


def _in_prompt(prompt: list[int], wanted: ScoreRequest) -> list[ScoredPosition]:
    top, given = wanted.prompt_logprobs, {position: ids for position, ids in wanted.token_ids.items() if ids}
    own = {} if top is None else {position: [token] for position, token in enumerate(prompt[1:])}
    return [
        ScoredPosition(
            position, (*own.get(position, ()), *given.get(position, ())), top if position in own else None
        )
        for position in sorted(own.keys() | given.keys())
    ]
