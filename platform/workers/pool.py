"""`WorkerPool`: runs tasks in worker processes, tenants in turn and within deadlines.

Invariants: a task has its slot until its process, or its fork, has replied or ended. Whatever a task does to its process,
its caller gets a reply, and only its own.
"""

import asyncio
from collections.abc import Coroutine, Hashable
from contextlib import nullcontext
from typing import Any, Final, Self, TypeVar

from loraplex.platform.errors import Overloaded, WorkersUnavailable
from loraplex.platform.tenant_limiter import TenantLimiter
from loraplex.platform.workers.messages import Reply
from loraplex.platform.workers.runners import RUNNERS, Runner
from loraplex.platform.workers.task import Files, TaskSpec, TaskStats
from loraplex.platform.workers.worker_process import EXIT_GRACE_S, Unconfined

Result = TypeVar("Result")

NO_TENANT: Final = b""
CLOSED: Final = "this server is shutting down"


class WorkerPool:
    """The worker processes of one gateway. Use it on one event loop; `close` ends all of them."""

    def __init__(self) -> None:
        self._workers: dict[TaskSpec[Any], _TaskWorkers] = {}
        self._jobs: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self, task: TaskSpec[Any]) -> None:
        """Start a process of the task before its first job, where the mode allows that. Raises `WorkersUnavailable`."""
        await self._begin(self._workers_of(task).prepare())

    async def run(
        self,
        task: TaskSpec[Result],
        payload: tuple[object, ...],
        tenant: Hashable,
        *,
        files: Files | None = None,
    ) -> Reply[Result]:
        """Run the task's function on `payload`, the tuple of its arguments, for a tenant.

        `files` are opened when the task has its slot, for a process of `spawn` mode, which inherits them under their numbers;
        they are the first argument. A cancelled call kills its job, but for one that has begun in `reuse` mode: it runs to
        its end, since a new process costs more. Raises `WorkersUnavailable`, and what `files` raise.
        """
        workers = self._workers_of(task)
        has_slot = asyncio.Event()
        job = self._begin(workers.run(payload, tenant, files, has_slot))
        try:
            async with asyncio.timeout(task.queue_timeout_s):
                reply: Reply[Result] = await asyncio.shield(job)
            return reply
        except asyncio.CancelledError:
            if job.cancelled():
                raise WorkersUnavailable(CLOSED) from None
            raise
        except TimeoutError:
            raise WorkersUnavailable(
                f"{task.unavailable}: no result for {task.queue_timeout_s:g} s"
            ) from None
        finally:
            if not job.done() and not (task.mode == "reuse" and has_slot.is_set()):
                job.cancel()
                # A fork ends when its server gets to it, which may hang; nothing of the caller is in use meanwhile.
                if task.mode != "fork":
                    await asyncio.wait({job})

    def stats(self, task: TaskSpec[Any]) -> TaskStats:
        """Return what the task's queue and processes do now."""
        workers = self._workers.get(task)
        return TaskStats() if workers is None else workers.stats()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all processes and jobs. Waiting and later calls raise `WorkersUnavailable`."""
        self._closed = True
        for job in self._jobs:
            job.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=EXIT_GRACE_S)
        await asyncio.gather(*(workers.close() for workers in self._workers.values()))
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _workers_of(self, task: TaskSpec[Any]) -> "_TaskWorkers":
        if self._closed:
            raise WorkersUnavailable(CLOSED)
        if task not in self._workers:
            self._workers[task] = _TaskWorkers(task)
        return self._workers[task]

    def _begin(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._forget)
        return job

    def _forget(self, job: "asyncio.Task[Any]") -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            # The caller may have left; asyncio would log an exception that was never retrieved.
            job.exception()


class _TaskWorkers:
    """The queue of one task and the processes that serve it."""

    def __init__(self, task: TaskSpec[Any]) -> None:
        self._task = task
        self._runner: Runner = RUNNERS[task.mode](task)
        self._slots = TenantLimiter(
            task.work,
            total=task.concurrent,
            per_tenant=task.concurrent_per_tenant,
            waiting=task.queued_per_tenant,
            waiting_in_total=task.queued,
        )
        self.close = self._runner.close

    def stats(self) -> TaskStats:
        """See `WorkerPool.stats`."""
        return TaskStats(self._slots.waiting, self._slots.running, self._runner.restarts, self._runner.pids)

    async def prepare(self) -> None:
        """Start a process. It takes a slot meanwhile, so that no more processes than slots start."""
        async with self._slots.slot(NO_TENANT):
            await self._runner.prepare()

    async def run(
        self,
        payload: tuple[object, ...],
        tenant: Hashable,
        files: Files | None,
        has_slot: asyncio.Event,
    ) -> Any:
        """Wait for a slot, then run one job."""
        try:
            async with self._slots.slot(tenant):
                has_slot.set()
                async with files or nullcontext(()) as opened:
                    arguments = (opened, *payload) if files else payload
                    return await self._runner.run(arguments, [descriptor for descriptor, _ in opened])
        except WorkersUnavailable:
            raise
        except Overloaded as refusal:
            raise WorkersUnavailable(str(refusal)) from None
        except Unconfined as refusal:
            raise WorkersUnavailable(f"a worker cannot be confined here: {refusal}") from None
