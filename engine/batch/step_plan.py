"""`StepPlan`: one mixed step of prefill chunks and decodes (Orca; Sarathi-Serve); `StepRows` collects its rows while it is planned.

Invariant: a plan is complete and immutable, and every limit is enforced where it is built. Chunks never exceed what decodes
leave of the token budget, and follow every decoding row: how a row is computed does not depend on the others.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.errors import EngineError, NonFiniteLogits, NothingAllowed
from loraplex.engine.messages import AdapterRef, FinishReason, TokenLogprob

UNKNOWN_TOKEN = -1
"""In place of a token that the step before is still to sample: the runner finds it on the device."""

MAX_DECODES = 32
"""Tokens of one row that decode side by side; each reads the whole context, which a longer chunk reads once."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """`token_ids` are the tokens at positions `start ... start + len - 1`; `block_table` covers them all.

    `samples` is true when the row's last token is the last one there is, so that its logits choose the next. A row of one
    token may hold `UNKNOWN_TOKEN`. `epoch` is the sequence's: in a later one the row counts for nothing.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    adapter: AdapterRef | None
    samples: bool
    epoch: int = 0

    @property
    def stop(self) -> int:
        """The position behind the row's last token."""
        return self.start + len(self.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether its tokens, all of an answer, decode each on its own; they are a chunk otherwise."""
        return self.start >= self.sequence.num_prompt_tokens and len(self.token_ids) <= MAX_DECODES

    @classmethod
    def of(cls, sequence: Sequence, count: int) -> "PlannedRow":
        """The next `count` uncomputed tokens of a sequence, all of them known."""
        start = sequence.num_planned_tokens
        stop = start + count
        return cls(
            sequence,
            start,
            tuple(sequence.token_ids[start:stop]),
            sequence.planned_block_table,
            sequence.request.adapter,
            stop == len(sequence.token_ids),
            sequence.epoch,
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows that decode come first, of one token or of several that a grammar forced, chunks after them.

    At most one row per sequence.
    """

    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the runner returns for a sampling row. `finite` false: the row's logits held NaN or infinity.

    With `nothing_allowed` the model is innocent: the request's grammar and other constraints left no token. `error` is
    set when there is no mask for the row and will be none. Not `finite` and no token in all these cases.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    finite: bool = True
    nothing_allowed: bool = False
    error: EngineError | None = None

    @property
    def failure(self) -> EngineError:
        """Why there is no token. Of a token that is `finite` nobody asks."""
        if self.error is not None:
            return self.error
        if self.nothing_allowed:
            return NothingAllowed("the constraints of this request allow no next token")
        return NonFiniteLogits("the model's output for this request was not finite")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One token of one sequence. `first` marks the choice's first token, `finish_reason` its last one."""

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
    """Single tokens are added first, then several of a row, in the order in which they are to get their share."""

    def __init__(self, max_tokens: int) -> None:
        self._budget = max_tokens
        self._decodes: list[PlannedRow] = []
        self._chunks: list[PlannedRow] = []

    @property
    def is_full(self) -> bool:
        return self._budget <= 0

    def add_last(self, sequence: Sequence) -> None:
        """The one token that is not computed yet: of the answer, known or not, or the last of a prompt without an answer."""
        start, request = sequence.num_computed_tokens + sequence.num_in_flight, sequence.request
        token = UNKNOWN_TOKEN if sequence.num_unknown else sequence.token_ids[start]
        table = sequence.planned_block_table
        row = PlannedRow(sequence, start, (token,), table, request.adapter, True, sequence.epoch)
        (self._decodes if start >= len(request.prompt_token_ids) else self._chunks).append(row)
        self._budget -= 1

    def add_chunks(self, sequences: Iterable[Sequence]) -> None:
        """For each as many of its uncomputed tokens as fit; nothing for those that come after the budget is spent."""
        for sequence in sequences:
            if self.is_full:
                return
            count = min(self._budget, sequence.num_uncomputed_tokens)
            row = PlannedRow.of(sequence, count)
            (self._decodes if row.decodes else self._chunks).append(row)
            self._budget -= count

    def plan(self) -> StepPlan | None:
        """None when there is no row."""
        rows = (*self._decodes, *self._chunks)
        return StepPlan(rows) if rows else None


def by_urgency(begun: list[Sequence], oldest: Sequence | None) -> list[Sequence]:
    """The oldest first, since it must always progress; then answers with forced tokens, whose readers wait; then prompts."""
    return sorted(begun, key=lambda sequence: sequence is not oldest and not sequence.is_past_prompt)
