"""`RequestAnalyzer`: the preparing process as the gateway sees it: asked, bounded in time, started again when it died.

Invariants: the next task begins when the one before has ended, never earlier, whoever left meanwhile; of one tenant one task
at a time is in the queue, so that another waits for one task of each; a process that missed its deadline is never asked again.
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
    """`environment` is what the process sees. `deadline_s` bounds one task, `queue_timeout_s` the whole wait for it.

    `waiting_bytes` bounds the bodies and forms that wait, `tenant_bytes` those of one tenant. After a start that failed
    nobody is kept waiting for another one for `pause_s`.
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
    """A task and whether its turn has come: from then on it goes to its end, whoever waits for it."""

    task: Task
    begun: bool = False


class RequestAnalyzer:
    """Made and used on one event loop."""

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
        """The process id, None while there is no process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the process before anybody waits for it. Raises `WorkersUnavailable`."""
        async with self._lock:
            await self._ready()

    async def close(self) -> None:
        """End the process, in the middle of a task if need be; what is asked from now on is `WorkersUnavailable`."""
        self._closed = True
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await self._end()

    async def check_body(self, namespace: bytes, body: bytes) -> None:
        """Raises `InvalidBody` or `InvalidParameter` as `parse_object` does, `Overloaded`, `WorkersUnavailable`."""
        if await self._run(namespace, CheckBody(body), len(body)) is None:
            raise InvalidBody("The body could not be read within the memory allowed.")

    async def plan(self, namespace: bytes, packed: bytes) -> CachedPlan:
        """`packed` is what `pack_form` made. Raises `GrammarRefused`, `Overloaded`, `WorkersUnavailable`."""
        reply = await self._run(namespace, BuildPlan(packed), len(packed))
        if reply is None or reply.result is None:
            raise GrammarTooCostly("the schemas of this request take too much memory to analyse")
        return reply.result

    async def _run(self, namespace: bytes, task: Task, size: int) -> Reply | None:
        """None when the process did not survive the task. Raises what the request deserves."""
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
            raise RuntimeError(f"the preparation of a request broke down: {reply.broken}")
        return reply

    def _reserve_bytes(self, namespace: bytes, size: int) -> None:
        options = self._options
        if self._waiting[namespace] + size > max(options.tenant_bytes, size):
            raise Overloaded(
                f"More than {options.tenant_bytes} bytes of this tenant's requests wait to be read."
            )
        if self._waiting.total() + size > max(options.waiting_bytes, size):
            raise Overloaded(f"More than {options.waiting_bytes} bytes of requests wait to be read.")
        self._waiting[namespace] += size

    def _forget(self, running: "asyncio.Task[Reply | None]") -> None:
        self._jobs.discard(running)
        if not running.cancelled():
            # Whoever asked may have left; an error that nobody looks at would be told to the log.
            running.exception()

    async def _process_job(self, namespace: bytes, job: _Job) -> Reply | None:
        """The process answers in order, so nothing but the end of an errand gives its turn to the next."""
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
        """A process that has answered once, so that its start is not counted to a task."""
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
    """Raises `OSError` or `EOFError` when the process has ended, `msgspec.DecodeError` for what is no answer."""
    if process.stdin is None or process.stdout is None:
        raise BrokenPipeError("the process has no pipes")
    process.stdin.write(data)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return decode_reply(await process.stdout.readexactly(length(head)))
