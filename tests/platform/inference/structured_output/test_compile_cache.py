"""Compile checks by the real process with both libraries, on a vocabulary of bytes."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.platform.inference.structured_output.compile_checks import ByteChecks, write_tokenizer
from tests.platform.process_table import alive, children

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.errors import GrammarInvalid, GrammarTooCostly
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.tree import JsonValue
from loraplex.platform.errors import ShareExceeded, WorkersUnavailable
from loraplex.platform.inference.structured_output.compile_cache import CompileLimits

MIB = 1 << 20
LIMITS = CompileLimits(deadline_s=6.0, cpu_s=1, memory_bytes=256 * MIB, queued_per_tenant=4)
SLACK_S = 10

pytestmark = pytest.mark.asyncio(loop_scope="module")


def by_llguidance(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec(backend="llguidance", source=emit_llguidance.emit(JsonValue(schema)))


def by_xgrammar(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec(backend="xgrammar", source=emit_xgrammar.emit(JsonValue(schema)))


def an_object(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}


def slow(seed: int = 0) -> GrammarSpec:
    """Takes xgrammar longer than any budget here."""
    schema: dict[str, Any] = {"const": seed}
    for _ in range(14):
        branch = {
            "type": "object",
            "properties": {"a": schema},
            "required": ["a"],
            "additionalProperties": False,
        }
        schema = {"oneOf": [schema, branch]}
    return by_xgrammar(schema)


@asynccontextmanager
async def running(tokenizer: Path, limits: CompileLimits = LIMITS) -> AsyncIterator[ByteChecks]:
    cache = ByteChecks(tokenizer, limits)
    try:
        yield cache
    finally:
        await cache.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cache(tokenizer: Path) -> AsyncIterator[ByteChecks]:
    async with running(tokenizer) as cache:
        yield cache


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def forks(cache: ByteChecks) -> list[int]:
    return children(cache.pid)


async def test_the_process_has_one_thread_and_no_priority(cache: ByteChecks) -> None:
    await cache.check(b"a", by_llguidance(an_object("first")))
    assert cache.pid is not None
    assert len(os.listdir(f"/proc/{cache.pid}/task")) == 1
    assert os.getpriority(os.PRIO_PROCESS, cache.pid) == max(7, os.getpriority(os.PRIO_PROCESS, 0))
    assert os.getpgid(cache.pid) == cache.pid and os.getsid(cache.pid) == os.getsid(0)


@pytest.mark.parametrize("emit", [by_llguidance, by_xgrammar])
async def test_what_compiles_passes_and_is_remembered_for_its_tenant(
    cache: ByteChecks, emit: Callable[[dict[str, Any]], GrammarSpec]
) -> None:
    spec = emit(an_object("remembered"))
    before = cache.ended
    for namespace in (b"a", b"a", b"b"):
        await cache.check(namespace, spec)
    assert cache.ended == before + 2


@pytest.mark.parametrize("emit", [by_llguidance, by_xgrammar])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "foo"}, "foo"),
        ({"type": "string", "pattern": "(("}, "does not compile"),
        ({"$ref": "#"}, "no text satisfies the grammar"),
    ],
)
async def test_what_does_not_compile_is_refused_with_its_field(
    cache: ByteChecks, emit: Callable[[dict[str, Any]], GrammarSpec], schema: dict[str, Any], message: str
) -> None:
    for param in ("response_format", "tools.0"):
        with pytest.raises(GrammarInvalid, match=message) as refused:
            await cache.check(b"a", emit(schema), param=param)
        assert refused.value.param == param
        assert ".cc" not in str(refused.value) and len(str(refused.value)) < 500


async def test_what_takes_too_much_time_is_refused_in_time(cache: ByteChecks) -> None:
    started = time.monotonic()
    with pytest.raises(GrammarTooCostly, match="1 s of CPU time") as refused:
        await cache.check(b"a", slow(), param="response_format")
    assert refused.value.param == "response_format"
    assert time.monotonic() - started < LIMITS.deadline_s + SLACK_S
    checks = cache.ended
    with pytest.raises(GrammarTooCostly):
        await cache.check(b"a", slow())
    assert cache.ended == checks, "the refusal is remembered"


async def test_half_a_surrogate_is_refused(cache: ByteChecks) -> None:
    with pytest.raises(GrammarInvalid, match="surrogate"):
        await cache.check(b"a", GrammarSpec(backend="llguidance", source="\ud800"), param="response_format")


async def test_one_check_serves_all_waiting_requests(cache: ByteChecks) -> None:
    before = cache.ended
    spec = by_xgrammar(an_object("shared"))
    await asyncio.gather(*(cache.check(b"a", spec) for _ in range(20)))
    assert cache.ended == before + 1


async def test_a_check_continues_while_a_request_waits(cache: ByteChecks) -> None:
    spec = slow(seed=1)
    first, second = (asyncio.create_task(cache.check(b"a", spec)) for _ in range(2))
    await until(lambda: len(forks(cache)) == 1)
    first.cancel()
    with pytest.raises(GrammarTooCostly):
        await second
    assert first.cancelled()


async def test_a_check_without_waiting_requests_is_killed(cache: ByteChecks) -> None:
    waiter = asyncio.create_task(cache.check(b"a", slow(seed=2)))
    await until(lambda: len(forks(cache)) == 1)
    ended = cache.ended
    waiter.cancel()
    await until(lambda: not forks(cache) and cache.work.running == 0)
    assert cache.ended == ended, "it was not computed to its end"
    await cache.check(b"a", by_llguidance(an_object("after")))


async def test_a_tenants_line_is_bounded(cache: ByteChecks) -> None:
    waiters = [
        asyncio.create_task(cache.check(b"a", slow(seed=10 + number)))
        for number in range(LIMITS.queued_per_tenant + 1)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ShareExceeded, match="4 new grammars of this tenant"):
        await cache.check(b"a", by_llguidance(an_object("too many")))
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    await until(lambda: cache.work.running == cache.work.waiting == 0)


async def test_a_flooding_tenant_leaves_a_slot_to_others(cache: ByteChecks) -> None:
    flood = [asyncio.create_task(cache.check(b"flood", slow(seed=20 + number))) for number in range(4)]
    await until(lambda: cache.work.running == 1)
    for number in range(4):
        await cache.check(b"quiet", by_llguidance(an_object(f"quiet{number}")))
    # Behind the flood they would have waited for its checks.
    assert not any(waiter.done() for waiter in flood[1:])
    for waiter in flood:
        waiter.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_killed_process_is_replaced_and_its_check_retried(cache: ByteChecks) -> None:
    # Those of checks that were cancelled before end a moment later.
    await until(lambda: not forks(cache))
    waiter = asyncio.create_task(cache.check(b"a", slow(seed=30)))
    await until(lambda: cache.work.running == 1 and len(forks(cache)) == 1)
    (orphan,) = forks(cache)
    old, restarts = cache.pid, cache.work.restarts
    assert old is not None
    os.kill(old, signal.SIGKILL)
    with pytest.raises(GrammarTooCostly):
        await waiter
    assert cache.pid != old and cache.work.restarts == restarts + 1
    await until(lambda: not alive(orphan))
    await cache.check(b"a", by_xgrammar(an_object("after the kill")))


async def test_a_process_that_hangs_is_replaced(tokenizer: Path) -> None:
    limits = CompileLimits(deadline_s=3.0, hang_grace_s=2.0)
    async with running(tokenizer, limits) as cache:
        await cache.check(b"a", by_llguidance(an_object("before")))
        hung = cache.pid
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        await cache.check(b"a", by_llguidance(an_object("after")))
        assert cache.pid != hung and not alive(hung)


async def test_budgets_of_memory_and_size(tokenizer: Path) -> None:
    limits = CompileLimits(memory_bytes=48 * MIB, grammar_bytes=2 * MIB)
    words = [f"{number:x}" * 12 for number in range(40_000)]
    async with running(tokenizer, limits) as cache:
        with pytest.raises(GrammarTooCostly, match="more than 48 MiB of memory"):
            await cache.check(b"a", by_llguidance({"enum": words * 4}))
        with pytest.raises(GrammarTooCostly, match="allowed are 2 MiB"):
            await cache.check(b"a", by_llguidance({"enum": words[:16_000]}))
        await until(lambda: not forks(cache))


async def test_without_a_tokenizer_checks_are_unavailable(tmp_path: Path) -> None:
    async with running(tmp_path / "missing") as cache:
        with pytest.raises(WorkersUnavailable):
            await cache.check(b"a", by_llguidance(an_object("never")))
        with pytest.raises(WorkersUnavailable):
            await timed_refusal(cache)


async def timed_refusal(cache: ByteChecks) -> None:
    started = time.monotonic()
    try:
        await cache.check(b"a", by_llguidance(an_object("at once")))
    finally:
        assert time.monotonic() - started < 5


async def test_close_fails_waiting_requests(tokenizer: Path) -> None:
    async with running(tokenizer) as cache:
        waiter = asyncio.create_task(cache.check(b"a", slow()))
        await asyncio.sleep(0)
    with pytest.raises(WorkersUnavailable, match="shutting down"):
        await waiter
    assert cache.pid is None
