"""Where tasks run, by mode: in a new process each, in processes that are used again, or in forks of one warm process.

Invariant: a process that missed a deadline, or whose job was cancelled, is not used again.
"""

import asyncio
import signal
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol

import structlog

from loraplex.platform.errors import WorkersUnavailable
from loraplex.platform.processes.restart_budget import RestartBudget, RestartPolicy
from loraplex.platform.workers.messages import Ended
from loraplex.platform.workers.process_end import how_it_ended
from loraplex.platform.workers.task import Mode, TaskSpec
from loraplex.platform.workers.worker_process import StartFailed, Unconfined, WorkerLost, WorkerProcess

RESTARTS: Final = RestartPolicy(first_delay_s=0.1, max_delay_s=30.0)
DOWN_AFTER_FAILURES: Final = 3
"""From then on callers are refused at once instead of waiting for the next process."""
SETTLED_S: Final = 60.0
"""A fork server that ends sooner has failed as one that does not start."""
MAX_ATTEMPTS: Final = 2
LOG = structlog.get_logger("loraplex.workers")


class Runner(Protocol):
    """Runs jobs of one task, as many at once as are given to it."""

    restarts: int

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of its processes."""
        ...

    async def prepare(self) -> None:
        """Have a process ready before the first job. Raises `WorkersUnavailable`."""
        ...

    async def run(self, payload: tuple[object, ...], descriptors: Collection[int]) -> Any:
        """Return the `Reply` to one job. A cancelled call kills the job. Raises `WorkersUnavailable`."""
        ...

    async def close(self) -> None:
        """End its processes."""
        ...


class Backoff:
    """When the next process may start, and whether waiting for it is of use."""

    def __init__(self) -> None:
        self._budget = RestartBudget(RESTARTS)
        self.failures = 0
        self.next_at = 0.0

    @property
    def is_down(self) -> bool:
        """Whether so many attempts have failed in a row that waiting is useless."""
        return self.failures >= DOWN_AFTER_FAILURES

    def fail(self, now: float) -> float:
        """Count a failure and return the delay in seconds before the next attempt."""
        # Without a maximum of restarts there is always a next one.
        delay_s = self._budget.next_delay(now) or 0.0
        self.failures += 1
        self.next_at = now + delay_s
        return delay_s


class SpawnRunner:
    """A process per job, which reads one input only."""

    def __init__(self, task: TaskSpec[Any]) -> None:
        self._task = task
        self._processes: set[WorkerProcess] = set()
        self.restarts = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """See `Runner`."""
        return tuple(process.pid for process in self._processes)

    async def prepare(self) -> None:
        """Do nothing: no process begins before its job."""

    async def run(self, payload: tuple[object, ...], descriptors: Collection[int]) -> Any:
        """See `Runner`."""
        try:
            process = await WorkerProcess.start(self._task, descriptors)
        except StartFailed as error:
            self.restarts += 1
            LOG.error("worker not started", task=self._task.name, reason=str(error))
            raise WorkersUnavailable(self._task.unavailable) from error
        self._processes.add(process)
        try:
            return await reply_in_time(process, payload, self._task.deadline_s)
        finally:
            await process.kill()
            self._processes.discard(process)

    async def close(self) -> None:
        """Do nothing: each process ends with its job."""


class ReuseRunner:
    """Processes that are started on demand and run one job after the other."""

    def __init__(self, task: TaskSpec[Any]) -> None:
        self._task = task
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._backoff = Backoff()
        self.restarts = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """See `Runner`."""
        return tuple(process.pid for process in (*self._idle, *self._busy) if process.is_alive)

    async def prepare(self) -> None:
        """See `Runner`."""
        self._idle.append(await self._take())

    async def run(self, payload: tuple[object, ...], descriptors: Collection[int]) -> Any:
        """See `Runner`."""
        process = await self._take()
        self._busy.add(process)
        try:
            return await reply_in_time(process, payload, self._task.deadline_s)
        finally:
            self._busy.discard(process)
            if process.is_alive:
                self._idle.append(process)
            else:
                self.restarts += 1
                await process.kill()

    async def close(self) -> None:
        """See `Runner`."""
        await asyncio.gather(*(process.kill() for process in self._idle))

    async def _take(self) -> WorkerProcess:
        """Return an idle process that still lives, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            await process.kill()
        return await self._start()

    async def _start(self) -> WorkerProcess:
        """Start a process, in several attempts. Raises `WorkersUnavailable`, at once before the next attempt is due."""
        now = asyncio.get_running_loop().time
        while True:
            if self._backoff.is_down and now() < self._backoff.next_at:
                raise WorkersUnavailable(self._task.unavailable)
            await asyncio.sleep(max(0.0, self._backoff.next_at - now()))
            try:
                process = await WorkerProcess.start(self._task)
            except (StartFailed, Unconfined) as error:
                self.restarts += 1
                delay_s = self._backoff.fail(now())
                LOG.error("worker not started", task=self._task.name, reason=str(error), next_in_s=delay_s)
                if self._backoff.is_down:
                    raise WorkersUnavailable(self._task.unavailable) from error
            else:
                self._backoff.failures = 0
                return process


class ForkRunner:
    """One warm process, which is replaced when it ends, and forks once per job."""

    def __init__(self, task: TaskSpec[Any]) -> None:
        self._task = task
        self._server: asyncio.Future[WorkerProcess | None] = asyncio.get_running_loop().create_future()
        self._backoff = Backoff()
        self._supervision: asyncio.Task[None] | None = None
        self.restarts = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """See `Runner`."""
        server = self._server.result() if self._server.done() else None
        return (server.pid,) if server is not None and server.is_alive else ()

    async def prepare(self) -> None:
        """See `Runner`."""
        await self._ready_server()

    async def run(self, payload: tuple[object, ...], descriptors: Collection[int]) -> Any:
        """See `Runner`. A job is run once more when the server ends, which the job is unlikely to have caused."""
        for _ in range(MAX_ATTEMPTS):
            server = await self._ready_server()
            try:
                async with asyncio.timeout(self._task.deadline_s + self._task.hang_grace_s):
                    return await server.run(payload)
            except TimeoutError:
                await server.kill()
            except WorkerLost:
                pass
            self._forget(server)
        raise WorkersUnavailable(self._task.unavailable)

    async def close(self) -> None:
        """See `Runner`."""
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait({self._supervision})

    async def _ready_server(self) -> WorkerProcess:
        if self._supervision is None:
            self._supervision = asyncio.create_task(self._supervise())
        server = await asyncio.shield(self._server)
        if server is None:
            raise WorkersUnavailable(self._task.unavailable)
        return server

    async def _supervise(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            begun = now()
            reason = await self._serve()
            self.restarts += 1
            if now() - begun > SETTLED_S:
                self._backoff.failures = 0
            delay_s = self._backoff.fail(now())
            LOG.error("worker lost", task=self._task.name, reason=reason, next_in_s=delay_s)
            if self._backoff.is_down and not self._server.done():
                self._server.set_result(None)
            await asyncio.sleep(delay_s)

    async def _serve(self) -> str:
        """Run one server from start to end and return why it ended. It is reaped then, also on cancellation."""
        try:
            server = await WorkerProcess.start(self._task)
        except (StartFailed, Unconfined) as error:
            return str(error)
        if self._server.done():
            self._server = asyncio.get_running_loop().create_future()
        self._server.set_result(server)
        try:
            return f"it ended with status {await server.wait()}"
        finally:
            self._forget(server)
            await server.end()

    def _forget(self, server: WorkerProcess) -> None:
        """Have jobs wait for the next server, if they do not already."""
        if self._server.done() and self._server.result() is server:
            self._server = asyncio.get_running_loop().create_future()


async def reply_in_time(process: WorkerProcess, payload: tuple[object, ...], deadline_s: float) -> Any:
    """Return the reply of a process, or how it ended. At the deadline it is killed."""
    try:
        async with asyncio.timeout(deadline_s):
            return await process.run(payload)
    except TimeoutError:
        return Ended("deadline", -signal.SIGKILL)
    except WorkerLost as lost:
        return Ended(how_it_ended(lost.exit_code), lost.exit_code)


RUNNERS: Final[Mapping[Mode, Callable[[TaskSpec[Any]], Runner]]] = {
    "spawn": SpawnRunner,
    "reuse": ReuseRunner,
    "fork": ForkRunner,
}
