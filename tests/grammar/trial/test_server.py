"""The result of each end of a compile check, with functions in place of compilers: real processes, real limits."""

import mmap
import os
import signal
import time
from collections.abc import Callable

import pytest
from tests.grammar.process_table import children, command_line

from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.trial.messages import Cancel, CompileResult, Order, SandboxLimits, StartCheck, encode
from loraplex.grammar.trial.orders import OrderSource
from loraplex.grammar.trial.server import ForkServer

MIB = 1 << 20
LIMITS = SandboxLimits(deadline_s=10.0, cpu_s=1, memory_bytes=64 * MIB, grammar_bytes=4 * MIB)


def burn(spec: GrammarSpec) -> int:
    while True:
        pass


def sleep(spec: GrammarSpec) -> int:
    time.sleep(60)
    return 1


def segfault(spec: GrammarSpec) -> int:
    # pytest's handler would write the stacks of a large process first, within the CPU second of the check.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1


def abort(spec: GrammarSpec) -> int:
    os.abort()


def allocate(spec: GrammarSpec) -> int:
    # More than the heap of a large process, which the child inherits, can have to spare.
    return len([bytearray(256 * MIB) for _ in range(32)])


def keep(spec: GrammarSpec) -> int:
    # Pages of its own: the heap of a large process may have as much to spare, resident already.
    pages = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(b"x" * len(pages))
    kept.append(pages)
    return 1


def refuse(spec: GrammarSpec) -> int:
    raise GrammarInvalid("/src/grammar.cc:7: \x1b[2Jno such rule\n")


class Panic(BaseException):
    """What a Rust library raises when it breaks down."""


def panic(spec: GrammarSpec) -> int:
    raise Panic


def write_a_lot(spec: GrammarSpec) -> int:
    os.write(1, b"x" * MIB)
    os.write(2, b"x" * MIB)
    return 1


def descriptors(spec: GrammarSpec) -> int:
    """The standard streams, the pipe, and the folder being listed."""
    return int(len(os.listdir("/proc/self/fd")) == 5)


kept: list[mmap.mmap] = []


def results(
    first_mask: Callable[[GrammarSpec], int],
    *orders: Order,
    expected: int = 1,
    limits: SandboxLimits = LIMITS,
) -> list[CompileResult]:
    """What a server answers until it has given `expected` results."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(encode(order) + b"\n" for order in orders))
    reported: list[CompileResult] = []

    def report(result: CompileResult) -> None:
        reported.append(result)
        if len(reported) == expected:
            os.close(writing)

    ForkServer(first_mask, limits, report).serve(OrderSource(reading))
    os.close(reading)
    return reported


def forks() -> list[int]:
    """Children that are copies of this process or were not waited for."""
    mine = command_line(os.getpid())
    return [child for child in children(os.getpid()) if command_line(child) in (mine, b"")]


def start_check(check_id: int = 7) -> StartCheck:
    return StartCheck(check_id, GrammarSpec(backend="llguidance", source=""))


@pytest.mark.parametrize(
    ("first_mask", "outcome"),
    [
        (lambda spec: 3, "accepted"),
        (lambda spec: 0, "unsatisfiable"),
        (burn, "cpu"),
        (segfault, "crashed"),
        (abort, "memory"),
        (allocate, "memory"),
        (keep, "size"),
        (refuse, "invalid"),
        (panic, "invalid"),
        (write_a_lot, "accepted"),
        (descriptors, "accepted"),
    ],
)
def test_outcome(first_mask: Callable[[GrammarSpec], int], outcome: str) -> None:
    (result,) = results(first_mask, start_check())
    assert (result.check_id, result.outcome) == (7, outcome)
    assert result.wall_s < LIMITS.deadline_s
    assert forks() == []


@pytest.mark.parametrize(("first_mask", "outcome"), [(burn, "deadline"), (sleep, "starved")])
def test_a_deadline_is_the_grammars_only_if_it_had_time(
    first_mask: Callable[[GrammarSpec], int], outcome: str
) -> None:
    limits = SandboxLimits(deadline_s=0.8, cpu_s=2)
    (result,) = results(first_mask, start_check(), limits=limits)
    assert result.outcome == outcome
    assert 0.8 <= result.wall_s < 30


def test_an_error_text_is_cleaned() -> None:
    assert results(refuse, start_check())[0].text == "[2Jno such rule"


def test_without_a_process_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError("no process")

    monkeypatch.setattr(os, "fork", fork)
    (result,) = results(burn, start_check())
    assert (result.outcome, result.text) == ("starved", "no process")


def test_checks_run_in_parallel_and_are_cancelled() -> None:
    started = time.monotonic()
    orders = [start_check(check_id) for check_id in range(4)] + [
        Cancel(check_id) for check_id in (0, 1, 2, 3, 99)
    ]
    reported = results(sleep, *orders, expected=4)
    assert {(result.check_id, result.outcome) for result in reported} == {(i, "cancelled") for i in range(4)}
    assert time.monotonic() - started < LIMITS.deadline_s


def test_the_end_of_input_ends_running_checks() -> None:
    reading, writing = os.pipe()
    os.write(writing, encode(start_check()) + b"\n")
    os.close(writing)
    reported: list[CompileResult] = []
    ForkServer(sleep, LIMITS, reported.append).serve(OrderSource(reading))
    os.close(reading)
    assert reported == []
    assert forks() == []
