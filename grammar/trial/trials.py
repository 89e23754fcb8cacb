"""`CompileCache`: checks in another process whether a grammar compiles within its budget, before an engine gets it.

Invariant: at most one check of a spec runs per tenant, and a check that no request waits for is killed.
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
"""Bytes of a cached result without its text: key, result, and table entries."""
MAX_ATTEMPTS = 2
DOWN = "the compile-check process does not run"


@dataclass(slots=True)
class CompileCheckStats:
    """Counts since the start. `seconds` is CPU time of checks; `refusals` are counted by the outcome of the check."""

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
    """One check, shared by all requests that wait for it."""

    check_id: int
    namespace: bytes
    digest: bytes
    spec: GrammarSpec
    result: asyncio.Future[CompileResult]
    waiters: int = 0
    attempts: int = 0
    watchdog: asyncio.TimerHandle | None = None


class CompileCache:
    """Created and used on one event loop. `check` may be called before the process is ready; it waits then."""

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
        """Whether the process accepts checks now."""
        return self._worker.ready is not None

    @property
    def pid(self) -> int | None:
        """The id of the compile-check process, None while there is none."""
        return self._worker.pid

    async def start(self) -> None:
        """Start the process in the background, which takes seconds; returns at once."""
        self._worker.start()

    async def close(self) -> None:
        """End the process; waiting calls get `WorkersUnavailable`."""
        self._closed = True
        self._fail_all("this server is shutting down")
        await self._worker.close()

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        """Return when `spec` compiles within the budget, for the tenant of `namespace`.

        Raises `GrammarInvalid` or `GrammarTooCostly` naming `param`, or `WorkersUnavailable` without a result.
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
                f"no grammar could be checked for {self._limits.queue_timeout_s:g} s"
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
        """Give up a check that no request waits for. A running one keeps its slot until the process reports its end."""
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
        """See `WorkerListener`. Each check is retried once, since it is unlikely to have ended the process."""
        for pending in list(self._running.values()):
            del self._running[pending.check_id]
            self._stop_watchdog(pending)
            if pending.result.done() or pending.attempts >= MAX_ATTEMPTS:
                self._queue.done(pending.namespace)
                self._fail(pending, "the compile-check process ended")
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
        """Return whether a result is final. A deadline missed with little CPU time may be the machine's fault and is
        not cached.
        """
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
        raise GrammarInvalid("the grammar has a lone surrogate, which is no text", param=param) from None


def cached_bytes(result: CompileResult) -> int:
    """Return the bytes that a result takes in the cache."""
    return ENTRY_BYTES + len(result.text.encode())
