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
    assert await asyncio.wait_for(task, 1) == delta(0, 1)
