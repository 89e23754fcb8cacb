"""The loop of a warm process: reads jobs, forks one child per job, reports how each ended.

Invariants: no child outlives its deadline, and each job gets exactly one report. What a task allocates never gets into this
process, and a child never returns to the code that forked it.
"""

import gc
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

import msgspec

from loraplex.platform.workers.messages import (
    LENGTH_BYTES,
    Cancel,
    Ended,
    Job,
    MessageReader,
    Report,
    Start,
    Unavailable,
    decode_request,
    encode,
    write_message,
)
from loraplex.platform.workers.process_end import (
    BROKEN_STATUS,
    MEMORY_STATUS,
    UNCONFINED_STATUS,
    how_it_ended,
)
from loraplex.platform.workers.sandbox import STANDARD_STREAMS, close_descriptors_but, discard_output, enter
from loraplex.platform.workers.task import How

READ_BYTES: Final = 65_536


@dataclass(slots=True)
class RunningJob:
    """A forked child. `pipe` delivers its reply; `end` is why it was killed; `is_reported`: its reply was passed on."""

    job_id: int
    pid: int
    pipe: int
    started: float
    written: bytearray = field(default_factory=bytearray)
    end: How | None = None
    is_reported: bool = False


class ForkServer:
    """Runs jobs until its input ends. `task` runs in the child and returns an encoded reply."""

    def __init__(
        self,
        task: Callable[[msgspec.Raw], bytes],
        start: Start,
        report: Callable[[Report], None],
    ) -> None:
        self._task = task
        self._start = start
        self._report = report
        self._running: dict[int, RunningJob] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, requests: MessageReader) -> None:
        """Return when `requests` end; all children are dead then."""
        self._selector.register(requests.descriptor, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._until_next_deadline()):
                if key.data is not None:
                    self._receive_from(key.data)
                    continue
                arrived = requests.arrived()
                if arrived is None:
                    return self._end_all()
                for message in arrived:
                    self._execute(message)
            self._kill_overdue()

    def _execute(self, message: bytes) -> None:
        match decode_request(message):
            case Cancel(job_id):
                if job_id in self._running:
                    self._kill(self._running[job_id], "cancelled")
            case job:
                self._fork(job)

    def _fork(self, job: Job[msgspec.Raw]) -> None:
        reading, writing = os.pipe()
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            return self._send(job.job_id, Unavailable(error.strerror or "no process"))
        if pid == 0:
            self._run_child(job.payload, writing, parent_pid)
        os.close(writing)
        running = RunningJob(job.job_id, pid, reading, time.monotonic())
        self._running[job.job_id] = running
        self._selector.register(reading, selectors.EVENT_READ, running)

    def _run_child(self, payload: msgspec.Raw, pipe: int, parent_pid: int) -> NoReturn:
        """Run the forked process to its end: confine, run, write the reply."""
        status = UNCONFINED_STATUS
        try:
            gc.disable()
            discard_output(*STANDARD_STREAMS)
            close_descriptors_but({pipe})
            enter(self._start.sandbox, parent_pid)
            status = BROKEN_STATUS
            write_message(pipe, self._task(payload))
            status = 0
        except MemoryError:
            status = MEMORY_STATUS
        finally:
            os._exit(status)

    def _receive_from(self, job: RunningJob) -> None:
        """Report a reply before its process has ended, which takes as long as a small task."""
        if data := os.read(job.pipe, READ_BYTES):
            job.written += data
            self._pass_on(job)
            return
        self._selector.unregister(job.pipe)
        os.close(job.pipe)
        del self._running[job.job_id]
        # It may have closed its pipe and run on. One that has ended keeps its exit code.
        os.kill(job.pid, signal.SIGKILL)
        _, status, usage = os.wait4(job.pid, 0)
        if not job.is_reported:
            code = os.waitstatus_to_exitcode(status)
            self._send(job.job_id, _end_of(job, code, usage.ru_utime + usage.ru_stime))

    def _pass_on(self, job: RunningJob) -> None:
        """Report the reply once it is whole. A child that was killed, or writes too much, gets no reply through."""
        length = int.from_bytes(job.written[:LENGTH_BYTES], "big")
        if len(job.written) >= LENGTH_BYTES and length > self._start.max_reply_bytes:
            job.written.clear()
            return self._kill(job, "memory")
        if LENGTH_BYTES + length <= len(job.written) and job.end is None and not job.is_reported:
            job.is_reported = True
            self._report(Report(job.job_id, bytes(job.written[LENGTH_BYTES : LENGTH_BYTES + length])))
            # Its slot is free now, so it must neither run on nor write more.
            self._kill(job, "cancelled")

    def _send(self, job_id: int, reply: Ended | Unavailable) -> None:
        self._report(Report(job_id, encode(reply)))

    def _until_next_deadline(self) -> float | None:
        if not self._running:
            return None
        earliest = min(job.started for job in self._running.values())
        return max(0.0, earliest + self._start.deadline_s - time.monotonic())

    def _kill_overdue(self) -> None:
        overdue = time.monotonic() - self._start.deadline_s
        for job in self._running.values():
            if job.started <= overdue and job.end is None:
                self._kill(job, "deadline")

    def _kill(self, job: RunningJob, end: How) -> None:
        """Kill the child. It is not reaped before its pipe has ended, so its id cannot be reused."""
        if job.end is None:
            job.end = end
            os.kill(job.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        for job in self._running.values():
            self._kill(job, "cancelled")
            os.waitpid(job.pid, 0)


def _end_of(job: RunningJob, exit_code: int, cpu_s: float) -> Ended | Unavailable:
    if job.end is None and exit_code == UNCONFINED_STATUS:
        return Unavailable("a fork cannot be confined")
    return Ended(job.end or how_it_ended(exit_code), exit_code, cpu_s)
