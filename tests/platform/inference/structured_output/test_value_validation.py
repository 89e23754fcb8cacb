"""Values validated in worker processes: valid, invalid, and in time, whatever the schema demands."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.platform.process_table import alive, children, command_line

from loraplex.grammar.errors import SchemaNotSatisfied
from loraplex.platform.errors import WorkersUnavailable
from loraplex.platform.inference.structured_output.value_validation import (
    ValueValidation,
    value_validation_task,
)
from loraplex.platform.workers.messages import Failed
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import TaskSpec

ONE, OTHER = b"1" * 32, b"2" * 32
UNIQUE = json.dumps({"type": "array", "uniqueItems": True})


def doubling(levels: int) -> str:
    """Return a schema that needs 2 ** levels evaluations of one value."""
    definitions: dict[str, object] = {"d0": {"type": "array", "uniqueItems": True}}
    for level in range(levels):
        definitions[f"d{level + 1}"] = {"anyOf": [{"$ref": f"#/$defs/d{level}"}] * 2}
    return json.dumps({"$defs": definitions, "$ref": f"#/$defs/d{levels}"})


def validation_processes() -> list[int]:
    """Return this process's validation processes."""
    return [pid for pid in children(os.getpid()) if b"value_validation" in command_line(pid)]


@pytest.fixture
async def validators() -> AsyncIterator[ValueValidation]:
    pool = WorkerPool()
    yield ValueValidation(pool, value_validation_task(os.environ, deadline_s=1.0))
    await pool.close()


async def test_yes_and_no_with_keyword_and_place(validators: ValueValidation) -> None:
    await validators.validate(ONE, UNIQUE, "[1, 2]")
    with pytest.raises(SchemaNotSatisfied, match="uniqueItems"):
        await validators.validate(ONE, UNIQUE, "[1, 1]")
    with pytest.raises(SchemaNotSatisfied):
        await validators.validate(ONE, UNIQUE, "[1,")
    await validators.validate(ONE, json.dumps({"maximum": 10**40}), str(10**39))
    await validators.validate(ONE, UNIQUE, json.dumps(["é" * 200_000, "\u2028\n"]))


async def test_an_endless_validation_is_killed_and_the_next_one_runs(validators: ValueValidation) -> None:
    begun = time.monotonic()
    with pytest.raises(SchemaNotSatisfied, match=r"within 1 s"):
        await validators.validate(ONE, doubling(30), "[1, 1]")
    assert time.monotonic() - begun < 30
    await validators.validate(ONE, UNIQUE, "[1, 2]")


async def test_one_tenants_long_validations_leave_a_process_to_others(validators: ValueValidation) -> None:
    await asyncio.gather(*(validators.validate(tenant, UNIQUE, "[1, 2]") for tenant in (ONE, OTHER)))
    greedy = [asyncio.create_task(validators.validate(ONE, doubling(30), "[1, 1]")) for _ in range(4)]
    await asyncio.sleep(0.3)
    await validators.validate(OTHER, UNIQUE, "[1, 2]")
    assert sum(task.done() for task in greedy) <= 2
    ended = await asyncio.gather(*greedy, return_exceptions=True)
    assert all(isinstance(each, SchemaNotSatisfied) for each in ended)


async def test_a_cancelled_call_leaves_no_result_to_the_next(validators: ValueValidation) -> None:
    leaving = asyncio.create_task(validators.validate(ONE, doubling(30), "[1, 1]"))
    await asyncio.sleep(0.4)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await validators.validate(ONE, UNIQUE, "[1, 2]")
    with pytest.raises(SchemaNotSatisfied, match="uniqueItems"):
        await validators.validate(ONE, UNIQUE, "[1, 1]")


async def test_an_idle_process_that_was_killed_is_replaced(
    validators: ValueValidation,
) -> None:
    await validators.validate(ONE, UNIQUE, "[1, 2]")
    [pid] = validation_processes()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while validation_processes():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    await validators.validate(ONE, UNIQUE, "[1, 2]")
    assert validation_processes() != [pid]


async def test_a_stop_signal_to_all_processes_does_not_end_a_validation(validators: ValueValidation) -> None:
    await validators.validate(ONE, UNIQUE, "[1, 2]")
    [pid] = validation_processes()
    for stop in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, stop)
    await asyncio.sleep(0.2)
    await validators.validate(ONE, UNIQUE, "[1, 2]")
    assert validation_processes() == [pid]


async def test_validation_processes_have_low_priority(validators: ValueValidation) -> None:
    await validators.validate(ONE, UNIQUE, "[1, 2]")
    [pid] = validation_processes()
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)


async def test_no_wait_is_longer_than_queue_timeout_s() -> None:
    pool = WorkerPool()
    task = value_validation_task(os.environ, deadline_s=20.0, queue_timeout_s=1.0)
    validators = ValueValidation(pool, task)
    try:
        await pool.start(task)
        asked = [validators.validate(ONE, doubling(30), "[1, 1]") for _ in range(3)]
        begun = time.monotonic()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert time.monotonic() - begun < 15
        assert all(isinstance(each, WorkersUnavailable) for each in ended)
    finally:
        await pool.close()
    assert validation_processes() == []


GATEWAY = """
import asyncio, os, sys
from loraplex.platform.inference.structured_output.value_validation import ValueValidation, value_validation_task
from loraplex.platform.workers.pool import WorkerPool

async def main():
    validators = ValueValidation(WorkerPool(), value_validation_task(os.environ, deadline_s=50))
    await validators.validate(b"a", sys.argv[1], "[1, 1]")

asyncio.run(main())
"""


def test_no_validation_outlives_a_killed_gateway() -> None:
    gateway = subprocess.Popen([sys.executable, "-c", GATEWAY, doubling(40)])
    try:
        deadline = time.monotonic() + 60
        while not any(map(is_ready, children(gateway.pid))):
            assert time.monotonic() < deadline and gateway.poll() is None
            time.sleep(0.05)
        [process] = children(gateway.pid)
    finally:
        gateway.kill()
        gateway.wait()
    deadline = time.monotonic() + 60
    while alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_ready(pid: int) -> bool:
    """Return whether the process accepts requests; it has finished starting."""
    return Path(f"/proc/{pid}/fd/2").readlink() == Path(os.devnull)


async def test_without_a_process_validation_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(WorkersUnavailable) as raised:
        await ValueValidation(WorkerPool(), value_validation_task({})).validate(ONE, UNIQUE, "[]")
    assert "/" not in str(raised.value)


class BrokenPool(WorkerPool):
    async def run(self, task: TaskSpec[Any], *_: Any, **__: Any) -> Any:
        return Failed("KeyError")


async def test_an_unexpected_error_is_an_invalid_value_and_is_logged_by_class() -> None:
    validators = ValueValidation(BrokenPool(), value_validation_task({}))
    with capture_logs() as logs, pytest.raises(SchemaNotSatisfied, match="could not be validated"):
        await validators.validate(ONE, UNIQUE, "[1, 2]")
    assert [(line["event"], line["error"], line["count"]) for line in logs] == [
        ("validation failed", "KeyError", 1)
    ]
