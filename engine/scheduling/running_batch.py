"""`RunningBatch`: the sequences that are being computed, oldest first, with their blocks and their adapters' places.

Invariant: each of its sequences has blocks for every planned token. The oldest sequence always gets blocks; the newest is
preempted for it.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.batch.step_plan import StepRows
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.kv_cache.block_table import SequenceBlocks
from loraplex.engine.scheduling.adapter_scheduler import AdapterScheduler
from loraplex.engine.scheduling.in_flight_steps import InFlightSteps
from loraplex.engine.scheduling.stop_conditions import ends_with_unknown

DISPLACED_SHARE = 4
"""Rows of a whole adapter are computed again for a tenant far below its share. With 1, 1,000 adapters by Zipf over 64 places
give 4 % fewer tokens/s on the simulated clock, with 4 as many as without."""


def _order(sequence: Sequence) -> int:
    return sequence.order


class RunningBatch:
    """The batch. It does not know the queue: it returns preempted sequences to its caller."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: SequenceBlocks,
        adapters: AdapterScheduler,
        in_flight: InFlightSteps,
        max_model_len: int,
        is_owed: Callable[[Sequence, Sequence], bool],
    ) -> None:
        """`is_owed`: whether a sequence may take a row although its tenant then has more than that row's (`FairShare`)."""
        self._max_sequences = config.max_num_seqs
        self._blocks = blocks
        self._adapters = adapters
        self._in_flight = in_flight
        self._max_model_len = max_model_len
        self._is_owed = is_owed
        self._running: list[Sequence] = []
        self._num_writing = 0
        self._victims: list[Sequence] = []
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def oldest(self) -> Sequence | None:
        return self._running[0] if self._running else None

    @property
    def num_free(self) -> int:
        """Sequences that write and may still join. Others have as many places of their own."""
        return self._max_sequences - self._num_writing

    def has_place(self, sequence: Sequence) -> bool:
        """Whether a sequence may join, as far as others of its kind leave a place."""
        taken = self._num_writing if sequence.writes else len(self._running) - self._num_writing
        return taken < self._max_sequences

    @property
    def namespaces(self) -> set[bytes]:
        """The tenants that have a row. O(rows)."""
        return {row.request.namespace for row in self._running}

    @property
    def begun_prompts(self) -> list[Sequence]:
        """The rows whose prompts are not computed yet, oldest first. O(rows)."""
        return [row for row in self._running if not row.is_past_prompt]

    def join(self, sequence: Sequence) -> bool:
        """Add a sequence whose adapter is admitted; False when too few blocks are free."""
        if not self._blocks.open(sequence, len(self._running)):
            return False
        self._adapters.activate(sequence)
        sequence.status = SequenceStatus.RUNNING
        self._num_writing += sequence.writes
        insort(self._running, sequence, key=_order)
        return True

    def displace(self, sequence: Sequence) -> bool:
        """Let a sequence join, if necessary in place of the newest rows of the tenants with the most for their weight.

        False, with no row preempted, when it would not fit even if every tenant had only one row left.
        """
        surplus = self._surplus()
        num_left = len(self._running) - len(surplus)
        peers = sum(row.writes == sequence.writes for row in self._running)
        if peers - sum(row.writes == sequence.writes for row in surplus) >= self._max_sequences:
            return False
        if not self._blocks.fits_without(surplus, sequence, num_left):
            return False
        while not (self.has_place(sequence) and self.join(sequence)):
            if not (self.has_place(sequence) and self._blocks.reclaim(keep=sequence)):
                self._preempt(self._newest_surplus())
        return True

    def displace_for_share(self, sequence: Sequence) -> bool:
        """Let a sequence join in place of the newest row of the tenant that has the most for its weight without that row.

        False, with no row preempted, when its own tenant would then have more than that one and is not owed service by it, or
        it would not fit. The oldest row, a tenant's last one and rows that were displaced before keep their places: the shares of
        others displace a request once.
        """
        rows, weights = self._shares([row for row in self._running if row.writes])
        left = {namespace: (number - 1) / weights[namespace] for namespace, number in rows.items()}
        request = sequence.request
        own = (rows[request.namespace] + 1) / request.weight
        candidates = (row for row in self._running[1:] if row.writes and not row.was_displaced)
        others = (row for row in candidates if row.request.namespace != request.namespace)
        newest = max(others, key=lambda row: (left[row.request.namespace], row.order), default=None)
        if newest is None:
            return False
        surplus = left[newest.request.namespace]
        if surplus < own and not (surplus > 0 and self._is_owed(sequence, newest)):
            return False
        if not self._blocks.fits_without((newest,), sequence, len(self._running) - 1):
            return False
        newest.was_displaced = True
        self._preempt(newest)
        while not self.join(sequence):
            if not self._blocks.reclaim(keep=sequence):
                return False
        return True

    def displace_adapter(self, sequence: Sequence, num_coming: int) -> bool:
        """Preempt the rows of one adapter of the tenant that runs the most for its weight: of the adapter with the fewest rows,
        the newest of several. A sequence whose adapter lacks room gets it so.

        `num_coming`: adapters of the tenant of `sequence` that load or have arrived. False, with no row preempted, unless the
        other tenant keeps as many as that one then has, and `DISPLACED_SHARE` times as many where it owes it no service. The
        oldest row's adapter and those of rows that were displaced before keep their places.
        """
        tenants: dict[bytes, dict[str, list[Sequence]]] = {}
        for row in self._running:
            if row.adapter is not None:
                adapters = tenants.setdefault(row.request.namespace, {})
                adapters.setdefault(row.adapter.digest, []).append(row)
        request = sequence.request
        own = (len(tenants.pop(request.namespace, ())) + num_coming + 1) / request.weight
        left = {
            namespace: (len(adapters) - 1) / next(iter(adapters.values()))[0].request.weight
            for namespace, adapters in tenants.items()
        }
        largest = max(left, key=left.__getitem__, default=None)
        if largest is None or left[largest] < own:
            return False
        candidates = [
            rows
            for rows in tenants[largest].values()
            if rows[0] is not self.oldest and not any(row.was_displaced for row in rows)
        ]
        victims = min(candidates, key=lambda rows: (len(rows), -rows[-1].order), default=None)
        if victims is None:
            return False
        if left[largest] < DISPLACED_SHARE * own and not self._is_owed(sequence, victims[0]):
            return False
        for row in victims:
            row.was_displaced = True
            self._preempt(row)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ends or is preempted. The caller gives its blocks back."""
        # Launched rows count: the device computes them, whether or not their results are used.
        prefilled = min(sequence.num_planned_tokens, sequence.num_prompt_tokens)
        sequence.num_prefilled_tokens = max(sequence.num_prefilled_tokens, prefilled)
        del self._running[bisect_left(self._running, sequence.order, key=_order)]
        self._num_writing -= sequence.writes
        self._in_flight.depart(sequence)

    def take_preempted(self) -> list[Sequence]:
        """Return the sequences that were preempted since the last call."""
        victims, self._victims = self._victims, []
        return victims

    def plan_decodes(self, step: StepRows) -> list[Sequence]:
        """Add every sequence with one token to compute; return those with more, oldest first.

        Blocks are taken for all of them, oldest first, so that a preempted sequence is never planned.
        """
        started: list[Sequence] = []
        running, block_size = self._running, self._blocks.block_size
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            if sequence.num_unknown and ends_with_unknown(sequence, self._max_model_len):
                continue
            last = len(sequence.token_ids) + sequence.num_unknown - 1
            if last // block_size >= len(sequence.block_table) and not self._make_room(sequence):
                break
            planned = sequence.num_computed_tokens + sequence.num_in_flight
            if planned < last:
                started.append(sequence)
            elif planned == last and not sequence.awaits_mask:
                step.add_last(sequence)
        return started

    def _make_room(self, sequence: Sequence) -> bool:
        """Take blocks for all its tokens, preempting the newest as needed; False when the newest is the sequence itself."""
        while self._blocks.blocks_for(sequence.num_expected_tokens) > len(sequence.block_table):
            if self._blocks.grow(sequence) or self._blocks.reclaim():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _surplus(self) -> list[Sequence]:
        """Return every row but the oldest of each tenant."""
        oldest = {row.request.namespace: row for row in reversed(self._running)}
        return [row for row in self._running if oldest[row.request.namespace] is not row]

    def _newest_surplus(self) -> Sequence:
        """Return the newest row of the tenant with the most for its weight, of those with several. O(rows)."""
        rows, weights = self._shares(self._running)
        loads = {namespace: number / weights[namespace] for namespace, number in rows.items()}
        return max(self._surplus(), key=lambda row: (loads[row.request.namespace], row.order))

    def _shares(self, running: list[Sequence]) -> tuple[Counter[bytes], dict[bytes, float]]:
        """Return each tenant's number of these rows, and its weight. O(rows)."""
        rows = Counter(row.request.namespace for row in running)
        # Requests keep the weight they were sent with; the newest one counts for all of a tenant's.
        weights = {row.request.namespace: row.request.weight for row in running}
        return rows, weights

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt a sequence. A token that a launched step samples for it is lost; the same one will be sampled again."""
        self.remove(sequence)
        self._blocks.close(sequence)
        sequence.awaits_mask = False
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._victims.append(sequence)
