"""`Scheduler`: continuous batching (Orca) with chunked prefill (Sarathi-Serve) and preemption by recompute.

Invariant: every limit of a step is enforced here, where its plan is built; the oldest running sequence always
progresses; every sequence added ends exactly once, with its blocks, pin and place given back.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from loraplex.engine.adapter_gate import AdapterGate
from loraplex.engine.admission import Admission, DeadlineKind, Deadlines, new_sequences
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.errors import (
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    NonFiniteLogits,
    NothingAllowed,
    RequestTimeout,
)
from loraplex.engine.fairness import Policy
from loraplex.engine.lora.residency import AdapterResidency
from loraplex.engine.messages import EngineRequest, FinishReason
from loraplex.engine.plan import PlannedRow, SampledToken, StepOutput, StepPlan
from loraplex.engine.prefix_cache import PrefixCache
from loraplex.engine.sequence import Sequence, SequenceStatus
from loraplex.engine.sequence_blocks import SequenceBlocks
from loraplex.engine.stopping import finish_reason


@dataclass(slots=True)
class _Request:
    """The choices of one request. `siblings` wait for the first choice's prompt; `admitted` once one has run."""

    sequences: list[Sequence]
    siblings: list[Sequence]
    admitted: bool = False


def _order(sequence: Sequence) -> int:
    return sequence.order


def _has_mask(sequence: Sequence) -> bool:
    return sequence.request.grammar is None or sequence.token_mask is not None


class Scheduler:
    """Plans steps and follows their results. Used by one thread, the step loop's; does no I/O and never blocks.

    Call `schedule`, run the plan, call `complete`, and collect `take_failures` after each of them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        residency: AdapterResidency,
        policy: Policy,
        clock: Callable[[], float],
        max_model_len: int,
        eos_token_ids: Collection[int],
        *,
        vocab_size: int = 1 << 32,
        is_ready: Callable[[Sequence], bool] = _has_mask,
    ) -> None:
        """`is_ready` keeps a sequence out of the batch; by default until a grammar's `token_mask` is set."""
        if not 1 <= config.max_num_seqs <= config.max_num_batched_tokens:
            raise ValueError("max_num_seqs must lie in 1..max_num_batched_tokens")
        if config.max_adapters_per_step < 1:
            raise ValueError("max_adapters_per_step must be at least 1")
        self.config = config
        self.cache = cache
        self.num_preemptions = 0
        self.num_rejections = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._block_size = cache.block_size
        self._blocks = SequenceBlocks(cache)
        self._policy = policy
        self._clock = clock
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._is_ready = is_ready
        self._gate = AdapterGate(config, residency, policy, clock)
        self._admission = Admission(max_model_len, cache.pool.total * cache.block_size, vocab_size)
        self._deadlines = Deadlines()
        self._requests: dict[str, _Request] = {}
        self._running: list[Sequence] = []
        self._unready: dict[Sequence, None] = {}
        self._failures: list[tuple[Sequence, EngineError]] = []
        self._num_live = 0
        self._next_order = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not in the batch, those that wait for an adapter, a mask or a sibling included."""
        return self._num_live - len(self._running)

    @property
    def num_waiting_for_adapter(self) -> int:
        return self._gate.num_parked

    @property
    def has_unfinished(self) -> bool:
        return self._num_live > 0

    @property
    def running_adapters(self) -> list[str]:
        """Distinct adapter digests in the batch."""
        return self._gate.running_digests

    @property
    def waiting_adapters(self) -> list[str]:
        """Distinct adapter digests that sequences outside the batch ask for. O(sequences)."""
        sequences = (sequence for request in self._requests.values() for sequence in request.sequences)
        waiting = (SequenceStatus.WAITING, SequenceStatus.LOADING)
        return sorted({s.adapter.digest for s in sequences if s.adapter is not None and s.status in waiting})

    def add(self, request: EngineRequest) -> list[Sequence]:
        """Queue a request and return its choices.

        Raises `InvalidRequest`, `PromptTooLong` or, when `max_waiting` sequences wait, `EngineOverloaded`.
        """
        try:
            self._check(request)
        except EngineError:
            self.num_rejections += 1
            raise
        arrival = self._clock()
        sequences = new_sequences(request, arrival, self._next_order)
        self._deadlines.add(request, self._next_order, arrival)
        self._next_order += len(sequences)
        self._num_live += len(sequences)
        self._requests[request.request_id] = _Request(sequences, sequences[1:])
        self._enqueue(sequences[0])
        return sequences

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        self._expire()
        self._wake()
        preemptions = self.num_preemptions
        rows = self._plan_decodes()
        room = self.num_preemptions == preemptions
        if self.config.chunked_prefill:
            self._plan_chunks(rows, room)
        else:
            prefill = self._plan_whole_prompt(room)
            rows = rows if prefill is None else [prefill]
        return StepPlan(tuple(rows)) if rows else None

    def complete(self, plan: StepPlan, sampled: Mapping[Sequence, SampledToken]) -> list[StepOutput]:
        """Follow an executed plan. Rows that ended while it ran are dropped.

        A row whose logits were not finite, or whose constraints left no token, fails its request; the others go on.
        """
        outputs: list[StepOutput] = []
        for row in plan.rows:
            sequence = row.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            token = sampled[sequence] if row.samples else None
            if token is not None and not token.finite:
                self._fail_row(sequence, token)
                continue
            sequence.num_computed_tokens += len(row.token_ids)
            if sequence.num_computed_tokens // self._block_size != sequence.num_registered_blocks:
                self._blocks.register(sequence)
            if token is not None:
                outputs.append(self._append(sequence, token))
        return outputs

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one choice from outside, for instance at a stop string. Does nothing when it has ended."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.choice == 0:
            request = self._requests[sequence.request_id]
            siblings, request.siblings = request.siblings, []
            for sibling in siblings:
                self._enqueue(sibling)
        self._end(sequence, reason)

    def fail(self, sequence: Sequence, error: EngineError) -> None:
        """End the whole request with `error`. Does nothing when it has ended."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        self._failures.append((sequence, error))
        self.abort(sequence.request_id)

    def abort(self, request_id: str) -> list[Sequence]:
        """End every choice of a request that still runs or waits, and return those. Idempotent."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        live = [s for s in request.sequences if s.status is not SequenceStatus.FINISHED]
        for sequence in live:
            self._end(sequence, "abort")
        return live

    def take_failures(self) -> list[tuple[Sequence, EngineError]]:
        """Requests that failed since the last call: one sequence of each; its siblings have ended with it."""
        failures, self._failures = self._failures, []
        return failures

    def _check(self, request: EngineRequest) -> None:
        if request.request_id in self._requests:
            raise InvalidRequest("request_id", f"`request_id` {request.request_id} is in use")
        self._admission.check(request)
        if self.num_waiting + request.sampling.n > self.config.max_waiting:
            raise EngineOverloaded(f"{self.num_waiting} of at most {self.config.max_waiting} sequences wait")

    def _expire(self) -> None:
        for order, request_id, kind in self._deadlines.due(self._clock()):
            request = self._requests.get(request_id)
            if request is not None and request.sequences[0].order == order:
                self._time_out(request, kind)

    def _time_out(self, request: _Request, kind: DeadlineKind) -> None:
        if kind == "queue_timeout_s" and request.admitted:
            return
        live = [s for s in request.sequences if s.status is not SequenceStatus.FINISHED]
        self.fail(live[0], RequestTimeout(f"the request's `{kind}` has passed"))

    def _wake(self) -> None:
        """Queue the sequences whose mask or adapter has come."""
        for sequence in [s for s in self._unready if self._is_ready(s)]:
            del self._unready[sequence]
            self._enqueue(sequence)
        ready, failed = self._gate.advance(self.config.max_num_seqs - len(self._running))
        for sequence in ready:
            sequence.status = SequenceStatus.WAITING
            self._policy.push(sequence)
        for sequence, error in failed:
            self.fail(sequence, error)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        if not self._is_ready(sequence):
            self._unready[sequence] = None
        elif self._gate.admits(sequence):
            self._policy.push(sequence)
        else:
            self._gate.park(sequence)

    def _plan_decodes(self) -> list[PlannedRow]:
        """One token for every sequence whose prompt is computed, oldest first, so that victims are never planned."""
        rows: list[PlannedRow] = []
        running, block_size = self._running, self._block_size
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            start = sequence.num_computed_tokens
            tokens = sequence.token_ids
            if len(tokens) - start != 1:
                continue
            if start // block_size >= len(sequence.block_table) and not self._make_room(sequence):
                break
            table = sequence.planned_block_table
            rows.append(PlannedRow(sequence, start, (tokens[start],), table, sequence.request.adapter, True))
        return rows

    def _plan_chunks(self, rows: list[PlannedRow], room: bool) -> None:
        """Fill the step up to its token budget: prompts begun before, then new ones."""
        budget = self.config.max_num_batched_tokens - len(rows)
        for sequence in self._running:
            if budget > 0 and sequence.num_uncomputed_tokens > 1:
                budget -= self._plan_prefill(rows, sequence, budget)
        while room and budget > 0:
            admitted = self._admit_next()
            if admitted is None:
                return
            budget -= self._plan_prefill(rows, admitted, budget)

    def _plan_whole_prompt(self, room: bool) -> PlannedRow | None:
        begun = next((s for s in self._running if s.num_uncomputed_tokens > 1), None)
        if begun is None and room:
            begun = self._admit_next()
        return None if begun is None else PlannedRow.of(begun, begun.num_uncomputed_tokens)

    def _plan_prefill(self, rows: list[PlannedRow], sequence: Sequence, budget: int) -> int:
        count = min(budget, sequence.num_uncomputed_tokens)
        rows.append(PlannedRow.of(sequence, count))
        return count

    def _admit_next(self) -> Sequence | None:
        """Move the policy's next sequence into the batch; None when no slot or too few blocks are free."""
        if len(self._running) >= self.config.max_num_seqs:
            return None
        sequence = self._policy.peek()
        while sequence is not None and not self._gate.admits(sequence):
            self._policy.remove(sequence)
            self._gate.park(sequence)
            sequence = self._policy.peek()
        if sequence is None or not self._blocks.open(sequence, len(self._running)):
            return None
        self._policy.remove(sequence)
        self._gate.enter(sequence)
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=_order)
        self._account(sequence)
        return sequence

    def _account(self, sequence: Sequence) -> None:
        """Count the first admission of a choice; recomputation after a preemption is nobody's service."""
        request = self._requests[sequence.request_id]
        if not request.admitted:
            request.admitted = True
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.prefix_cache_queries += sequence.num_prompt_tokens
            self.prefix_cache_hits += sequence.num_computed_tokens
        if sequence.admitted_at is None:
            sequence.admitted_at = self._clock()
        if not sequence.num_preemptions:
            self._policy.charge_prompt(sequence, sequence.num_uncomputed_tokens)

    def _make_room(self, sequence: Sequence) -> bool:
        """One more block for a decode, preempting the newest as needed; False when that is the sequence itself."""
        while not self._blocks.grow(sequence):
            if self._blocks.reclaim():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.pop()
        self._blocks.close(sequence)
        self._gate.leave(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    def _fail_row(self, sequence: Sequence, token: SampledToken) -> None:
        if token.nothing_allowed:
            self.fail(sequence, NothingAllowed("the constraints of this request allow no next token"))
            return
        self._blocks.forget(sequence)
        self.fail(sequence, NonFiniteLogits("the model's output for this request was not finite"))

    def _append(self, sequence: Sequence, token: SampledToken) -> StepOutput:
        if sequence.num_output_tokens == 0:
            sequence.first_token_at = self._clock()
            if sequence.choice == 0:
                self._release_siblings(sequence)
        sequence.token_ids.append(token.token_id)
        self._policy.charge_output(sequence, 1)
        reason = finish_reason(sequence, self._eos_token_ids, self._max_model_len)
        first = sequence.num_output_tokens == 1
        if reason is not None:
            self._end(sequence, reason)
        return StepOutput(sequence, token.token_id, token.logprob, reason, first)

    def _release_siblings(self, first: Sequence) -> None:
        """Let the other choices queue, holding the full blocks of the common prompt."""
        request = self._requests[first.request_id]
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            if sibling.status is SequenceStatus.FINISHED:
                continue
            self._blocks.fork(first, sibling)
            self._enqueue(sibling)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Give back everything a sequence holds, wherever it is."""
        if sequence.status is SequenceStatus.RUNNING:
            del self._running[bisect_left(self._running, sequence.order, key=_order)]
            self._gate.leave(sequence)
        else:
            self._policy.remove(sequence)
            self._gate.discard(sequence)
            self._unready.pop(sequence, None)
        self._blocks.close(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._num_live -= 1
        request = self._requests[sequence.request_id]
        if all(other.status is SequenceStatus.FINISHED for other in request.sequences):
            del self._requests[sequence.request_id]
