"""Values result in other processes: yes, no, and in time, whatever the schema asks for."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.grammar.process_table import alive, children, command_line

from loraplex.grammar.errors import SchemaNotSatisfied, WorkersUnavailable
from loraplex.grammar.judge.judges import ValidatorPoolConfig, ValueValidators

ONE, OTHER = b"1" * 32, b"2" * 32
UNIQUE = json.dumps({"type": "array", "uniqueItems": True})


def doubling(levels: int) -> str:
    """Asks for 2 ** levels looks at one value."""
    definitions: dict[str, object] = {"d0": {"type": "array", "uniqueItems": True}}
    for level in range(levels):
        definitions[f"d{level + 1}"] = {"anyOf": [{"$ref": f"#/$defs/d{level}"}] * 2}
    return json.dumps({"$defs": definitions, "$ref": f"#/$defs/d{levels}"})


def judging() -> list[int]:
    """The processes of this one that judge."""
    return [pid for pid in children(os.getpid()) if b"judge.process" in command_line(pid)]


@pytest.fixture
async def judges() -> AsyncIterator[ValueValidators]:
    judges = ValueValidators(ValidatorPoolConfig(environment=os.environ, deadline_s=0.5))
    yield judges
    await judges.close()


async def test_yes_and_no_with_keyword_and_place(judges: ValueValidators) -> None:
    await judges.validate(ONE, UNIQUE, "[1, 2]")
    with pytest.raises(SchemaNotSatisfied, match="uniqueItems"):
        await judges.validate(ONE, UNIQUE, "[1, 1]")
    with pytest.raises(SchemaNotSatisfied):
        await judges.validate(ONE, UNIQUE, "[1,")
    await judges.validate(ONE, json.dumps({"maximum": 10**40}), str(10**39))
    await judges.validate(ONE, UNIQUE, json.dumps(["é" * 200_000, "\u2028\n"]))


async def test_a_judgement_without_an_end_is_ended_and_the_next_one_made(judges: ValueValidators) -> None:
    begun = time.monotonic()
    with pytest.raises(SchemaNotSatisfied, match=r"within 0\.5 s"):
        await judges.validate(ONE, doubling(30), "[1, 1]")
    assert time.monotonic() - begun < 5
    await judges.validate(ONE, UNIQUE, "[1, 2]")


async def test_one_tenants_long_judgements_leave_a_place_to_others(judges: ValueValidators) -> None:
    greedy = [asyncio.create_task(judges.validate(ONE, doubling(30), "[1, 1]")) for _ in range(4)]
    await asyncio.sleep(0.3)
    await judges.validate(OTHER, UNIQUE, "[1, 2]")
    assert sum(task.done() for task in greedy) <= 2
    ended = await asyncio.gather(*greedy, return_exceptions=True)
    assert all(isinstance(each, SchemaNotSatisfied) for each in ended)


async def test_who_leaves_does_not_leave_an_answer_to_the_next(judges: ValueValidators) -> None:
    leaving = asyncio.create_task(judges.validate(ONE, doubling(30), "[1, 1]"))
    await asyncio.sleep(0.4)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await judges.validate(ONE, UNIQUE, "[1, 2]")
    with pytest.raises(SchemaNotSatisfied, match="uniqueItems"):
        await judges.validate(ONE, UNIQUE, "[1, 1]")


async def test_a_process_that_was_killed_while_it_waited_says_nothing_about_a_value(
    judges: ValueValidators,
) -> None:
    await judges.validate(ONE, UNIQUE, "[1, 2]")
    [pid] = judging()
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    await judges.validate(ONE, UNIQUE, "[1, 2]")
    assert judging() != [pid]


async def test_a_stop_signal_to_all_processes_leaves_what_is_judged_alone(judges: ValueValidators) -> None:
    await judges.validate(ONE, UNIQUE, "[1, 2]")
    [pid] = judging()
    for stop in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, stop)
    await asyncio.sleep(0.2)
    await judges.validate(ONE, UNIQUE, "[1, 2]")
    assert judging() == [pid]


async def test_who_judges_yields_to_who_decodes(judges: ValueValidators) -> None:
    await judges.validate(ONE, UNIQUE, "[1, 2]")
    [pid] = judging()
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)


async def test_no_wait_for_a_judgement_is_longer_than_patience() -> None:
    judges = ValueValidators(ValidatorPoolConfig(environment=os.environ, deadline_s=2.0, queue_timeout_s=1.0))
    try:
        await judges.validate(OTHER, UNIQUE, "[1, 2]")
        asked = [judges.validate(ONE, doubling(30), "[1, 1]") for _ in range(3)]
        begun = time.monotonic()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert time.monotonic() - begun < 3
        assert all(isinstance(each, WorkersUnavailable) for each in ended)
    finally:
        await judges.close()
    assert judging() == []


GATEWAY = """
import asyncio, os, sys
from loraplex.grammar.judge.judges import ValidatorPoolConfig, ValueValidators

judges = ValueValidators(ValidatorPoolConfig(environment=os.environ, deadline_s=50))
asyncio.run(judges.validate(b"a", sys.argv[1], "[1, 1]"))
"""


def test_no_endless_judgement_outlives_a_killed_gateway() -> None:
    gateway = subprocess.Popen([sys.executable, "-c", GATEWAY, doubling(40)])
    try:
        deadline = time.monotonic() + 30
        while not any(map(judges_now, children(gateway.pid))):
            assert time.monotonic() < deadline and gateway.poll() is None
            time.sleep(0.05)
        [process] = children(gateway.pid)
    finally:
        gateway.kill()
        gateway.wait()
    deadline = time.monotonic() + 10
    while alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def judges_now(pid: int) -> bool:
    """Whether it is ready to be asked: it says nothing any more."""
    return Path(f"/proc/{pid}/fd/2").readlink() == Path(os.devnull)


async def test_without_a_process_nobody_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(WorkersUnavailable) as told:
        await ValueValidators(ValidatorPoolConfig(environment={})).validate(ONE, UNIQUE, "[]")
    assert "/" not in str(told.value)
