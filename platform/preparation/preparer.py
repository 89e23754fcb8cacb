"""Runs request analysis in one process: with a deadline per task, and a new process when it has died.

Invariants: a task begins only after the previous one has ended, also when its request has left. Each tenant has at most one
task in the queue, so that a task waits for at most one of each other tenant. A process that missed a deadline is not reused.
"""

import asyncio
import os
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from loraplex.grammar.child_process import end_child, spawn_child
from loraplex.grammar.errors import GrammarTooCostly, WorkersUnavailable
from loraplex.platform.errors import InvalidBody, Overloaded
from loraplex.platform.preparation.composed import CachedPlan
from loraplex.platform.preparation.messages import (
    LENGTH_BYTES,
    BuildPlan,
    CheckBody,
    Reply,
    Setup,
    Task,
    decode_reply,
    frame,
    length,
)

MODULE: Final = "loraplex.platform.preparation.process"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzerConfig:
    """`environment`: that of the process. `deadline_s` bounds one task, `queue_timeout_s` the whole wait for its result.

    `waiting_bytes` bounds the bodies and constraints that wait, `tenant_bytes` those of one tenant. For `pause_s` after a
    failed start, tasks are refused at once.
    """

    setup: Setup
    environment: Mapping[str, str]
    deadline_s: float = 20.0
    start_timeout_s: float = 60.0
    queue_timeout_s: float = 60.0
    pause_s: float = 2.0
    waiting_bytes: int = 256 << 20
    tenant_bytes: int = 32 << 20


@dataclass(slots=True)
class _Job:
    """A task and whether it has begun: from then on it runs to its end, also when its request has left."""

    task: Task
    begun: bool = False


class RequestAnalyzer:
    """The analysis process of one gateway. Use it on one event loop."""

    def __init__(self, options: AnalyzerConfig) -> None:
        self._options = options
        self._tenant_locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._lock = asyncio.Lock()
        self._process: Process | None = None
        self._waiting: Counter[bytes] = Counter()
        self._jobs: set[asyncio.Task[Reply | None]] = set()
        self._closed = False
        self._paused_until = 0.0
        self._log = structlog.get_logger("loraplex.preparation")

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the process before the first task. Raises `WorkersUnavailable`."""
        async with self._lock:
            await self._ready()

    async def close(self) -> None:
        """End the process, also during a task. Later tasks raise `WorkersUnavailable`."""
        self._closed = True
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await self._end()

    async def check_body(self, namespace: bytes, body: bytes) -> None:
        """Check a body. Raises `InvalidBody` or `InvalidParameter` as `parse_object`, `Overloaded`, `WorkersUnavailable`."""
        if await self._run(namespace, CheckBody(body), len(body)) is None:
            raise InvalidBody("The body could not be parsed within the allowed memory.")

    async def plan(self, namespace: bytes, packed: bytes) -> CachedPlan:
        """Build the output plan of packed constraints. Raises `GrammarRefused`, `Overloaded`, `WorkersUnavailable`."""
        reply = await self._run(namespace, BuildPlan(packed), len(packed))
        if reply is None or reply.result is None:
            raise GrammarTooCostly("the schemas of this request take too much memory to analyse")
        return reply.result

    async def _run(self, namespace: bytes, task: Task, size: int) -> Reply | None:
        """Run a task and return its reply; None when the process died during it. Raises the error of the request."""
        self._reserve_bytes(namespace, size)
        job = _Job(task)
        running = asyncio.create_task(self._process_job(namespace, job))
        self._jobs.add(running)
        running.add_done_callback(self._forget)
        try:
            async with asyncio.timeout(self._options.queue_timeout_s):
                reply = await asyncio.shield(running)
        except TimeoutError:
            raise WorkersUnavailable(
                f"this request could not be analysed within {self._options.queue_timeout_s:g} s"
            ) from None
        finally:
            if not job.begun:
                running.cancel()
            self._waiting[namespace] -= size
            self._waiting += Counter()
        if reply is not None and reply.refusal is not None:
            raise reply.refusal.error()
        if reply is not None and reply.broken is not None:
            raise RuntimeError(f"the analysis of a request failed: {reply.broken}")
        return reply

    def _reserve_bytes(self, namespace: bytes, size: int) -> None:
        options = self._options
        if self._waiting[namespace] + size > max(options.tenant_bytes, size):
            raise Overloaded(
                f"More than {options.tenant_bytes} bytes of this tenant's requests wait to be analysed."
            )
        if self._waiting.total() + size > max(options.waiting_bytes, size):
            raise Overloaded(f"More than {options.waiting_bytes} bytes of requests wait to be analysed.")
        self._waiting[namespace] += size

    def _forget(self, running: "asyncio.Task[Reply | None]") -> None:
        self._jobs.discard(running)
        if not running.cancelled():
            # The request may have left; asyncio would log an exception that was never retrieved.
            running.exception()

    async def _process_job(self, namespace: bytes, job: _Job) -> Reply | None:
        """Run one job. The process replies in order, so the lock is released only when the job has ended."""
        lock = self._tenant_locks.setdefault(namespace, asyncio.Lock())
        async with lock, self._lock:
            job.begun = True
            process = await self._ready()
            try:
                async with asyncio.timeout(self._options.deadline_s):
                    return await _exchange(process, frame(job.task))
            except TimeoutError:
                self._log.error("preparation late", task=type(job.task).__name__)
                await self._end()
                deadline_s = self._options.deadline_s
                raise WorkersUnavailable(
                    f"this request could not be analysed within {deadline_s:g} s"
                ) from None
            except (OSError, EOFError, msgspec.DecodeError) as error:
                self._log.error("preparation lost", task=type(job.task).__name__, reason=repr(error))
                await self._end()
                return None
            except BaseException:
                await self._end()
                raise

    async def _ready(self) -> Process:
        """Return a process that has replied once, so that no task's deadline includes the start."""
        process, now = self._process, asyncio.get_running_loop().time()
        if process is not None and process.returncode is None:
            return process
        if self._closed or now < self._paused_until:
            raise WorkersUnavailable("requests of this size cannot be analysed now")
        try:
            process = self._process = await spawn_child(
                MODULE, str(os.getpid()), environment=self._options.environment
            )
            async with asyncio.timeout(self._options.start_timeout_s):
                await _exchange(process, frame(self._options.setup) + frame(CheckBody(b"{}")))
        except BaseException as error:
            await self._end()
            if not isinstance(error, OSError | EOFError | TimeoutError | msgspec.DecodeError):
                raise
            self._paused_until = now + self._options.pause_s
            self._log.error("preparation does not start", reason=repr(error))
            raise WorkersUnavailable("requests of this size cannot be analysed now") from error
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await end_child(process)


async def _exchange(process: Process, data: bytes) -> Reply:
    """Send a message and read the reply.

    Raises `OSError` or `EOFError` when the process has ended, `msgspec.DecodeError` for an invalid reply.
    """
    if process.stdin is None or process.stdout is None:
        raise BrokenPipeError("the process has no pipes")
    process.stdin.write(data)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return decode_reply(await process.stdout.readexactly(length(head)))
