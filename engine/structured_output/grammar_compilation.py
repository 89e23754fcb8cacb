"""`GrammarCompilation`: compiles grammars on side threads of low priority while their rows wait outside the batch.

Invariant: `take` returns every started request once, with its mask or with the error that ends it alone. Tenants take
turns, so that one tenant's queue delays no other tenant. A dropped request is never returned.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from loraplex.engine.errors import GrammarFailed
from loraplex.engine.structured_output.tenant_queue import TenantQueue
from loraplex.engine.threads import join_all, start_side_thread
from loraplex.engine.token_mask import TokenMask, TokenMaskFactory

NICENESS = 10
"""A tenth of a core next to a step loop that wants all of it. At 19, a fiftieth, a compilation of 0.3 s took 2 to 10 s
under load, while its row waited for it."""

_logger = logging.getLogger(__name__)


class GrammarJob(NamedTuple):
    """A grammar of one request. `responses`: for each choice that runs, the tokens that its mask starts behind."""

    ticket: int
    namespace: bytes
    grammar: bytes
    responses: Sequence[Sequence[int]]


class CompiledGrammar(NamedTuple):
    """A mask for each choice, or the error that ends their request. `seconds`: what compiling took."""

    ticket: int
    outcome: list[TokenMask] | GrammarFailed
    seconds: float


class GrammarCompilation:
    """Only the compiling itself runs on side threads. They start with the first grammar."""

    def __init__(
        self, factory: TokenMaskFactory, threads: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._factory = factory
        self._threads = threads
        self._clock = clock
        self._cores = os.sched_getaffinity(0)
        self._changed = threading.Condition()
        self._waiting: TenantQueue[GrammarJob] = TenantQueue()
        self._done: SimpleQueue[CompiledGrammar] = SimpleQueue()
        self._awaited: set[int] = set()
        self._running: list[threading.Thread] = []
        self._closed = False
        self.num_compilations = 0
        self.num_failures = 0
        self.seconds = 0.0

    def start(self, job: GrammarJob) -> int:
        """Queue one grammar and return how many are awaited before it. Every `ticket` is used only once."""
        before = len(self._awaited)
        self._awaited.add(job.ticket)
        with self._changed:
            self._waiting.put(job.namespace, job)
            self._changed.notify()
        if len(self._running) < self._threads:
            self._running.append(start_side_thread("mask-compilation", self._run, self._cores, NICENESS))
        return before

    def drop(self, ticket: int) -> None:
        """Forget a request that ended. A running compilation continues, and its result is discarded. Idempotent."""
        if ticket not in self._awaited:
            return
        self._awaited.discard(ticket)
        with self._changed:
            self._waiting.discard(lambda job: job.ticket == ticket)

    def take(self) -> list[CompiledGrammar]:
        """Return what was compiled since the last call. Costs nothing while none waits."""
        taken: list[CompiledGrammar] = []
        while self._awaited:
            try:
                compiled = self._done.get_nowait()
            except Empty:
                break
            if compiled.ticket in self._awaited:
                self._awaited.discard(compiled.ticket)
                taken.append(compiled)
        return taken

    def close(self) -> None:
        """End the threads after their current compilations."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        join_all(self._running)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                job = self._waiting.pop()
            self._done.put(self._compile(job))

    def _compile(self, job: GrammarJob) -> CompiledGrammar:
        began = self._clock()
        outcome: list[TokenMask] | GrammarFailed
        try:
            outcome = masks_behind(self._factory(job.namespace, job.grammar), job.responses)
        except BaseException:
            # Panics of extension modules are not derived from `Exception`.
            _logger.exception("a grammar could not be compiled")
            outcome = GrammarFailed("the grammar of this request could not be compiled")
        seconds = self._clock() - began
        with self._changed:
            self.num_compilations += 1
            self.num_failures += isinstance(outcome, GrammarFailed)
            self.seconds += seconds
        return CompiledGrammar(job.ticket, outcome, seconds)


def masks_behind(mask: TokenMask, responses: Sequence[Sequence[int]]) -> list[TokenMask]:
    """Return a mask behind each response, made of one at the start. Raises `GrammarFailed` for a token that it does not allow."""
    masks = [mask, *(mask.fork() for _ in responses[1:])]
    for each, response in zip(masks, responses, strict=True):
        if not all(each.accept(token) for token in response):
            raise GrammarFailed("the grammar of this request refuses what another engine has sent")
    return masks
