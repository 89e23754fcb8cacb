"""Grammars compiled on a side thread: failures, drops, turns of tenants, and the thread's low priority."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loraplex.engine.errors import GrammarFailed
from loraplex.engine.structured_output.grammar_compilation import NICENESS, GrammarCompilation, GrammarJob


class Factory:
    """Compiles when a test allows it, and fails for b"bad"."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.order: list[tuple[bytes, bytes]] = []
        self.thread: tuple[int, set[int]] | None = None

    def __call__(self, namespace: bytes, grammar: bytes) -> Any:
        self.order.append((namespace, grammar))
        self.thread = (os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getaffinity(0))
        assert self.gate.wait(60)
        if grammar == b"bad":
            raise ValueError("/usr/src/secret.cc:10: no such rule")
        return object()


def job(
    ticket: int, namespace: bytes, grammar: bytes, responses: tuple[tuple[int, ...], ...] = ((),)
) -> GrammarJob:
    return GrammarJob(ticket, namespace, grammar, responses)


@pytest.fixture
def factory() -> Iterator[Factory]:
    made = Factory()
    yield made
    made.gate.set()


@pytest.fixture
def compilation(factory: Factory) -> Iterator[GrammarCompilation]:
    made = GrammarCompilation(factory)
    yield made
    made.close()


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return result


def take(compilation: GrammarCompilation, count: int) -> dict[int, Any]:
    taken: dict[int, Any] = {}
    eventually(
        lambda: (
            taken.update((each.ticket, each.outcome) for each in compilation.take()) or len(taken) >= count
        )
    )
    return taken


def test_masks_and_failures_come_back(factory: Factory, compilation: GrammarCompilation) -> None:
    assert compilation.start(job(1, b"t", b"good")) == 0
    assert compilation.start(job(2, b"t", b"bad")) == 1
    assert compilation.take() == []
    factory.gate.set()
    outcomes = take(compilation, 2)
    assert [type(mask) for mask in outcomes[1]] == [object]
    assert isinstance(outcomes[2], GrammarFailed) and "secret" not in str(outcomes[2])
    assert (compilation.num_compilations, compilation.num_failures) == (2, 1)
    assert compilation.seconds > 0


def test_what_was_dropped_never_comes_back(factory: Factory, compilation: GrammarCompilation) -> None:
    for ticket in (1, 2, 3):
        compilation.start(job(ticket, b"t", b"%d" % ticket))
    eventually(lambda: factory.order)
    compilation.drop(1)
    compilation.drop(2)
    compilation.drop(2)
    factory.gate.set()
    assert set(take(compilation, 1)) == {3}
    assert factory.order == [(b"t", b"1"), (b"t", b"3")], "what was only queued is not even begun"


def test_tenants_take_turns(factory: Factory, compilation: GrammarCompilation) -> None:
    for ticket in range(6):
        compilation.start(job(ticket, b"greedy", b"%d" % ticket))
    compilation.start(job(6, b"modest", b"x"))
    factory.gate.set()
    take(compilation, 7)
    assert factory.order.index((b"modest", b"x")) <= 2


def test_a_panic_of_an_extension_module_ends_its_request_alone() -> None:
    class Panic(BaseException):
        pass

    def panics(namespace: bytes, grammar: bytes) -> Any:
        raise Panic

    compilation = GrammarCompilation(panics)
    for ticket in (1, 2):
        compilation.start(job(ticket, b"t", b"g"))
        assert isinstance(take(compilation, 1)[ticket], GrammarFailed)
    compilation.close()


def test_the_thread_is_nice_and_not_bound_to_its_makers_core(factory: Factory) -> None:
    cores = os.sched_getaffinity(0)
    compilation = GrammarCompilation(factory)
    os.sched_setaffinity(0, {min(cores)})
    try:
        compilation.start(job(1, b"t", b"g"))
    finally:
        os.sched_setaffinity(0, cores)
    factory.gate.set()
    take(compilation, 1)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert factory.thread == (min(19, own + NICENESS), cores)
    compilation.close()
