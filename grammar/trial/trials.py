"""`CompileCache`: whether a grammar compiles within its budget, found out in another process before an engine is asked anything.

Invariant: at most one trial of a spec runs per tenant, and none that nobody waits for any more.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

from loraplex.grammar.errors import GrammarInvalid, WorkersUnavailable
from loraplex.grammar.spec import GrammarSpec, encode_spec
from loraplex.grammar.tenant_cache import TenantCache
from loraplex.grammar.trial.fair_queue import TenantFairQueue
from loraplex.grammar.trial.messages import Cancel, CompileResult, Try
from loraplex.grammar.trial.refusals import refusal
from loraplex.grammar.trial.worker import CompileWorker, CompileWorkerConfig

DIGEST_BYTES = 32
ENTRY_BYTES = 512
"""What a remembered verdict takes beside its text: key, verdict, and places in the tables."""
MAX_ATTEMPTS = 2
DOWN = "the process of trial compilations does not run"


@dataclass(slots=True)
class TrialStats:
    """Counts since the start. `seconds` is CPU time of trials; `refusals` are by outcome of the trial."""

    trials: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    cache_hits: int = 0
    shared: int = 0
    seconds: float = 0.0
    unavailable: int = 0
    restarts: int = 0
    waiting: int = 0
    running: int = 0
    cache_bytes: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """One trial for all who wait for it."""

    trial_id: int
    namespace: bytes
    digest: bytes
    spec: GrammarSpec
    verdict: asyncio.Future[CompileResult]
    waiters: int = 0
    attempts: int = 0
    watchdog: asyncio.TimerHandle | None = None


class CompileCache:
    """Made and used on one event loop. `check` may be called before the process is ready; it waits then."""

    def __init__(self, options: CompileWorkerConfig) -> None:
        limits = self._limits = options.limits
        self._worker = CompileWorker(options, self)
        self._cache: TenantCache[CompileResult] = TenantCache(
            limits.cache_bytes, limits.cache_bytes_per_tenant, remembered_bytes
        )
        self._queue: TenantFairQueue[Flight] = TenantFairQueue(
            limits.concurrent, limits.concurrent_per_tenant
        )
        self._flights: dict[tuple[bytes, bytes], Flight] = {}
        self._running: dict[int, Flight] = {}
        self._ids = count()
        self._stats = TrialStats()
        self._closed = False

    @property
    def stats(self) -> TrialStats:
        """A snapshot."""
        self._stats.restarts = self._worker.restarts
        self._stats.waiting = len(self._queue)
        self._stats.running = len(self._running)
        self._stats.cache_bytes = self._cache.size_bytes
        return self._stats

    @property
    def ready(self) -> bool:
        """Whether the process takes trials now."""
        return self._worker.ready is not None

    @property
    def pid(self) -> int | None:
        """Of the process of trial compilations, None while there is none."""
        return self._worker.pid

    async def start(self) -> None:
        """Begin to start the process, which takes seconds; returns at once."""
        self._worker.start()

    async def close(self) -> None:
        """End the process; who still waits gets `WorkersUnavailable`."""
        self._closed = True
        self._fail_all("this server is shutting down")
        await self._worker.close()

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        """Return when `spec` compiles within the budget, for the tenant of `namespace`.

        Raises `GrammarInvalid` or `GrammarTooCostly` naming `param`, or `WorkersUnavailable` when there is no verdict.
        """
        digest = _digest(spec, param)
        verdict = self._cache.get(namespace, digest)
        if verdict is None:
            verdict = await self._fly(namespace, digest, spec)
        else:
            self._stats.cache_hits += 1
        error = refusal(verdict, self._limits, param)
        if error is None:
            return
        if isinstance(error, WorkersUnavailable):
            self._stats.unavailable += 1
        else:
            self._stats.refusals[verdict.outcome] += 1
        raise error

    async def _fly(self, namespace: bytes, digest: bytes, spec: GrammarSpec) -> CompileResult:
        flight = self._flights.get((namespace, digest))
        if flight is None:
            flight = self._enqueue(namespace, digest, spec)
        else:
            self._stats.shared += 1
        flight.waiters += 1
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                return await asyncio.shield(flight.verdict)
        except TimeoutError:
            raise self._unavailable(
                f"no grammar could be tried for {self._limits.queue_timeout_s:g} s"
            ) from None
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.verdict.done():
                self._abandon(flight)

    def _enqueue(self, namespace: bytes, digest: bytes, spec: GrammarSpec) -> Flight:
        limits = self._limits
        if self._closed or self._worker.down:
            raise self._unavailable(DOWN)
        if self._queue.waiting(namespace) >= limits.queued_per_tenant:
            raise self._unavailable(f"{limits.queued_per_tenant} new grammars of this tenant wait already")
        if len(self._queue) >= limits.queued:
            raise self._unavailable(f"{limits.queued} new grammars wait already")
        flight = Flight(next(self._ids), namespace, digest, spec, asyncio.get_running_loop().create_future())
        self._flights[namespace, digest] = flight
        self._queue.put(flight)
        self._dispatch()
        return flight

    def _dispatch(self) -> None:
        while self.ready and (flight := self._queue.take()) is not None:
            flight.attempts += 1
            self._running[flight.trial_id] = flight
            hung_s = self._limits.deadline_s + self._limits.hang_grace_s
            flight.watchdog = asyncio.get_running_loop().call_later(hung_s, self._worker.kill)
            self._worker.send(Try(flight.trial_id, flight.spec))

    def _abandon(self, flight: Flight) -> None:
        """Nobody waits for it: a running one keeps its slot until the process says that it has ended."""
        self._forget(flight)
        flight.verdict.cancel()
        if flight.trial_id in self._running:
            self._worker.send(Cancel(flight.trial_id))
        else:
            self._queue.remove(flight)

    def _fail(self, flight: Flight, reason: str) -> None:
        self._forget(flight)
        if not flight.verdict.done():
            flight.verdict.set_exception(self._unavailable(reason))

    def _forget(self, flight: Flight) -> None:
        if self._flights.get((flight.namespace, flight.digest)) is flight:
            del self._flights[flight.namespace, flight.digest]

    def _unavailable(self, reason: str) -> WorkersUnavailable:
        self._stats.unavailable += 1
        return WorkersUnavailable(reason)

    def on_ready(self) -> None:
        """See `TrialListener`."""
        self._dispatch()

    def on_verdict(self, verdict: CompileResult) -> None:
        """See `TrialListener`."""
        flight = self._running.pop(verdict.trial_id)
        self._land(flight)
        self._stats.trials += 1
        self._stats.seconds += verdict.cpu_s
        if self._lasts(verdict):
            self._cache.put(flight.namespace, flight.digest, verdict)
        self._queue.done(flight.namespace)
        self._forget(flight)
        if not flight.verdict.done():
            flight.verdict.set_result(verdict)
        self._dispatch()

    def on_lost(self) -> None:
        """See `TrialListener`. A trial is tried once more, since it was hardly the trial that ended the process."""
        for flight in list(self._running.values()):
            del self._running[flight.trial_id]
            self._land(flight)
            if flight.verdict.done() or flight.attempts >= MAX_ATTEMPTS:
                self._queue.done(flight.namespace)
                self._fail(flight, "the process of trial compilations ended")
            else:
                self._queue.put_back(flight)

    def on_down(self) -> None:
        """See `TrialListener`."""
        self._fail_all(DOWN)

    def _fail_all(self, reason: str) -> None:
        for flight in list(self._flights.values()):
            self._fail(flight, reason)
            if flight.trial_id not in self._running:
                self._queue.remove(flight)

    def _land(self, flight: Flight) -> None:
        if flight.watchdog is not None:
            flight.watchdog.cancel()
            flight.watchdog = None

    def _lasts(self, verdict: CompileResult) -> bool:
        """A deadline passed with little CPU time may be the machine's fault, and is tried again when asked again."""
        match verdict.outcome:
            case "starved" | "cancelled":
                return False
            case "deadline":
                return verdict.cpu_s >= self._limits.cpu_s / 2
            case _:
                return True


def _digest(spec: GrammarSpec, param: str | None) -> bytes:
    try:
        return blake2b(encode_spec(spec), digest_size=DIGEST_BYTES).digest()
    except UnicodeEncodeError:
        raise GrammarInvalid("the grammar holds a lone surrogate, which is no text", param=param) from None


def remembered_bytes(verdict: CompileResult) -> int:
    """What a verdict takes in the memory of verdicts."""
    return ENTRY_BYTES + len(verdict.text.encode())
