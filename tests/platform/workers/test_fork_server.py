"""The report of each end of a forked job: real processes, real limits."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.platform.process_table import children, command_line

from loraplex.platform.workers.fork_server import ForkServer
from loraplex.platform.workers.messages import (
    Cancel,
    Done,
    Ended,
    Failed,
    Job,
    MessageReader,
    Refused,
    Report,
    Start,
    Unavailable,
    encode,
    frame,
)
from loraplex.platform.workers.task import Sandbox
from loraplex.platform.workers.task_function import TaskFunction

MIB = 1 << 20
SANDBOX = Sandbox(cpu_s=1, data_bytes=64 * MIB, stack_bytes=4 * MIB)
DEADLINE_S = 50.0
decode_reply = msgspec.msgpack.Decoder(Done[Any] | Refused | Failed | Ended | Unavailable).decode


class Upset(Exception):
    pass


class Panic(BaseException):
    """What a Rust library raises when it breaks down."""


def well() -> int:
    return 3


def burn() -> int:
    while True:
        pass


def sleep() -> int:
    time.sleep(60)
    return 1


def segfault() -> int:
    # pytest's handler would write the stacks of a large process first, within the CPU second of the job.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1


def abort() -> int:
    os.abort()


def allocate() -> int:
    # More than the heap of a large process, which the child inherits, can have to spare.
    return len([bytearray(256 * MIB) for _ in range(32)])


def refuse() -> int:
    raise Upset("no such rule")


def panic() -> int:
    raise Panic


def write_a_lot() -> int:
    os.write(1, b"x" * MIB)
    os.write(2, b"x" * MIB)
    return 3


def write_into_the_pipe() -> int:
    (pipe,) = (int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2 and is_pipe(int(name)))
    while True:
        os.write(pipe, b"x" * MIB)


def is_pipe(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:")
    except FileNotFoundError:
        return False


def descriptors() -> int:
    """The standard streams, the pipe, and the folder being listed."""
    return len(os.listdir("/proc/self/fd")) - 2


def reports(
    function: Callable[[], int],
    *requests: Job[tuple[()]] | Cancel,
    expected: int = 1,
    sandbox: Sandbox = SANDBOX,
    deadline_s: float = DEADLINE_S,
) -> list[tuple[int, Any]]:
    """What a server reports until it has reported `expected` ends."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(frame(encode(request)) for request in requests))
    reported: list[tuple[int, Any]] = []

    def report(message: Report) -> None:
        reported.append((message.job_id, decode_reply(message.reply)))
        if len(reported) == expected:
            os.close(writing)

    server(function, report, sandbox, deadline_s).serve(MessageReader(reading))
    os.close(reading)
    return reported


def server(
    function: Callable[[], int], report: Callable[[Report], None], sandbox: Sandbox, deadline_s: float
) -> ForkServer:
    start = Start(
        parent_pid=os.getppid(),
        function="",
        setup=None,
        refusals=frozenset({"Upset"}),
        forks=True,
        sandbox=sandbox,
        deadline_s=deadline_s,
        max_reply_bytes=MIB,
        descriptors=(),
    )
    return ForkServer(TaskFunction(function, start.refusals), start, report)


def forks() -> list[int]:
    """Children that are copies of this process or were not waited for."""
    mine = command_line(os.getpid())
    return [child for child in children(os.getpid()) if command_line(child) in (mine, b"")]


def job(job_id: int = 7) -> Job[tuple[()]]:
    return Job(job_id, ())


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        (well, 3),
        (write_a_lot, 3),
        (descriptors, 3),
        (refuse, Refused("Upset", "no such rule")),
        (panic, Failed("Panic")),
        (burn, "cpu"),
        (segfault, "crashed"),
        (abort, "memory"),
        (allocate, "memory"),
        (write_into_the_pipe, "memory"),
    ],
)
def test_outcome(function: Callable[[], int], outcome: object) -> None:
    begun = time.monotonic()
    ((job_id, reply),) = reports(function, job())
    assert job_id == 7 and time.monotonic() - begun < DEADLINE_S
    match reply:
        case Done():
            assert reply.result == outcome
        case Ended():
            assert reply.how == outcome
        case _:
            assert reply == outcome
    assert forks() == []


def test_a_deadline_says_how_much_time_the_job_had() -> None:
    burned, slept = ended_by_deadline(burn), ended_by_deadline(sleep)
    # Both paid for the fork of a large process as well, which takes tenths of a second on a slow machine.
    assert slept.cpu_s < 1 and burned.cpu_s > slept.cpu_s + 0.1


def ended_by_deadline(function: Callable[[], int]) -> Ended:
    begun = time.monotonic()
    # At its usual priority a job gets a tenth of a busy core: too little here to tell it from one that waits.
    ((_, ended),) = reports(function, job(), sandbox=Sandbox(cpu_s=2, niceness=0), deadline_s=1.5)
    assert isinstance(ended, Ended) and ended.how == "deadline" and ended.exit_code == -signal.SIGKILL
    assert 1.5 <= time.monotonic() - begun < 30
    return ended


def test_without_a_process_a_job_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "no process")

    monkeypatch.setattr(os, "fork", fork)
    assert reports(burn, job()) == [(7, Unavailable("no process"))]


def test_a_fork_that_cannot_be_confined_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr("loraplex.platform.workers.fork_server.enter", enter)
    assert reports(well, job()) == [(7, Unavailable("a fork cannot be confined"))]


def test_jobs_run_in_parallel_and_are_cancelled() -> None:
    begun = time.monotonic()
    requests = [job(number) for number in range(4)] + [Cancel(number) for number in (0, 1, 2, 3, 99)]
    reported = reports(sleep, *requests, expected=4)
    assert {(number, ended.how) for number, ended in reported} == {(i, "cancelled") for i in range(4)}
    assert time.monotonic() - begun < DEADLINE_S


def test_the_end_of_input_ends_running_jobs() -> None:
    reading, writing = os.pipe()
    os.write(writing, frame(encode(job())))
    os.close(writing)
    reported: list[Report] = []
    server(sleep, reported.append, SANDBOX, DEADLINE_S).serve(MessageReader(reading))
    os.close(reading)
    assert reported == []
    assert forks() == []
