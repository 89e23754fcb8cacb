"""`Sequence`: one choice of one request, from arrival to its last token; `RequestChoices`: all sequences of one request.

Invariant: `block_table` holds the KV of `token_ids[:num_computed_tokens]`. Launched steps compute the next `num_in_flight`
tokens; the rest is unplanned. The first sequence's prompt is computed before its siblings start.
"""

import math
import sys
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from loraplex.engine.batch.block_hash import HashChain
from loraplex.engine.messages import NO_CAUSES, AdapterRef, EngineRequest, FinishReason, WaitCauses
from loraplex.engine.sequence_scores import SequenceScores
from loraplex.engine.token_mask import TokenMask


class SequenceStatus(Enum):
    """WAITING covers new, preempted and sibling sequences. LOADING sequences wait for their adapter outside the batch."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one row. Only the scheduler changes it; the runner reads what the plan carries.

    `order` numbers sequences by submission: the lowest is the oldest. `planned_block_table` is `block_table` frozen.
    `awaits_mask`: its mask was not ready when its logits were; it is planned again once the mask is. `mask_seconds` is the
    recent cost of its masks, `matcher_seconds` all time its grammar used on the step thread, `closing_seconds` the time
    spent searching for a way to close. That search runs when at most `closing_due` tokens may still come. `num_unknown` is
    1 while a launched step samples a token that is not in `token_ids` yet. Rows planned in an earlier `epoch` are dropped.
    `num_launched` counts its rows that are not completed, `num_departures` the pins they still need. `num_prefilled_tokens`
    are the prompt tokens that were computed or found in the cache before it left the batch, also if they are recomputed.
    `queued_at`: when it could first have run since it was last in the batch; infinite while it runs. `grammar_s` and
    `adapter_s`: seconds that it waited for its grammar, and then for its adapter and a place for it, before its first step;
    `causes`: of its waits. `scores` None: it scores no tokens; the last `num_continuation_tokens` of its prompt are scored ones
    that its siblings do not share. `admitted_when_queued`: how many sequences had been admitted when it first waited for a row.
    `leads`: it is the first choice of its request that runs, whose prompt its siblings share.
    """

    request: EngineRequest
    choice: int
    arrival: float
    seed: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefilled_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stopped_by: int | None = None
    num_preemptions: int = 0
    was_displaced: bool = False
    token_mask: TokenMask | None = None
    awaits_mask: bool = False
    mask_seconds: float | None = None
    matcher_seconds: float = 0.0
    closing_seconds: float = 0.0
    closing_due: int = sys.maxsize
    order: int = 0
    hash_chain: HashChain | None = None
    num_registered_blocks: int = 0
    num_in_flight: int = 0
    num_unknown: int = 0
    num_launched: int = 0
    num_departures: int = 0
    epoch: int = 0
    planned_block_table: tuple[int, ...] = ()
    queued_at: float = math.inf
    adapter_wait_since: float | None = None
    grammar_s: float = 0.0
    adapter_s: float = 0.0
    causes: WaitCauses = NO_CAUSES
    admitted_when_queued: int | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    scores: SequenceScores | None = None
    num_continuation_tokens: int = 0
    leads: bool = True

    @property
    def writes(self) -> bool:
        """Whether it samples tokens; otherwise it only scores, and takes no place of one that writes."""
        return self.request.sampling.max_tokens > 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.num_continuation_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Tokens that are computed or planned in a launched step."""
        return self.num_computed_tokens + self.num_in_flight

    @property
    def num_expected_tokens(self) -> int:
        """Known tokens, and the one being sampled."""
        return len(self.token_ids) + self.num_unknown

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that no step has been launched for."""
        return self.num_expected_tokens - self.num_planned_tokens

    @property
    def is_past_prompt(self) -> bool:
        """Whether only output remains to be planned."""
        return self.num_planned_tokens >= self.num_prompt_tokens

    @property
    def queue_s(self) -> float:
        """Seconds from arrival to the first step; 0 before it."""
        return 0.0 if self.admitted_at is None else self.admitted_at - self.arrival

    @property
    def prefill_s(self) -> float:
        """Seconds from the first step to the first token; 0 before it."""
        if self.admitted_at is None or self.first_token_at is None:
            return 0.0
        return self.first_token_at - self.admitted_at

    def note(self, **causes: Any) -> None:
        """Record why it waits, by fields of `WaitCauses`. Does nothing once it has run."""
        if self.admitted_at is None:
            self.causes = msgspec.structs.replace(self.causes, **causes)

    @property
    def adapter(self) -> AdapterRef | None:
        return self.request.adapter

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(slots=True)
class RequestChoices:
    """All choices of a request. `siblings` are not queued yet; `admitted` is set once any choice has run."""

    sequences: list[Sequence]
    siblings: list[Sequence]
    admitted: bool = False

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.status is not SequenceStatus.FINISHED]

    @property
    def has_token(self) -> bool:
        """Whether a choice has a token here."""
        return any(sequence.first_token_at is not None for sequence in self.sequences)

    def take_siblings(self) -> list[Sequence]:
        """Return the siblings that have not ended; the caller queues them like any other sequence."""
        siblings, self.siblings = self.siblings, []
        return [s for s in siblings if s.status is not SequenceStatus.FINISHED]
