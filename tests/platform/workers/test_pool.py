"""The worker pool with real processes, in all modes: replies, ends, deadlines, fairness, and what is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from tests.platform.process_table import alive, children, command_line
from tests.platform.workers.task_functions import ROOT, Sum, task

from loraplex.platform.errors import ShareExceeded, WorkersUnavailable
from loraplex.platform.workers.messages import (
    Done,
    Ended,
    Failed,
    Refused,
    Report,
    Unavailable,
    encode,
    frame,
)
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import Sandbox, TaskSpec

ONE, OTHER = b"1", b"2"
MODES = ["spawn", "reuse", "fork"]
MIB = 1 << 20
LOW_CPU = Sandbox(data_bytes=256 * MIB, cpu_s=1)


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    await pool.close()
    assert workers() == []


def workers() -> list[int]:
    """The worker processes of this process."""
    return [pid for pid in children(os.getpid()) if b"workers.main" in command_line(pid)]


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


async def total(pool: WorkerPool, spec: TaskSpec[Any], *payload: int) -> Sum:
    reply = await pool.run(spec, payload, ONE)
    assert isinstance(reply, Done), reply
    assert reply.cpu_s < 5
    result: Sum = reply.result
    return result


@pytest.mark.parametrize("mode", MODES)
async def test_results_come_from_another_process(pool: WorkerPool, mode: str) -> None:
    spec = task("add", mode=mode, result=Sum)
    first, second = [await total(pool, spec, 1, number) for number in (2, 3)]
    assert (first.total, second.total) == (3, 4)
    assert os.getpid() not in (first.pid, second.pid)
    assert (first.pid == second.pid) == (mode == "reuse")
    assert pool.stats(spec).restarts == pool.stats(spec).running == 0


@pytest.mark.parametrize("mode", MODES)
async def test_a_setup_prepares_the_function(pool: WorkerPool, mode: str) -> None:
    assert (await total(pool, task("adder", mode=mode, result=Sum, setup=40), 2)).total == 42


async def test_an_error_of_the_input_arrives_with_its_fields_and_any_other_by_class(pool: WorkerPool) -> None:
    spec = task("misbehave")
    refused = await pool.run(spec, ("refuse",), ONE)
    assert refused == Refused("Upset", "too ? bad", "field", "/a/0")
    assert await pool.run(spec, ("refuse by surrogates",), ONE) == Refused("Upset", "bad", "?", "/?")
    assert await pool.run(spec, ("panic",), ONE) == Failed("Panic")
    assert await pool.run(spec, ("surrogate",), ONE) == Failed("UnicodeEncodeError")
    assert await pool.run(spec, (1,), ONE) == Failed("ValidationError")
    noise = await pool.run(spec, ("noise",), ONE)
    assert isinstance(noise, Done) and noise.result == "noise"
    assert len(workers()) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("spin", ("cpu", -signal.SIGXCPU)),
        ("allocate", ("memory", 71)),
        ("abort", ("memory", -signal.SIGABRT)),
        ("kill", ("memory", -signal.SIGKILL)),
        ("segfault", ("crashed", -signal.SIGSEGV)),
        ("exit", ("crashed", 3)),
        ("babble", ("memory", -signal.SIGKILL)),
    ],
)
async def test_a_process_that_ends_is_reported_and_replaced(
    pool: WorkerPool, mode: str, how: str, expected: tuple[str, int]
) -> None:
    spec = task("misbehave", mode=mode, sandbox=LOW_CPU)
    ended = await pool.run(spec, (how,), ONE)
    assert isinstance(ended, Ended) and (ended.how, ended.exit_code) == expected
    after = await pool.run(spec, ("well",), ONE)
    assert isinstance(after, Done) and after.result == "well"


@pytest.mark.parametrize("mode", MODES)
async def test_a_deadline_kills_and_counts_from_a_ready_process(pool: WorkerPool, mode: str) -> None:
    spec = task("misbehave", mode=mode, deadline_s=0.2)
    begun = time.monotonic()
    ended = await pool.run(spec, ("sleep",), ONE)
    assert isinstance(ended, Ended) and ended.how == "deadline"
    assert time.monotonic() - begun < 50
    # A fork server lives on.
    assert [children(pid) for pid in workers()] == ([[]] if mode == "fork" else [])


async def test_a_process_that_reports_what_was_not_asked_is_killed(pool: WorkerPool) -> None:
    ended = await pool.run(task("report_another_job", mode="spawn"), (), ONE)
    assert ended == Ended("memory", -signal.SIGKILL), "before the deadline"


NO_UTF_8 = b"\xa1\xff"
NESTED = b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize("result", [NO_UTF_8, NESTED], ids=["text", "nesting"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_reply_that_no_library_decodes_ends_its_job(
    pool: WorkerPool, mode: str, result: bytes
) -> None:
    reply = encode(Done(None)).replace(b"\xc0", result)
    message = reply if mode == "fork" else encode(Report(0, reply))
    assert await pool.run(task("send", mode=mode), (frame(message), "stay"), ONE) == Ended("crashed", 0)


@pytest.mark.parametrize("member", [b"\xa6reason" + NO_UTF_8, b"\xa1x" + NESTED], ids=["text", "nesting"])
async def test_a_message_that_no_library_decodes_ends_its_process(pool: WorkerPool, member: bytes) -> None:
    message = encode(Unavailable("")).replace(b"\xa6reason\xa0", member)
    ended = await pool.run(task("send", mode="spawn"), (frame(message), "stay"), ONE)
    assert ended == Ended("memory", -signal.SIGKILL), "before the deadline"


async def test_a_fork_that_has_replied_is_ended(pool: WorkerPool) -> None:
    spec = task("send", mode="fork", deadline_s=600.0)
    assert await pool.run(spec, (frame(encode(Done(1))), "stay"), ONE) == Done(1)
    await until(lambda: not children(pool.stats(spec).pids[0]))


async def test_a_fork_that_closes_its_pipe_does_not_stop_its_server(pool: WorkerPool) -> None:
    spec = task("send", mode="fork", deadline_s=600.0)
    assert await pool.run(spec, (b"", "close"), ONE) == Ended("memory", -signal.SIGKILL, cpu_s=ANY)
    assert pool.stats(spec).restarts == 0


async def test_a_process_that_has_closed_its_pipe_gets_no_other_job(pool: WorkerPool) -> None:
    spec = task("send")
    first = frame(encode(Report(0, encode(Done(1)))))
    assert await pool.run(spec, (first, "close"), ONE) == Done(1)
    # Nothing shows that the gateway has read the end of the pipe; the process is killed seconds later.
    await asyncio.sleep(0.2)
    assert await pool.run(spec, (first, "stay"), OTHER) == Done(1)


async def test_a_result_that_is_too_large_or_of_another_type_is_none(pool: WorkerPool) -> None:
    ended = await pool.run(task("misbehave", max_reply_bytes=MIB), ("large",), ONE)
    assert isinstance(ended, Ended) and ended.exit_code == -signal.SIGKILL
    assert await pool.run(task("misbehave", result=Sum), ("well",), ONE) == Ended("crashed", 0)


async def test_a_worker_has_nothing_of_this_process(pool: WorkerPool) -> None:
    os.set_inheritable(inherited := os.open("/dev/null", os.O_RDONLY), True)
    try:
        reply = await pool.run(task("surroundings"), (), ONE)
    finally:
        os.close(inherited)
    assert isinstance(reply, Done)
    found = reply.result
    assert found["environment"] == [f"PYTHONPATH={ROOT}", ""]
    # Standard streams, the descriptor of replies, and the folder being listed.
    assert len(found["descriptors"]) == 5 and found["streams"] == ["/dev/null"] * 2
    assert found["niceness"] == max(10, os.getpriority(os.PRIO_PROCESS, 0)) and found["oom"] == 1000
    assert found["core"] == found["file size"] == [0, 0]
    assert found["has a process group"] and found["session"] == os.getsid(0)
    assert found["safe path"] and found["threads"] == 1
    packages = {name.split(".")[1] for name in found["modules"]}
    assert packages == {"platform"} and "loraplex.platform.config" not in found["modules"]


async def test_a_process_inherits_the_files_of_its_job(pool: WorkerPool) -> None:
    opened: list[str] = []

    @asynccontextmanager
    async def this_file() -> AsyncIterator[list[tuple[int, int]]]:
        descriptor = os.open(__file__, os.O_RDONLY)
        opened.append("open")
        try:
            yield [(descriptor, os.fstat(descriptor).st_size)]
            assert not os.get_inheritable(descriptor)
        finally:
            os.close(descriptor)
            opened.append("closed")

    spec = task("read", mode="spawn", concurrent=1)
    content = Path(__file__).read_bytes()
    for reply in await asyncio.gather(
        *(pool.run(spec, (100,), tenant, files=this_file()) for tenant in (ONE, OTHER))
    ):
        assert isinstance(reply, Done) and reply.result == [len(content), content[:100]]
    assert opened == ["open", "closed"] * 2, "a job that waits has nothing open"


async def test_a_job_whose_files_do_not_open_starts_no_process(pool: WorkerPool) -> None:
    @asynccontextmanager
    async def missing() -> AsyncIterator[list[tuple[int, int]]]:
        os.open("/nonexistent", os.O_RDONLY)
        yield []

    with pytest.raises(FileNotFoundError):
        await pool.run(task("read", mode="spawn"), (100,), ONE, files=missing())
    assert workers() == [] and pool.stats(task("read")).running == 0


async def test_without_a_process_tasks_are_unavailable(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in MODES:
        with pytest.raises(WorkersUnavailable, match="sums cannot be computed now"):
            await pool.run(task("broken_setup", mode=mode, setup=1), (2,), ONE)
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    spec = task("add")
    with pytest.raises(WorkersUnavailable) as refused:
        await pool.run(spec, (1, 2), ONE)
    assert "/" not in str(refused.value)
    begun = time.monotonic()
    with pytest.raises(WorkersUnavailable):
        await pool.run(spec, (1, 2), ONE)
    assert time.monotonic() - begun < 5, "after three failures callers do not wait for the next attempt"


async def test_a_process_that_cannot_be_confined_runs_nothing(pool: WorkerPool) -> None:
    sandbox = Sandbox(filter_system_calls=True)
    with pytest.raises(WorkersUnavailable, match="cannot be confined here: 2 threads"):
        await pool.run(task("with_a_thread", mode="spawn", setup=1, sandbox=sandbox), (2,), ONE)


async def test_where_processes_are_not_confined_none_is_started_per_call(pool: WorkerPool) -> None:
    spec = task("with_a_thread", setup=1, sandbox=Sandbox(filter_system_calls=True))
    for _ in range(8):
        with pytest.raises(WorkersUnavailable):
            await pool.run(spec, (2,), ONE)
    assert pool.stats(spec).restarts == 3


async def test_a_cancelled_call_does_not_end_the_process_of_other_forks(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.platform.workers.worker_process.EXIT_GRACE_S", 0.1)
    spec = task("misbehave", mode="fork")
    await pool.start(spec)
    (server,) = pool.stats(spec).pids
    left = asyncio.create_task(pool.run(spec, ("sleep",), ONE))
    await until(lambda: bool(children(server)))
    # As on a machine that gives it no CPU time.
    os.kill(server, signal.SIGSTOP)
    left.cancel()
    await asyncio.wait({left})
    await asyncio.sleep(0.3)
    os.kill(server, signal.SIGCONT)
    reply = await pool.run(spec, ("well",), OTHER)
    assert isinstance(reply, Done) and reply.result == "well"
    assert pool.stats(spec).pids == (server,) and pool.stats(spec).restarts == 0


async def test_a_cancelled_call_kills_a_process_of_its_own(pool: WorkerPool) -> None:
    spec = task("misbehave", mode="spawn")
    running, waiting = (asyncio.create_task(pool.run(spec, ("sleep",), ONE)) for _ in range(2))
    await until(lambda: len(pool.stats(spec).pids) == 1)
    assert pool.stats(spec).waiting == 1
    for call in (waiting, running):
        call.cancel()
    await asyncio.gather(waiting, running, return_exceptions=True)
    assert waiting.cancelled() and running.cancelled()
    assert workers() == [] and pool.stats(spec).waiting == pool.stats(spec).running == 0


async def test_a_cancelled_call_leaves_no_reply_to_the_next(pool: WorkerPool) -> None:
    spec = task("misbehave")
    await pool.start(spec)
    (pid,) = pool.stats(spec).pids
    left = asyncio.create_task(pool.run(spec, ("nap",), ONE))
    await until(lambda: pool.stats(spec).running == 1)
    for _ in range(3):
        left.cancel()
        await asyncio.sleep(0)
    reply = await pool.run(spec, ("mine",), ONE)
    assert isinstance(reply, Done) and reply.result == "mine" and left.cancelled()
    assert pool.stats(spec).pids == (pid,)


async def test_tenants_alternate_and_the_queue_is_bounded(pool: WorkerPool) -> None:
    spec = task("misbehave", queued_per_tenant=2, queued=3)
    ended: list[bytes] = []

    async def run(tenant: bytes) -> None:
        await pool.run(spec, ("nap",), tenant)
        ended.append(tenant)

    calls = [asyncio.create_task(run(tenant)) for tenant in (ONE, ONE, ONE, OTHER)]
    await asyncio.sleep(0)
    with pytest.raises(ShareExceeded, match="2 sums of this tenant wait already"):
        await pool.run(spec, ("well",), ONE)
    with pytest.raises(WorkersUnavailable, match="3 sums wait already"):
        await pool.run(spec, ("well",), b"3")
    await asyncio.gather(*calls)
    assert ended == [ONE, OTHER, ONE, ONE]


async def test_no_wait_is_longer_than_queue_timeout_s(pool: WorkerPool) -> None:
    spec = task("misbehave", queue_timeout_s=0.5)
    calls = [asyncio.create_task(pool.run(spec, ("sleep",), ONE)) for _ in range(2)]
    for call in calls:
        with pytest.raises(WorkersUnavailable, match=r"no result for 0\.5 s"):
            await call


async def test_close_ends_everything_and_fails_waiting_calls() -> None:
    pool = WorkerPool()
    specs = [task("misbehave", mode=mode) for mode in MODES]
    calls = [asyncio.create_task(pool.run(spec, ("sleep",), ONE)) for spec in specs for _ in range(2)]
    await until(lambda: all(pool.stats(spec).pids for spec in specs))
    await pool.close()
    for call in calls:
        with pytest.raises(WorkersUnavailable, match="shutting down"):
            await call
    with pytest.raises(WorkersUnavailable, match="shutting down"):
        await pool.run(specs[0], ("well",), ONE)
    assert workers() == []


GATEWAY = """
import asyncio, sys
from loraplex.platform.workers.pool import WorkerPool
from tests.platform.workers.task_functions import task

pool = WorkerPool()
asyncio.run(pool.run(task("misbehave", mode=sys.argv[1]), ("sleep",), b""))
"""


@pytest.mark.parametrize("mode", MODES)
def test_no_worker_outlives_a_killed_gateway(mode: str) -> None:
    gateway = subprocess.Popen(
        [sys.executable, "-c", GATEWAY, mode], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        deadline = time.monotonic() + 60
        while not (pids := children(gateway.pid)):
            assert time.monotonic() < deadline and gateway.poll() is None
            time.sleep(0.05)
    finally:
        gateway.kill()
        gateway.wait()
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
