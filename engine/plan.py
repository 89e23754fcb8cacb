"""`StepPlan`: one mixed step of prefill chunks and decodes (Orca; Sarathi-Serve), made by the scheduler, executed by the runner.

Invariant: a plan is complete and immutable; the runner needs nothing else, and every limit was enforced where it was built.
"""

from dataclasses import dataclass

from loraplex.engine.messages import AdapterRef, FinishReason, TokenLogprob
from loraplex.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """`token_ids` are the tokens at positions `start ... start + len - 1`; `block_table` covers them all.

    `samples` is true when the row's last token is the last one known, so that its logits choose the next.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    adapter: AdapterRef | None
    samples: bool

    @classmethod
    def of(cls, sequence: Sequence, count: int) -> "PlannedRow":
        """The next `count` uncomputed tokens of a sequence."""
        start = sequence.num_computed_tokens
        tokens = sequence.token_ids
        stop = start + count
        table = sequence.planned_block_table
        return cls(
            sequence, start, tuple(tokens[start:stop]), table, sequence.request.adapter, stop == len(tokens)
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decodes come first, prefill chunks after them; at most one row per sequence."""

    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the runner returns for a sampling row. `finite` false: the row's logits held NaN or infinity.

    With `nothing_allowed` the model is innocent: the request's grammar and other constraints left no token.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    finite: bool = True
    nothing_allowed: bool = False


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One token of one sequence. `first` marks the choice's first token, `finish_reason` its last one."""

    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
    first: bool
