"""PostgreSQL hangs or is stopped under load: known callers are served all the time, and the ledger lacks nothing afterwards."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.end_to_end.billed_load import (
    SETTINGS,
    BilledLoad,
    all_shipped,
    check_sums,
    ledger_rows,
    make_callers,
    query,
)
from tests.end_to_end.live_server import descendants, until
from tests.end_to_end.lost_stores import (
    MODEL,
    check_drift,
    external,
    facts_of,
    ready,
    scripted,
    settings_of,
)
from tests.platform.server.serve_process import Serve, serving

from loraplex.platform.datastores.embedded.lock import ConnectionFacts
from loraplex.platform.datastores.embedded.servers import ServerPair

__all__ = ["external"]

SCRIPT = scripted(token_interval_s=0.02)
LOADED_S = 1.5
"""How long the load runs before and after."""
SHIPPED_S = 90.0
# Answers are at most so far apart. A busy machine has pauses of its own.
PAUSE_S = 10.0


@pytest.fixture
def away_s(request: pytest.FixtureRequest) -> float:
    return 30.0 if request.config.getoption("--long") else 4.0


@contextmanager
def hung(postmaster: int) -> Iterator[None]:
    """No process of this PostgreSQL continues, and none ends."""
    stopped: set[int] = set()
    while more := ({postmaster} | descendants(postmaster)) - stopped:
        for pid in more:
            os.kill(pid, signal.SIGSTOP)
        stopped |= more
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped(pair: ServerPair, postmaster: int) -> Iterator[None]:
    os.kill(postmaster, signal.SIGINT)
    until(lambda: pair.ended == ["PostgreSQL"], 60, "PostgreSQL has ended")
    try:
        yield
    finally:
        pair.start(transient=False)


def postmaster_of(pids: set[int]) -> int:
    """The PostgreSQL among processes whose parents are not PostgreSQL."""
    (found,) = (pid for pid in pids if program_of(pid) == "postgres")
    return found


def children(pid: int) -> set[int]:
    below = descendants(pid)
    return below - {each for child in below for each in descendants(child)}


def has_another(serve: Serve, postmaster: int) -> bool:
    """Whether the server has started a PostgreSQL in place of this one."""
    found = {pid for pid in children(serve.process.pid) if program_of(pid) == "postgres"}
    return bool(found - {postmaster})


def accepts(database_url: str) -> bool:
    """Whether PostgreSQL has recovered from its crash."""
    try:
        return bool(query(database_url, "SELECT 1"))
    except psycopg.OperationalError:
        return False


def program_of(pid: int) -> str:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""


def check(serve: Serve, facts: ConnectionFacts, load: BilledLoad, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every answer is in the ledger once, as its client knows it, and all sums agree. Return the figures."""
    answers = load.end()
    until(lambda: all_shipped(facts.database_url), SHIPPED_S, "all is in the ledger")
    rows = ledger_rows(facts.database_url)
    assert not answers.errors and not answers.broken, (answers.errors, answers.broken)
    for name, charged in answers.finished.items():
        assert (rows[name].outcome, rows[name].usage) == ("completed", charged)
    assert rows.keys() == answers.finished.keys() | answers.left
    pico = check_sums(facts.database_url)
    check_drift(facts, monkeypatch)
    return f"{len(answers.finished)} finished, {len(answers.left)} left, errors 0, {len(rows)} rows, {pico} pico-units, drift 0"


class TimedLoad(BilledLoad):
    """Also keeps when answers ended."""

    def __init__(self, url: str, keys: list[str]) -> None:
        self.ended_at: list[float] = []
        super().__init__(url, MODEL, keys)

    def _finish(self, name: str, usage: dict[str, Any]) -> None:
        super()._finish(name, usage)
        self.ended_at.append(time.monotonic())

    def longest_pause_s(self, since: float, until: float) -> float:
        """The longest time between two finished answers."""
        times = [since, *sorted(at for at in self.ended_at if since < at < until), until]
        return max(after - before for before, after in pairwise(times))


def under_load(serve: Serve, keys: list[str]) -> TimedLoad:
    load = TimedLoad(serve.url, keys)
    until(lambda: len(load.answers.finished) > 20, 120, "answers arrive")
    time.sleep(LOADED_S)
    return load


def pause_while_away(load: TimedLoad, away_s: float) -> tuple[int, float]:
    """Wait; return the number of answers meanwhile, and the longest time without one."""
    since, before = time.monotonic(), len(load.ended_at)
    time.sleep(away_s)
    return len(load.ended_at) - before, load.longest_pause_s(since, time.monotonic())


def test_an_external_postgresql_hangs_and_is_stopped(
    tmp_path: Path, demo_model: Path, external: ServerPair, away_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = external.start(transient=False)
    with serving(tmp_path / "s", demo_model, SCRIPT, settings=SETTINGS | settings_of(facts)) as serve:
        until(lambda: ready(serve), 120, "readyz answers 200")
        load = under_load(serve, make_callers(facts.database_url))
        for name, loss in (("hung", hung), ("stopped", lambda pid: stopped(external, pid))):
            with loss(postmaster_of(set(external.pids))):
                served, pause_s = pause_while_away(load, away_s)
            print(
                f"\nexternal, {name} for {away_s:g} s: {served} answers meanwhile, longest pause {pause_s:.2f} s"
            )
            assert served and pause_s < PAUSE_S
            time.sleep(LOADED_S)
        print(check(serve, facts, load, monkeypatch))


@pytest.mark.long
def test_an_embedded_postgresql_hangs_and_is_killed(
    tmp_path: Path, demo_model: Path, away_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "s", demo_model, SCRIPT, settings=SETTINGS) as serve:
        until(lambda: ready(serve), 120, "readyz answers 200")
        facts = facts_of(serve)
        load = under_load(serve, make_callers(facts.database_url))
        postmaster = postmaster_of(children(serve.process.pid))
        with hung(postmaster):
            served, pause_s = pause_while_away(load, away_s)
        print(f"\nembedded, hung for {away_s:g} s: {served} answers meanwhile, longest pause {pause_s:.2f} s")
        assert served and pause_s < PAUSE_S
        time.sleep(LOADED_S)
        os.kill(postmaster, signal.SIGKILL)
        served, pause_s = pause_while_away(load, away_s)
        print(f"embedded, killed: {served} answers in {away_s:g} s, longest pause {pause_s:.2f} s")
        assert served and pause_s < PAUSE_S
        until(lambda: has_another(serve, postmaster), 60, "PostgreSQL is started again")
        until(lambda: accepts(facts.database_url), 60, "PostgreSQL accepts connections")
        print(check(serve, facts, load, monkeypatch))
