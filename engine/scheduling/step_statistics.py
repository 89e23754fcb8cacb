"""`StepStatistics`: what the launched steps computed: their number, tokens and time, and each tenant's tokens in the last minute.

Invariant: a step costs one pass over its rows, and the report at most `MAX_TENANTS` entries, however many tenants there are.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter
from typing import Final

from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.messages import BASE_MODEL, OTHER_TENANTS, STEP_TOKEN_BOUNDS, TenantSteps

WINDOW_S: Final = 60.0
SLICE_S: Final = 5.0
"""The window moves by this much; it begins between 55 and 60 s ago."""
REPORT_INTERVAL_S: Final = 1.0
MAX_TENANTS: Final = 20
_NAMESPACE: Final = attrgetter("sequence.request.namespace")


@dataclass(slots=True)
class _TimeSlice:
    """The tokens of one part of the window by cache namespace."""

    began: float
    prefill: Counter[bytes] = field(default_factory=Counter)
    decode: Counter[bytes] = field(default_factory=Counter)

    def add(self, plan: StepPlan, num_tokens: int) -> None:
        """Count a step of `num_tokens`. Decodes come before chunks, and nearly all of them are one token."""
        rows = plan.rows
        num_decodes = len(rows)
        while num_decodes and not rows[num_decodes - 1].decodes:
            num_decodes -= 1
            _count_tokens(self.prefill, rows[num_decodes])
            num_tokens -= len(rows[num_decodes].token_ids)
        decodes = rows[:num_decodes]
        if num_tokens == num_decodes:
            # Counted in C: a loop of Python's own takes three times as long.
            self.decode.update(map(_NAMESPACE, decodes))
            return
        for row in decodes:
            _count_tokens(self.decode, row)


def _count_tokens(counts: Counter[bytes], row: PlannedRow) -> None:
    counts[row.sequence.request.namespace] += len(row.token_ids)


class StepStatistics:
    """Counts steps. `waiting` returns the requests that no step has begun by cache namespace."""

    def __init__(self, clock: Callable[[], float], waiting: Callable[[], Mapping[bytes, int]]) -> None:
        self._clock = clock
        self._waiting = waiting
        self._slices = deque([_TimeSlice(clock())])
        self._report: list[TenantSteps] = []
        self._reported_at = float("-inf")
        self._newest: StepPlan | None = None
        self.num_steps = 0
        self.num_tokens = 0
        self.seconds = 0.0
        self.histogram = [0] * (len(STEP_TOKEN_BOUNDS) + 1)

    def count(self, plan: StepPlan) -> None:
        """Count a step that is launched."""
        num_tokens, self._newest = plan.num_tokens, plan
        self._current().add(plan, num_tokens)
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.histogram[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1

    def tenants(self) -> list[TenantSteps]:
        """Return the tenants with the most tokens in the window, the largest first, and the others as one entry.

        At most `REPORT_INTERVAL_S` old: it reads all tenants of the window.
        """
        now = self._clock()
        if now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            self._report = self._tenants()
        return self._report

    def adapters(self) -> list[str]:
        """Return the digests of the newest step's rows, each once, and `BASE_MODEL` if one has no adapter."""
        rows = () if self._newest is None else self._newest.rows
        adapters = [row.sequence.adapter for row in rows]
        return sorted({BASE_MODEL if each is None else each.digest for each in adapters})

    def _current(self) -> _TimeSlice:
        """Return the newest slice, after dropping those that have left the window."""
        now, slices = self._clock(), self._slices
        if now - slices[-1].began >= SLICE_S:
            slices.append(_TimeSlice(now))
            while slices[0].began <= now - WINDOW_S:
                slices.popleft()
        return slices[-1]

    def _tenants(self) -> list[TenantSteps]:
        self._current()
        prefill, decode = Counter[bytes](), Counter[bytes]()
        for part in self._slices:
            prefill.update(part.prefill)
            decode.update(part.decode)
        waiting = self._waiting()

        def size(namespace: bytes) -> tuple[int, int]:
            return (prefill[namespace] + decode[namespace], waiting.get(namespace, 0))

        largest = nlargest(MAX_TENANTS, prefill.keys() | decode.keys() | waiting.keys(), key=size)
        shown = [TenantSteps(each, prefill[each], decode[each], waiting.get(each, 0)) for each in largest]
        others = TenantSteps(
            OTHER_TENANTS,
            prefill.total() - sum(each.prefill_tokens for each in shown),
            decode.total() - sum(each.decode_tokens for each in shown),
            sum(waiting.values()) - sum(each.waiting for each in shown),
        )
        return [*shown, others] if others.tokens or others.waiting else shown
