"""`WorkerProcess`: one worker process as the gateway sees it: start, jobs, end.

Invariant: each job gets its reply, or `WorkerLost` when the process ends first; a process that breaks the protocol is killed.
"""

import asyncio
import os
from asyncio.subprocess import Process
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import count
from typing import Any, Final

import msgspec

from loraplex.platform.processes.child_process import spawn_child
from loraplex.platform.workers.messages import (
    LENGTH_BYTES,
    Cancel,
    Done,
    Ended,
    Failed,
    Job,
    Ready,
    Refused,
    Report,
    Start,
    Unavailable,
    decode_status,
    encode,
    untrusted,
)
from loraplex.platform.workers.task import TaskSpec

MODULE: Final = "loraplex.platform.workers.main"
EXIT_GRACE_S: Final = 2.0
ENVELOPE_BYTES: Final = 64
"""Bytes of a report around its reply, at most."""


class StartFailed(Exception):
    """No process, or none that is ready in time. The text may name files of this machine."""


class Unconfined(Exception):
    """The system does not confine the process or has none to give. It has read nothing."""


class WorkerLost(Exception):
    """The process ended before its reply. `exit_code` below 0 is the number of the signal, negated."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"a worker process ended with {exit_code}")
        self.exit_code = exit_code


class WorkerProcess:
    """A ready process. Create it with `start`, on the event loop that uses it."""

    def __init__(self, process: Process, task: TaskSpec[Any]) -> None:
        self._process = process
        self._task = task
        self._decode_reply = _reply_decoder(task.result)
        self._ids = count()
        self._replies: dict[int, asyncio.Future[bytes]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, task: TaskSpec[Any], descriptors: Collection[int] = ()) -> "WorkerProcess":
        """Start a process and wait until it is ready. Raises `StartFailed` or `Unconfined`."""
        try:
            process = await spawn_child(
                MODULE, task.name, environment=task.environment, descriptors=descriptors
            )
        except OSError as error:
            raise StartFailed(f"no process could be started: {error.strerror}") from error
        worker = cls(process, task)
        try:
            async with asyncio.timeout(task.start_timeout_s):
                await worker._become_ready(tuple(descriptors))
        except TimeoutError as error:
            await worker._kill_and_reap()
            raise StartFailed(f"it was not ready within {task.start_timeout_s:g} s") from error
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise StartFailed(f"it ended with status {await worker._reap()}") from error
        except BaseException:
            await worker._kill_and_reap()
            raise
        worker._reading = asyncio.create_task(worker._read())
        return worker

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process takes jobs. One that is being ended has no input any more."""
        stdin = self._process.stdin
        return stdin is not None and not stdin.is_closing() and self._process.returncode is None

    async def run(self, payload: tuple[object, ...]) -> Any:
        """Return the `Reply` to one job. A cancelled call kills the job: the fork, or the process.

        Raises `WorkerLost`, or `Unconfined` for a fork that did not begin.
        """
        if not self.is_alive:
            raise WorkerLost(self._process.returncode or 0)
        job_id, loop = next(self._ids), asyncio.get_running_loop()
        reply = self._replies[job_id] = loop.create_future()
        overdue_at = loop.time() + self._task.deadline_s + self._task.hang_grace_s
        try:
            self._send(Job(job_id, payload))
            await asyncio.wait({reply})
        except asyncio.CancelledError:
            await self._kill_job(job_id, overdue_at)
            raise
        finally:
            del self._replies[job_id]
        return self._decoded(reply.result())

    async def kill(self) -> None:
        """Kill the process and reap it."""
        self._kill()
        await self.wait()

    async def end(self) -> None:
        """End the process and reap it. Its input closes first, so that it can end its forks itself."""
        await self._reap()
        await self.wait()

    async def wait(self) -> int:
        """Return the exit code when the process has ended and its jobs have been failed."""
        if self._reading is not None:
            await asyncio.wait({self._reading})
        return await self._process.wait()

    async def _become_ready(self, descriptors: tuple[int, ...]) -> None:
        task = self._task
        start = Start(
            parent_pid=os.getpid(),
            function=task.function,
            setup=None if task.setup is None else encode((task.setup,)),
            refusals=frozenset(each.__name__ for each in task.refusals),
            forks=task.mode == "fork",
            sandbox=task.sandbox,
            deadline_s=task.deadline_s,
            max_reply_bytes=task.max_reply_bytes,
            descriptors=descriptors,
        )
        self._send(start)
        match await self._receive():
            case Ready():
                return
            case Unavailable(reason):
                await self._reap()
                raise Unconfined(reason)
            case _:
                raise msgspec.DecodeError("a report before any job")

    async def _read(self) -> None:
        """Deliver replies until the process ends; reap it and fail the jobs it left open.

        A process that reports what is no open job is killed: it could keep the event loop busy.
        """
        try:
            while isinstance(report := await self._receive(), Report):
                reply = self._replies.get(report.job_id)
                if reply is None or reply.done():
                    break
                reply.set_result(report.reply)
            self._kill()
        except (OSError, EOFError):
            pass  # the usual end of a process; its exit code tells more
        except msgspec.DecodeError:
            self._kill()
        exit_code = await self._reap()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(WorkerLost(exit_code))

    async def _receive(self) -> Ready | Unavailable | Report:
        """Return the next message. Raises `EOFError` at the end of output, `DecodeError` for anything but a message."""
        stream = self._process.stdout
        if stream is None:
            raise EOFError
        size = int.from_bytes(await stream.readexactly(LENGTH_BYTES), "big")
        if size > self._task.max_reply_bytes + ENVELOPE_BYTES:
            raise msgspec.DecodeError(f"a message of {size} bytes")
        return decode_status(await stream.readexactly(size))

    def _send(self, message: Start | Job[tuple[object, ...]] | Cancel) -> None:
        """Send a message. A process that has ended gets none, which `_read` notices."""
        stream = self._process.stdin
        if stream is not None and not stream.is_closing():
            data = encode(message)
            stream.write(len(data).to_bytes(LENGTH_BYTES, "big"))
            stream.write(data)

    def _decoded(self, reply: bytes) -> Any:
        try:
            outcome = self._decode_reply(reply)
        except msgspec.DecodeError:
            return Ended("crashed", 0)
        if isinstance(outcome, Unavailable):
            raise Unconfined(outcome.reason)
        return outcome

    async def _kill_job(self, job_id: int, overdue_at: float) -> None:
        """Kill one job. A fork server that has not reported its end at `overdue_at` is killed as a whole.

        That is not earlier than without the cancellation, because other tenants' jobs run in that process too.
        """
        reply = self._replies[job_id]
        if self._task.mode == "fork":
            self._send(Cancel(job_id))
            await asyncio.wait({reply}, timeout=max(0.0, overdue_at - asyncio.get_running_loop().time()))
        if not reply.done():
            await self.kill()
        reply.exception()  # read, or asyncio would log it

    def _kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _kill_and_reap(self) -> int:
        self._kill()
        return await self._reap()

    async def _reap(self) -> int:
        """Close the process's input, kill it if it does not end by itself, and return its exit code."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_GRACE_S):
                return await self._process.wait()
        self._kill()
        return await self._process.wait()


def _reply_decoder(result: Any) -> Callable[[bytes], Any]:
    return untrusted(msgspec.msgpack.Decoder(Done[result] | Refused | Failed | Ended | Unavailable).decode)
