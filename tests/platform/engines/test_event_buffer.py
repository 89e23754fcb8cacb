"""The per-request buffer loses nothing, keeps the order of each choice, and stays small while it is not read."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.messages import Delta, Event, Failed, Finished, Started, TokenLogprob, Usage
from loraplex.platform.engines.event_buffer import EventBuffer, EventBufferConfig

USAGE = Usage(1, 0, 1)


def delta(choice: int, number: int) -> Delta:
    return Delta("r", choice, [number], f"<{number}>", [TokenLogprob(number, -1.0)])


@given(st.lists(st.one_of(st.integers(0, 2), st.just("read")), max_size=60))
async def test_every_choice_reads_what_was_written(steps: list[int | str]) -> None:
    buffer = EventBuffer(3, EventBufferConfig())
    written: dict[int, list[int]] = {0: [], 1: [], 2: []}
    seen: list[Event] = []
    assert buffer.put(Started("r", None, 0))
    for number, step in enumerate(steps):
        if isinstance(step, int):
            written[step].append(number)
            assert buffer.put(delta(step, number))
        elif buffer._pending:
            seen.append(await buffer.get())
        assert len(buffer._pending) <= 1 + 3
    for choice in range(3):
        buffer.put(Finished("r", choice, "length", USAGE))
    while not buffer.drained():
        seen.append(await buffer.get())
    assert isinstance(seen[0], Started)
    for choice, numbers in written.items():
        of_choice = [e for e in seen if isinstance(e, Delta) and e.choice == choice]
        assert [t for e in of_choice for t in e.token_ids] == numbers
        assert "".join(e.text for e in of_choice) == "".join(f"<{n}>" for n in numbers)
        assert [p.token_id for e in of_choice for p in e.logprobs or ()] == numbers
    assert buffer._tokens == 0


async def test_over_the_bound_put_returns_false() -> None:
    buffer = EventBuffer(1, EventBufferConfig(tokens=3))
    assert [buffer.put(delta(0, number)) for number in range(4)] == [True, True, True, False]
    stalled = EventBuffer(1, EventBufferConfig(stall_s=0.01))
    assert stalled.put(delta(0, 0))
    await asyncio.sleep(0.03)
    assert not stalled.put(delta(0, 1))


async def test_nothing_follows_the_end() -> None:
    buffer = EventBuffer(1, EventBufferConfig())
    buffer.put(Failed("r", "timeout", "late"))
    buffer.put(delta(0, 1))
    assert isinstance(await buffer.get(), Failed)
    assert buffer.drained()


async def test_a_waiting_reader_wakes() -> None:
    buffer = EventBuffer(1, EventBufferConfig())
    task = asyncio.create_task(buffer.get())
    await asyncio.sleep(0)
    buffer.put(delta(0, 1))
    assert await asyncio.wait_for(task, 60) == delta(0, 1)


async def test_a_failure_of_the_reader_comes_after_what_was_used() -> None:
    buffer = EventBuffer(2, EventBufferConfig())
    buffer.put(delta(0, 1))
    buffer.fail(Failed("r", "timeout", "not read"))
    buffer.fail(Failed("r", "engine_unavailable", "a later reason"))
    buffer.put(delta(0, 2))
    buffer.put(Finished("r", 0, "abort", Usage(5, 0, 2)))
    assert not buffer.ended
    buffer.put(Finished("r", 1, "abort", Usage(0, 0, 0)))
    assert buffer.ended
    assert await buffer.get() == delta(0, 1)
    usage = {0: Usage(5, 0, 2), 1: Usage(0, 0, 0)}
    assert await buffer.get() == Failed("r", "timeout", "not read", usage=usage)
    assert buffer.drained()


async def test_an_acknowledged_or_failed_abort_ends_the_buffer_without_further_usage() -> None:
    for last in (None, Failed("r", "timeout", "late", usage={0: Usage(4, 0, 0)})):
        buffer = EventBuffer(1, EventBufferConfig())
        buffer.end()
        assert not buffer.ended
        buffer.fail(Failed("r", "engine_unavailable", "the server is shutting down"))
        if last is None:
            buffer.end()
        else:
            buffer.put(last)
        ended = await buffer.get()
        assert isinstance(ended, Failed) and ended.code == "engine_unavailable"
        assert ended.usage == ({} if last is None else last.usage) and buffer.drained()
