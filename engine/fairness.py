"""Who is served next: first come first served, or fair shares by Virtual Token Counters (Sheng et al., OSDI 2024).

Invariant: a policy orders sequences and counts service; it never decides whether one fits.
"""

from typing import Protocol

from loraplex.engine.arrival_queue import ArrivalQueue
from loraplex.engine.sequence import Sequence


class Policy(Protocol):
    """Holds the sequences that could join the batch now, and learns what each was served."""

    def __len__(self) -> int: ...

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence, or put one back in the place of its submission."""
        ...

    def peek(self) -> Sequence | None:
        """The sequence to serve next; it stays queued."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; does nothing when it is not queued."""
        ...

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Smaller is served earlier; for sequences outside the queue too."""
        ...

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Prompt tokens that are going to be computed; cached ones are free."""
        ...

    def charge_output(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens sampled."""
        ...

    def charge_adapter_load(self, sequence: Sequence) -> None:
        """One adapter brought to the device for this sequence."""
        ...


class FirstComeFirstServed:
    """By submission, whoever asks. A tenant with many requests delays everybody behind them."""

    def __init__(self) -> None:
        self._queue = ArrivalQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, sequence: Sequence) -> None:
        self._queue.push(sequence)

    def peek(self) -> Sequence | None:
        return self._queue.peek()

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return (0.0, sequence.order)

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Service is not counted."""

    def charge_output(self, sequence: Sequence, num_tokens: int) -> None:
        """Service is not counted."""

    def charge_adapter_load(self, sequence: Sequence) -> None:
        """Service is not counted."""


class FairShare:
    """One counter of weighted service per tenant; the queued tenant with the smallest is next.

    A tenant whose queue was empty is lifted to the smallest counter of the queued ones, so that idle time earns
    nothing. While two tenants of equal weight both queue, their service differs by at most twice what one step plus
    one admission can serve. Costs are in prompt tokens, divided by `EngineRequest.weight`.
    """

    def __init__(
        self, *, prompt_cost: float = 1.0, output_cost: float = 2.0, adapter_load_cost: float = 64.0
    ) -> None:
        self._prompt_cost = prompt_cost
        self._output_cost = output_cost
        self._adapter_load_cost = adapter_load_cost
        self._counters: dict[bytes, float] = {}
        self._queues: dict[bytes, ArrivalQueue] = {}
        self._last_left = 0.0
        self._num_queued = 0
        self._prune_at = 4096

    def __len__(self) -> int:
        return self._num_queued

    def counter(self, namespace: bytes) -> float:
        """Weighted service a tenant has received, lifted when it was idle."""
        return self._counters.get(namespace, self._last_left)

    def push(self, sequence: Sequence) -> None:
        namespace = sequence.request.namespace
        queue = self._queues.get(namespace)
        if queue is None:
            self._counters[namespace] = max(self._counters.get(namespace, 0.0), self._floor())
            queue = self._queues[namespace] = ArrivalQueue()
            self._prune()
        before = len(queue)
        queue.push(sequence)
        self._num_queued += len(queue) - before

    def peek(self) -> Sequence | None:
        best: tuple[float, int] | None = None
        chosen: Sequence | None = None
        for namespace, queue in self._queues.items():
            counter = self._counters[namespace]
            if best is not None and counter > best[0]:
                continue
            head = queue.peek()
            if head is not None and (best is None or (counter, head.order) < best):
                best, chosen = (counter, head.order), head
        return chosen

    def remove(self, sequence: Sequence) -> None:
        namespace = sequence.request.namespace
        queue = self._queues.get(namespace)
        if queue is None:
            return
        before = len(queue)
        queue.remove(sequence)
        self._num_queued -= before - len(queue)
        if not len(queue):
            del self._queues[namespace]
            self._last_left = self._counters[namespace]

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return (self.counter(sequence.request.namespace), sequence.order)

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        self._charge(sequence, self._prompt_cost * num_tokens)

    def charge_output(self, sequence: Sequence, num_tokens: int) -> None:
        self._charge(sequence, self._output_cost * num_tokens)

    def charge_adapter_load(self, sequence: Sequence) -> None:
        self._charge(sequence, self._adapter_load_cost)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        request = sequence.request
        self._counters[request.namespace] = self.counter(request.namespace) + cost / request.weight

    def _floor(self) -> float:
        return min((self._counters[namespace] for namespace in self._queues), default=self._last_left)

    def _prune(self) -> None:
        """Forget idle tenants that would be lifted past their counter anyway; bounds memory."""
        if len(self._counters) < self._prune_at:
            return
        floor = self._floor()
        self._counters = {
            namespace: counter
            for namespace, counter in self._counters.items()
            if counter > floor or namespace in self._queues
        }
        self._prune_at = max(4096, 2 * len(self._counters))
