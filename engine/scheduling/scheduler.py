"""`Scheduler`: continuous batching (Orca) with chunked prefill (Sarathi-Serve) and preemption by recompute.

Invariant: every limit of a step is enforced here, where its plan is built. The oldest running sequence always progresses.
Every added sequence ends exactly once, with its blocks, pin and place given back.
"""

from collections.abc import Callable, Collection, Mapping

from loraplex.engine.batch.sequence import RequestChoices, Sequence, SequenceStatus
from loraplex.engine.batch.step_plan import (
    NO_TOKEN,
    NOT_SAMPLED,
    PlannedRow,
    SampledToken,
    StepOutput,
    StepPlan,
    StepRows,
    by_urgency,
    step_outputs,
)
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.errors import (
    EngineError,
    EngineOverloaded,
    GrammarFailed,
    InvalidRequest,
    NonFiniteLogits,
    RequestTimeout,
)
from loraplex.engine.kv_cache.block_table import SequenceBlocks
from loraplex.engine.kv_cache.prefix_cache import PrefixCache
from loraplex.engine.lora.residency import AdapterResidency
from loraplex.engine.messages import BatchLimit, DeadlineKind, EngineRequest, FinishReason, TokenLogprob
from loraplex.engine.scheduling.adapter_scheduler import AdapterScheduler
from loraplex.engine.scheduling.fairness import FairShare
from loraplex.engine.scheduling.grammar_advance import advance_grammar
from loraplex.engine.scheduling.in_flight_steps import InFlightStep, InFlightSteps
from loraplex.engine.scheduling.request_limits import Deadlines, RequestValidator, new_sequences
from loraplex.engine.scheduling.running_batch import RunningBatch
from loraplex.engine.scheduling.stop_conditions import finish_reason
from loraplex.engine.scheduling.unstarted_requests import UnstartedRequests
from loraplex.engine.scheduling.waiting_queue import WaitingQueue


class Scheduler:
    """Plans steps and processes their results. Only the step thread uses it; it does no I/O and never blocks.

    Call `schedule`, run the plan, call `complete`, and collect `take_failures` after each of them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        residency: AdapterResidency,
        policy: FairShare,
        clock: Callable[[], float],
        max_model_len: int,
        eos_token_ids: Collection[int],
        *,
        max_tokens: int,
        vocab_size: int = 1 << 32,
        score_cost: float = 0.0,
    ) -> None:
        """`max_tokens` of a step; a scored position takes `score_cost` of them more.

        A sequence with a grammar stays out of the batch until its `token_mask` is set.
        """
        if not 1 <= config.max_num_seqs <= max_tokens:
            raise ValueError("max_num_seqs must lie in 1..max_num_batched_tokens")
        if config.max_adapters_per_step < 1:
            raise ValueError("max_adapters_per_step must be at least 1")
        self.config = config
        self.max_tokens = max_tokens
        self._score_cost = score_cost
        self.cache = cache
        self.num_rejections = 0
        self.num_forced_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._blocks = SequenceBlocks(cache)
        self._policy = policy
        self._clock = clock
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._adapters = AdapterScheduler(config, residency, policy, clock)
        self._queue = WaitingQueue(policy, self._adapters, config.max_slot_wait_s, clock)
        self._in_flight = InFlightSteps(self._adapters.deactivate)
        self._batch = RunningBatch(
            config, self._blocks, self._adapters, self._in_flight, max_model_len, policy.is_owed
        )
        self._validator = RequestValidator(max_model_len, cache.pool.total * cache.block_size, vocab_size)
        self._deadlines = Deadlines()
        self._requests: dict[str, RequestChoices] = {}
        self._unstarted = UnstartedRequests(config.max_waiting)
        self._failures: list[tuple[Sequence, EngineError]] = []
        self._num_live = 0
        self._next_order = 0
        self._limit: BatchLimit | None = None

    @property
    def num_preemptions(self) -> int:
        return self._batch.num_preemptions

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Sequences outside the batch, including those that wait for an adapter, a mask or a sibling."""
        return self._num_live - len(self._batch)

    @property
    def num_waiting_for_adapter(self) -> int:
        return self._adapters.num_queued

    @property
    def num_waiting_for_grammar(self) -> int:
        return self._queue.num_without_mask

    @property
    def has_unfinished(self) -> bool:
        return self._num_live > 0

    @property
    def running_adapters(self) -> list[str]:
        """Distinct adapter digests in the batch."""
        return self._adapters.running_digests

    @property
    def waiting_adapters(self) -> list[str]:
        """Distinct adapter digests of waiting and loading sequences. O(sequences)."""
        sequences = (sequence for request in self._requests.values() for sequence in request.sequences)
        waiting = (SequenceStatus.WAITING, SequenceStatus.LOADING)
        return sorted({s.adapter.digest for s in sequences if s.adapter is not None and s.status in waiting})

    def unstarted_by_namespace(self) -> dict[bytes, int]:
        """Return the number of requests that no step has begun, by cache namespace. O(tenants)."""
        return self._unstarted.by_namespace()

    def add(self, request: EngineRequest) -> list[Sequence]:
        """Queue a request and return its choices.

        When `max_waiting` sequences wait to begin, the newest requests of the tenant with the most fail. Raises
        `QueueShareExceeded` if that is the tenant of `request`, and `InvalidRequest` or `PromptTooLong`.
        """
        try:
            self._check(request)
            shed = self._unstarted.make_room(request)
        except EngineError:
            self.num_rejections += 1
            raise
        for sequence in shed:
            self.num_rejections += 1
            # Its first choice may have ended, of a request that another engine began.
            self.fail(
                self._requests[sequence.request_id].live[0],
                EngineOverloaded("the queue is full, and this tenant has the most requests in it"),
            )
        arrival = self._clock()
        sequences = new_sequences(request, arrival, self._next_order)
        self._deadlines.add(request, sequences[0].order, arrival)
        self._next_order += request.sampling.n
        self._num_live += len(sequences)
        self._requests[request.request_id] = RequestChoices(sequences, sequences[1:])
        self._unstarted.add(sequences[0])
        self._queue.put(sequences[0])
        return sequences

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None when nothing can run now. One more step may be planned before the last is
        completed.

        A sequence whose token is still being sampled continues with it, unless that token is its last in any case.
        """
        self._expire()
        self._wake()
        self._displace_adapter_for_share()
        self._admit_starved()
        self._admit_for_share()
        self._limit = None
        step = StepRows(self.max_tokens, self._score_cost)
        displaced = self._batch.take_preempted()
        started = self._batch.plan_decodes(step)
        preempted = self._batch.take_preempted()
        for sequence in (*displaced, *preempted):
            self._queue.put(sequence)
        plan = self._fill(step, started, room=not preempted)
        if (displaced or preempted) and not self._batch.num_free:
            self._limit = "rows"
        elif preempted:
            self._limit = "kv_blocks"
        self._queue.stay(self._limit)
        if plan is not None:
            self._in_flight.launch(plan)
        return plan

    def sampling_rows(self, plan: StepPlan) -> list[PlannedRow]:
        """Return the rows of `plan` to sample, once every earlier step is completed."""
        return self._in_flight.sampling_rows(plan)

    def expect(self, plan: StepPlan, sampled: Collection[Sequence], late: Collection[Sequence] = ()) -> None:
        """Record that the sampling of `plan` has started: `sampled` get a token, the masks of `late` were not ready.

        Required before the next step is planned. If a step is completed earlier, its results imply this.
        """
        self._in_flight.expect(plan, sampled, frozenset(late))

    def complete(self, plan: StepPlan, sampled: Mapping[Sequence, SampledToken]) -> list[StepOutput]:
        """Process the results of an executed plan, steps in their order. Rows that ended while it ran are dropped.

        A row whose logits were not finite, or whose constraints left no token, fails its request; the others go on.
        """
        if not self._in_flight.is_expected(plan):
            rows = self._in_flight.sampling_rows(plan)
            unsampled = (r.sequence for r in rows if sampled.get(r.sequence, NOT_SAMPLED).is_missing)
            self.expect(plan, (), list(unsampled))
        step = self._in_flight.complete(plan)
        outputs: list[StepOutput] = []
        for row in plan.rows:
            if self._in_flight.complete_row(step, row):
                outputs += self._complete_row(step, row, sampled.get(row.sequence))
        return outputs

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one choice on request, for instance at a stop string. Does nothing when it has ended."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.leads:
            for sibling in self._requests[sequence.request_id].take_siblings():
                self._queue.put(sibling)
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
        live = request.live
        for sequence in live:
            self._end(sequence, "abort")
        return live

    def of_namespace(self, namespace: bytes) -> list[Sequence]:
        """Return one choice of each of a tenant's requests. O(requests)."""
        live = (request.live[0] for request in self._requests.values())
        return [sequence for sequence in live if sequence.request.namespace == namespace]

    def take_failures(self) -> list[tuple[Sequence, EngineError]]:
        """Return requests that failed since the last call: one sequence of each; its siblings have ended with it."""
        failures, self._failures = self._failures, []
        return failures

    def _check(self, request: EngineRequest) -> None:
        if request.request_id in self._requests:
            raise InvalidRequest("request_id", f"`request_id` {request.request_id} is in use")
        self._validator.check(request)

    def _expire(self) -> None:
        for order, request_id, kind in self._deadlines.due(self._clock()):
            request = self._requests.get(request_id)
            if request is not None and request.sequences[0].order == order:
                self._time_out(request, kind)

    def _time_out(self, request: RequestChoices, kind: DeadlineKind) -> None:
        if kind == "queue_timeout_s":
            if not request.admitted:
                reason = f"no place in the batch was free within the request's `{kind}`; try again later"
                self.fail(request.live[0], EngineOverloaded(reason))
        elif kind == "total_timeout_s" or not request.has_token:
            self.fail(request.live[0], RequestTimeout(f"the request's `{kind}` has passed"))

    def _wake(self) -> None:
        for sequence, error in self._queue.wake(self._batch.num_free):
            self.fail(sequence, error)

    def _displace_adapter_for_share(self) -> None:
        """Give the policy's first sequence whose adapter lacks room the place of an adapter of a tenant with many more.

        Otherwise a tenant with more adapters than places keeps all of them in use, and others wait `max_adapter_wait_s`.
        """
        sequence = self._adapters.take_without_room()
        if sequence is None:
            return
        if self._batch.displace_adapter(sequence, self._adapters.num_coming(sequence.request.namespace)):
            self._adapters.place(sequence)
            self._wake()

    def _admit_starved(self) -> None:
        """Admit a sequence that has waited `max_slot_wait_s` and whose tenant has no row, if necessary in place of others.

        Without this, a tenant with a batch full of long responses would keep all others out until they end. The first by
        policy is never passed over because it does not fit: small prompts would keep a large one out for ever.
        """
        sequence = self._queue.next_starved(self._batch.namespaces)
        if sequence is not None and self._batch.displace(sequence):
            self._leave_queue(sequence)

    def _admit_for_share(self) -> None:
        """Admit the policy's next sequences whose prompts this step can compute: into free rows, then in place of rows of
        tenants that have more of the batch for their weight.

        Otherwise a tenant below its share would wait for a row of another to end, and those end in waves, or for the long
        prompt of another that has begun.
        """
        begun = self._batch.begun_prompts if len(self._policy) else []
        tokens = self.max_tokens - len(self._batch) + len(begun)
        while True:
            sequence = self._queue.next()
            if sequence is None or not sequence.writes or self._tokens_before(sequence, begun) >= tokens:
                return
            join = self._batch.join if self._batch.num_free else self._batch.displace_for_share
            if not join(sequence):
                return
            begun.append(sequence)
            self._leave_queue(sequence)

    def _tokens_before(self, sequence: Sequence, begun: list[Sequence]) -> int:
        """Return the uncomputed tokens of the begun prompts that the policy serves before a sequence."""
        rank = self._policy.rank(sequence)
        return sum(row.num_uncomputed_tokens for row in begun if self._policy.rank(row) < rank)

    def _fill(self, step: StepRows, started: list[Sequence], room: bool) -> StepPlan | None:
        """Complete the step, up to its token budget, with what fits besides its single tokens: first started sequences, then new
        prompts. After a preemption no sequence is admitted, so that the preempted one does not return at once.
        """
        step.add_chunks(by_urgency(started, self._batch.oldest, self._policy.rank) if started else ())
        while room and not step.is_full:
            admitted = self._admit_next()
            if admitted is None:
                return step.plan()
            step.add_chunks((admitted,))
        self._limit = "tokens"
        return step.plan()

    def _admit_next(self) -> Sequence | None:
        """Move the policy's next sequence into the batch; None, and `_limit` set, when no slot or too few blocks are free.

        Rows that only score pass one that waits for a row to write with: such rows may run for minutes.
        """
        sequence = self._queue.next()
        if sequence is not None and sequence.writes and not self._batch.num_free:
            self._limit = "rows"
            sequence = self._queue.next(scoring=True)
        if sequence is None:
            return None
        if not self._batch.has_place(sequence):
            self._limit = "rows"
            return None
        if not self._batch.join(sequence):
            self._limit = "kv_blocks"
            return None
        self._leave_queue(sequence)
        return sequence

    def _leave_queue(self, sequence: Sequence) -> None:
        """Count the first admission of a choice. Recomputation after a preemption is charged to no tenant."""
        self._queue.leave(sequence)
        request = self._requests[sequence.request_id]
        if not request.admitted:
            request.admitted = True
            self._unstarted.discard(sequence.request)
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.prefix_cache_queries += sequence.num_prompt_tokens
            self.prefix_cache_hits += sequence.num_cached_tokens
        if sequence.admitted_at is None:
            sequence.admitted_at = self._clock()
        if not sequence.num_preemptions:
            self._policy.charge_prompt(sequence, sequence.num_uncomputed_tokens)

    def _complete_row(
        self, step: InFlightStep, row: PlannedRow, token: SampledToken | None
    ) -> list[StepOutput]:
        """Process a completed row: its token, if it has one, and full blocks."""
        sequence = row.sequence
        is_lost = self._in_flight.is_lost(step, row)
        if token is not None and not token.finite:
            self._fail_row(sequence, token.failure)
            return []
        if token is not None and sequence.scores is not None:
            sequence.scores.add(token.scores)
        if token is not None and token.is_missing:
            token = None
        known = len(sequence.token_ids)
        try:
            reason = None if token is None else self._append(sequence, token.token_id)
        except GrammarFailed as error:
            self.fail(sequence, error)
            return []
        fresh = len(sequence.token_ids) - known
        if is_lost and not fresh:
            # Logits that gave no token are gone: the row's last token is computed again.
            self._in_flight.forget(sequence)
            sequence.num_computed_tokens -= 1
        if sequence.num_computed_tokens // self._blocks.block_size != sequence.num_registered_blocks:
            self._blocks.register(sequence)
        if not sequence.writes and sequence.num_computed_tokens == known:
            return self._scored(sequence)
        if token is None or not fresh:
            return []
        return self._outputs(sequence, token.logprob, fresh, reason)

    def _scored(self, sequence: Sequence) -> list[StepOutput]:
        """End a sequence that has scored everything."""
        sequence.first_token_at = self._clock()
        if sequence.leads:
            self._queue_siblings(sequence)
        self._end(sequence, "length")
        return [StepOutput(sequence, NO_TOKEN, None, "length", first=True)]

    def _fail_row(self, sequence: Sequence, error: EngineError) -> None:
        if isinstance(error, NonFiniteLogits):
            self._blocks.forget(sequence)
        self.fail(sequence, error)

    def _append(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Append a sampled token and those that a grammar forces; return why the sequence ends with them, or None."""
        mask = sequence.token_mask
        if mask is not None:
            return advance_grammar(sequence, mask, token_id, self._eos_token_ids, self._max_model_len)
        sequence.token_ids.append(token_id)
        return finish_reason(sequence, self._eos_token_ids, self._max_model_len)

    def _outputs(
        self, sequence: Sequence, logprob: TokenLogprob | None, fresh: int, reason: FinishReason | None
    ) -> list[StepOutput]:
        """Return the outputs of the `fresh` tokens just appended."""
        first = sequence.first_token_at is None
        if first:
            sequence.first_token_at = self._clock()
            if sequence.leads:
                self._queue_siblings(sequence)
        self._policy.charge_output(sequence, fresh)
        self.num_forced_tokens += fresh - 1
        tokens = sequence.token_ids[-fresh:]
        if reason is not None:
            self._end(sequence, reason)
        return step_outputs(sequence, tokens, logprob, reason, first)

    def _queue_siblings(self, first: Sequence) -> None:
        """Queue the other choices, with the full blocks of the common prompt."""
        for sibling in self._requests[first.request_id].take_siblings():
            self._blocks.fork(first, sibling)
            self._queue.put(sibling)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Give back everything that a sequence uses, whatever its status."""
        if sequence.status is SequenceStatus.RUNNING:
            self._batch.remove(sequence)
        else:
            self._queue.discard(sequence)
        self._blocks.close(sequence)
        # What still refers to an ended sequence must not keep its grammar's memory.
        sequence.token_mask = None
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._num_live -= 1
        if not self._requests[sequence.request_id].live:
            del self._requests[sequence.request_id]
            self._unstarted.discard(sequence.request)
