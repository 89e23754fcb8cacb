"""Processes that die or hang are reported with what they were at, and others go on."""

import os
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.benchmarks.gpu.children import lines_of, start


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import this file by its name from the root, as the command does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def answers(connection: Connection, count: int) -> None:
    for index in range(count):
        connection.send(("begin", f"case {index}"))
        connection.send(("line", {"case": f"case {index}", "ok": True}))


def dies(connection: Connection) -> None:
    connection.send(("begin", "first"))
    connection.send(("line", {"case": "first", "ok": True}))
    connection.send(("begin", "second"))
    os._exit(7)


def hangs(connection: Connection) -> None:
    connection.send(("begin", "endless"))
    time.sleep(600)


def test_lines_of_all_children_come() -> None:
    context = get_context("spawn")
    children = [start(context, answers, count, seconds=60) for count in (2, 3)]
    assert len(list(lines_of(children))) == 5
    assert [child.current for child in children] == ["case 1", "case 2"]


def test_death_and_lateness_name_the_case() -> None:
    context = get_context("spawn")
    children = [start(context, dies, seconds=60), start(context, hangs, seconds=8)]
    lines = list(lines_of(children))
    failures = {line["case"]: line["error"] for line in lines if not line["ok"]}
    assert failures == {"second": "the process ended with 7", "endless": "out of time"}
    assert children[0].begun == ["first", "second"]
    assert not any(child.process.is_alive() for child in children)
