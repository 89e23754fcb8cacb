"""`StepPlan`: one mixed step of prefill chunks and decodes (Orca; Sarathi-Serve); `StepRows` collects its rows.

Invariant: a plan is complete and immutable, and every limit is enforced where it is built. Chunks fit the token budget that
decodes leave, and follow every decoding row: how a row is computed does not depend on the others.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.errors import EngineError, NonFiniteLogits, NothingAllowed
from loraplex.engine.messages import AdapterRef, FinishReason, TokenLogprob
from loraplex.engine.sequence_scores import PositionScore, ScoredPosition

NO_TOKEN = -1
NO_SCORES: Final[tuple[ScoredPosition, ...]] = ()

UNKNOWN_TOKEN = -1
"""Placeholder for a token that the previous step still has to sample; the runner finds it on the device."""

MAX_DECODES = 32
"""Most tokens of one row that decode side by side: each reads the whole context."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One sequence's part of a step: `token_ids` at positions `start ... start + len - 1`, all covered by `block_table`.

    `samples`: the row's last token is the sequence's last, so that its logits choose the next token. A row of one token may
    hold `UNKNOWN_TOKEN`. `scores`: positions in it whose next token is scored. A row whose `epoch` is not the sequence's any
    more is dropped.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    adapter: AdapterRef | None
    samples: bool
    epoch: int = 0
    scores: tuple[ScoredPosition, ...] = NO_SCORES

    @property
    def stop(self) -> int:
        """The position after the row's last token."""
        return self.start + len(self.token_ids)

    @property
    def is_live(self) -> bool:
        """Whether the sequence still runs in the epoch of the row."""
        return self.epoch == self.sequence.epoch and self.sequence.status is SequenceStatus.RUNNING

    @property
    def decodes(self) -> bool:
        """Whether its tokens, all of a response, decode each on its own; otherwise they are a chunk."""
        return self.start >= self.sequence.num_prompt_tokens

    @classmethod
    def of(cls, sequence: Sequence, most: int | None = None) -> "PlannedRow":
        """Return a row of the next uncomputed tokens of a sequence, all of them known, at most `most`.

        It ends with the prompt, or after `MAX_DECODES` tokens of the response: the response of a preempted sequence is
        recomputed by the kernels that computed it first.
        """
        start, rest = sequence.num_planned_tokens, sequence.num_uncomputed_tokens
        prompt = sequence.num_prompt_tokens - start
        count = min(rest, prompt if prompt > 0 else MAX_DECODES, rest if most is None else most)
        stop = start + count
        return cls(
            sequence,
            start,
            tuple(sequence.token_ids[start:stop]),
            sequence.planned_block_table,
            sequence.request.adapter,
            sequence.writes and stop == len(sequence.token_ids),
            sequence.epoch,
            NO_SCORES if sequence.scores is None else sequence.scores.within(start, stop),
        )

    def resolved(self) -> "PlannedRow":
        """Return the row with its unknown token filled in, once every earlier step is completed."""
        return replace(self, token_ids=tuple(self.sequence.token_ids[self.start : self.stop]))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step: decoding rows first (one token, or several that a grammar forced), then chunks.

    At most one row per sequence.
    """

    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The runner's result for a row that samples or scores. `token_id` is `NO_TOKEN` if it only scores.

    `finite` false: the row's logits held NaN or infinity.
    `nothing_allowed`: the model is not at fault; the request's grammar and other constraints left no token. `error`: the
    row has no mask and will get none. In all these cases `finite` is false and there is no token.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    finite: bool = True
    nothing_allowed: bool = False
    error: EngineError | None = None
    scores: tuple[PositionScore, ...] = ()

    @property
    def is_missing(self) -> bool:
        """Whether there is no token although nothing failed."""
        return self.finite and self.token_id == NO_TOKEN

    @property
    def failure(self) -> EngineError:
        """The error of a row without a token. Not used when `finite`."""
        if self.error is not None:
            return self.error
        if self.nothing_allowed:
            return NothingAllowed("the constraints of this request allow no next token")
        return NonFiniteLogits("the model's output for this request was not finite")


NOT_SAMPLED = SampledToken(NO_TOKEN)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One token of one sequence. `first` marks the choice's first token, `finish_reason` its last one.

    `token_id` is `NO_TOKEN` for a sequence that has scored everything and writes nothing.
    """

    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
    first: bool


def step_outputs(
    sequence: Sequence,
    token_ids: list[int],
    logprob: TokenLogprob | None,
    reason: FinishReason | None,
    first: bool,
) -> list[StepOutput]:
    """One output per token. `logprob` and `first` are the first one's, `reason` is the last one's."""
    if len(token_ids) == 1:
        return [StepOutput(sequence, token_ids[0], logprob, reason, first)]
    between = [StepOutput(sequence, token_id, None, None, False) for token_id in token_ids[1:-1]]
    last = StepOutput(sequence, token_ids[-1], None, reason, False)
    return [StepOutput(sequence, token_ids[0], logprob, None, first), *between, last]


class StepRows:
    """Collects the rows of a step: first single tokens, then chunks, in the order in which they get their share."""

    def __init__(self, max_tokens: int, score_cost: float = 0.0) -> None:
        """`score_cost`: what scoring a position costs, in computed tokens."""
        self._budget = max_tokens
        self._score_cost = score_cost
        self._decodes: list[PlannedRow] = []
        self._chunks: list[PlannedRow] = []

    @property
    def is_full(self) -> bool:
        return self._budget <= 0

    def add_last(self, sequence: Sequence) -> None:
        """Add the one uncomputed token: a response's last, known or not, or the last of a prompt without response."""
        start, request = sequence.num_computed_tokens + sequence.num_in_flight, sequence.request
        token = UNKNOWN_TOKEN if sequence.num_unknown else sequence.token_ids[start]
        table = sequence.planned_block_table
        writes, scores = True, NO_SCORES
        if sequence.scores is not None:
            writes, scores = sequence.writes, sequence.scores.within(start, start + 1)
        row = PlannedRow(sequence, start, (token,), table, request.adapter, writes, sequence.epoch, scores)
        (self._decodes if start >= sequence.num_prompt_tokens else self._chunks).append(row)
        self._budget -= 1

    def add_chunks(self, sequences: Iterable[Sequence]) -> None:
        """Add as many uncomputed tokens of each as fit; nothing for sequences after the budget is spent."""
        for sequence in sequences:
            if self.is_full:
                return
            row = PlannedRow.of(sequence, self._budget)
            cost = self._cost(row)
            if cost > self._budget:
                row = PlannedRow.of(sequence, max(1, int(len(row.token_ids) * self._budget / cost)))
                cost = self._cost(row)
            (self._decodes if row.decodes else self._chunks).append(row)
            self._budget -= math.ceil(cost)

    def _cost(self, row: PlannedRow) -> float:
        """Return what a row takes of a step's tokens."""
        return len(row.token_ids) + self._score_cost * len(row.scores)

    def plan(self) -> StepPlan | None:
        """Return the plan, or None when there is no row."""
        rows = (*self._decodes, *self._chunks)
        return StepPlan(rows) if rows else None


def by_urgency(
    begun: list[Sequence], oldest: Sequence | None, rank: Callable[[Sequence], tuple[float, int]]
) -> list[Sequence]:
    """Order by urgency: the oldest, since it must always progress; then responses with forced tokens, whose clients are
    waiting; then prompts by the policy's `rank`.
    """

    def urgency(sequence: Sequence) -> tuple[bool, float, int]:
        if sequence is oldest or sequence.is_past_prompt:
            return (False, 0.0, 0)
        return (True, *rank(sequence))

    return sorted(begun, key=urgency)
