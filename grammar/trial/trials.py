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
from loraplex.grammar.trial.messages import Cancel, CompileResult, StartCheck
from loraplex.grammar.trial.refusals import refusal
from loraplex.grammar.trial.worker import CompileWorker, CompileWorkerConfig

DIGEST_BYTES = 32
ENTRY_BYTES = 512
"""What a remembered result takes beside its text: key, result, and places in the tables."""
MAX_ATTEMPTS = 2
DOWN = "the process of trial compilations does not run"


@dataclass(slots=True)
class CompileCheckStats:
    """Counts since the start. `seconds` is CPU time of trials; `refusals` are by outcome of the trial."""

    checks: int = 0
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
class PendingCheck:
    """One trial for all who wait for it."""

    check_id: int
    namespace: bytes
    digest: bytes
    spec: GrammarSpec
    result: asyncio.Future[CompileResult]
    waiters: int = 0
    attempts: int = 0
    watchdog: asyncio.TimerHandle | None = None


class CompileCache:
    """Made and used on one event loop. `check` may be called before the process is ready; it waits then."""

    def __init__(self, options: CompileWorkerConfig) -> None:
        limits = self._limits = options.limits
        self._worker = CompileWorker(options, self)
        self._cache: TenantCache[CompileResult] = TenantCache(
            limits.cache_bytes, limits.cache_bytes_per_tenant, cached_bytes
        )
        self._queue: TenantFairQueue[PendingCheck] = TenantFairQueue(
            limits.concurrent, limits.concurrent_per_tenant
        )
        self._pending: dict[tuple[bytes, bytes], PendingCheck] = {}
        self._running: dict[int, PendingCheck] = {}
        self._ids = count()
        self._stats = CompileCheckStats()
        self._closed = False

    @property
    def stats(self) -> CompileCheckStats:
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

        Raises `GrammarInvalid` or `GrammarTooCostly` naming `param`, or `WorkersUnavailable` when there is no result.
        """
        digest = _digest(spec, param)
        result = self._cache.get(namespace, digest)
        if result is None:
            result = await self._join(namespace, digest, spec)
        else:
            self._stats.cache_hits += 1
        error = refusal(result, self._limits, param)
        if error is None:
            return
        if isinstance(error, WorkersUnavailable):
            self._stats.unavailable += 1
        else:
            self._stats.refusals[result.outcome] += 1
        raise error

    async def _join(self, namespace: bytes, digest: bytes, spec: GrammarSpec) -> CompileResult:
        pending = self._pending.get((namespace, digest))
        if pending is None:
            pending = self._enqueue(namespace, digest, spec)
        else:
            self._stats.shared += 1
        pending.waiters += 1
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                return await asyncio.shield(pending.result)
        except TimeoutError:
            raise self._unavailable(
                f"no grammar could be tried for {self._limits.queue_timeout_s:g} s"
            ) from None
        finally:
            pending.waiters -= 1
            if pending.waiters == 0 and not pending.result.done():
                self._abandon(pending)

    def _enqueue(self, namespace: bytes, digest: bytes, spec: GrammarSpec) -> PendingCheck:
        limits = self._limits
        if self._closed or self._worker.down:
            raise self._unavailable(DOWN)
        if self._queue.waiting(namespace) >= limits.queued_per_tenant:
            raise self._unavailable(f"{limits.queued_per_tenant} new grammars of this tenant wait already")
        if len(self._queue) >= limits.queued:
            raise self._unavailable(f"{limits.queued} new grammars wait already")
        pending = PendingCheck(
            next(self._ids), namespace, digest, spec, asyncio.get_running_loop().create_future()
        )
        self._pending[namespace, digest] = pending
        self._queue.put(pending)
        self._dispatch()
        return pending

    def _dispatch(self) -> None:
        while self.ready and (pending := self._queue.take()) is not None:
            pending.attempts += 1
            self._running[pending.check_id] = pending
            hung_s = self._limits.deadline_s + self._limits.hang_grace_s
            pending.watchdog = asyncio.get_running_loop().call_later(hung_s, self._worker.kill)
            self._worker.send(StartCheck(pending.check_id, pending.spec))

    def _abandon(self, pending: PendingCheck) -> None:
        """Nobody waits for it: a running one keeps its slot until the process says that it has ended."""
        self._forget(pending)
        pending.result.cancel()
        if pending.check_id in self._running:
            self._worker.send(Cancel(pending.check_id))
        else:
            self._queue.remove(pending)

    def _fail(self, pending: PendingCheck, reason: str) -> None:
        self._forget(pending)
        if not pending.result.done():
            pending.result.set_exception(self._unavailable(reason))

    def _forget(self, pending: PendingCheck) -> None:
        if self._pending.get((pending.namespace, pending.digest)) is pending:
            del self._pending[pending.namespace, pending.digest]

    def _unavailable(self, reason: str) -> WorkersUnavailable:
        self._stats.unavailable += 1
        return WorkersUnavailable(reason)

    def on_ready(self) -> None:
        """See `WorkerListener`."""
        self._dispatch()

    def on_result(self, result: CompileResult) -> None:
        """See `WorkerListener`."""
        pending = self._running.pop(result.check_id)
        self._stop_watchdog(pending)
        self._stats.checks += 1
        self._stats.seconds += result.cpu_s
        if self._is_cacheable(result):
            self._cache.put(pending.namespace, pending.digest, result)
        self._queue.done(pending.namespace)
        self._forget(pending)
        if not pending.result.done():
            pending.result.set_result(result)
        self._dispatch()

    def on_lost(self) -> None:
        """See `WorkerListener`. A trial is tried once more, since it was hardly the trial that ended the process."""
        for pending in list(self._running.values()):
            del self._running[pending.check_id]
            self._stop_watchdog(pending)
            if pending.result.done() or pending.attempts >= MAX_ATTEMPTS:
                self._queue.done(pending.namespace)
                self._fail(pending, "the process of trial compilations ended")
            else:
                self._queue.put_back(pending)

    def on_down(self) -> None:
        """See `WorkerListener`."""
        self._fail_all(DOWN)

    def _fail_all(self, reason: str) -> None:
        for pending in list(self._pending.values()):
            self._fail(pending, reason)
            if pending.check_id not in self._running:
                self._queue.remove(pending)

    def _stop_watchdog(self, pending: PendingCheck) -> None:
        if pending.watchdog is not None:
            pending.watchdog.cancel()
            pending.watchdog = None

    def _is_cacheable(self, result: CompileResult) -> bool:
        """A deadline passed with little CPU time may be the machine's fault, and is tried again when asked again."""
        match result.outcome:
            case "starved" | "cancelled":
                return False
            case "deadline":
                return result.cpu_s >= self._limits.cpu_s / 2
            case _:
                return True


def _digest(spec: GrammarSpec, param: str | None) -> bytes:
    try:
        return blake2b(encode_spec(spec), digest_size=DIGEST_BYTES).digest()
    except UnicodeEncodeError:
        raise GrammarInvalid("the grammar holds a lone surrogate, which is no text", param=param) from None


def cached_bytes(result: CompileResult) -> int:
    """What a result takes in the memory of verdicts."""
    return ENTRY_BYTES + len(result.text.encode())
