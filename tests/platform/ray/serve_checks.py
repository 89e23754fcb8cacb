"""What `test_ray_serve.py` checks, on one Ray cluster: `python -m tests.platform.ray.serve_checks FOLDER` prints facts as JSON lines.

Invariant: a check leaves the replicas as it found them, ready and without requests.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from msgspec.structs import replace
from ray import serve
from tests.platform.ray.cluster import (
    Gateway,
    cluster,
    deploy,
    engine_processes,
    gateway,
    request,
)
from tests.platform.ray.namespace import raise_loopback

from loraplex.engine.errors import EngineError
from loraplex.engine.fake_engine import FakeEngine, FakeScript, Fault
from loraplex.engine.messages import Delta, EngineRequest, Event, Failed, Finished, Started

REPLICAS: Final = 2
ADAPTERS: Final = 24
SLOTS: Final = 16
SCRIPT: Final = FakeScript(
    token_interval_s=0.005,
    adapter_slots=SLOTS,
    faults=(Fault(kind="crash", request_id="poison", after_tokens=4),),
)
LONG: Final = 3000
HITS: Final = 240
STREAMS: Final = 16
"""So many that one replica does not get all."""
ERASED: Final = b"e" * 32
SCALED: Final = "scaled"
ROWS: Final = 2
"""Of a replica's batch after the rolling update."""


async def streams(ray: Gateway) -> dict[str, Any]:
    """The events of a request are those of the fake engine itself, however they were batched."""
    engine_request = request("same", 40, prompt_token_ids=list(range(200)), adapter=ray.adapter(1))
    expected = [event async for event in FakeEngine(SCRIPT).submit(engine_request)]
    seen = await ray.collect(engine_request)
    deltas = [event for event in seen if isinstance(event, Delta)]
    return {
        "equal": joined(seen) == joined(expected),
        "started": isinstance(seen[0], Started),
        "deltas": len(deltas),
        "first_tokens": len(deltas[0].token_ids),
    }


async def abort(ray: Gateway) -> dict[str, Any]:
    """An abort reaches the replica and ends the stream with the usage; closing the iterator aborts as well."""
    aborted = asyncio.create_task(ray.collect(request("aborted", LONG)))
    await asyncio.sleep(0.2)
    await ray.engine.abort("aborted")
    last = (await aborted)[-1]
    closed = ray.engine.submit(request("closed", LONG))
    await anext(closed)
    await closed.aclose()  # type: ignore[attr-defined]
    await ray.engine.abort("unknown")
    await until(lambda: running(ray) == 0 and aborts(ray) == 2)
    return {
        "reason": last.reason if isinstance(last, Finished) else type(last).__name__,
        "usage": last.usage.completion_tokens if isinstance(last, Finished) else -1,
        "aborts": aborts(ray),
    }


async def forget(ray: Gateway) -> dict[str, Any]:
    """Forgetting a tenant fails the requests of that tenant on every replica, and of no other."""
    theirs = [asyncio.create_task(ray.collect(each)) for each in requests_of(b"t" * 32, 4)]
    other = asyncio.create_task(ray.collect(request("other", 400)))
    await until(lambda: running(ray) == 5)
    await ray.engine.forget(b"t" * 32)
    return {
        "codes": sorted({code(await each) for each in theirs}),
        "other": code(await other),
    }


async def hits(ray: Gateway) -> dict[str, Any]:
    """Adapter hits of the router on Zipf traffic over more adapters than one replica has slots for; and those of random."""
    order = zipf(HITS, ADAPTERS, Random(7))
    loads = sum(view.last_stats.adapter_loads for view in connected(ray))
    limit = asyncio.Semaphore(12)

    async def send(number: int, adapter: int) -> str:
        async with limit:
            return code(await ray.collect(request(f"hit-{number}", 8, adapter=ray.adapter(100 + adapter))))

    codes = await asyncio.gather(*(send(*each) for each in enumerate(order)))
    await asyncio.sleep(1.5)  # for the newest statistics
    loaded = sum(view.last_stats.adapter_loads for view in connected(ray)) - loads
    return {
        "codes": dict(Counter(codes)),
        "rate": 1 - loaded / len(order),
        "random_rate": random_hits(order, Random(7)),
    }


async def engine_killed(ray: Gateway) -> dict[str, Any]:
    """A request that kills its engine is lost, others go on elsewhere, and the death is reported with what was open."""
    places, before = sorted(ray.replicas.views), len(ray.deaths)
    poison = await ray.collect(request("poison", 100))
    after = [code(await ray.collect(request(f"after-{n}", 4))) for n in range(8)]
    await until(lambda: len(ray.deaths) > before)
    await ray.until_ready(REPLICAS)
    return {
        "poison": code(poison),
        "after": after,
        "dead": [work.request_id for work in ray.deaths[-1] if isinstance(work, EngineRequest)],
        "engine_deaths": ray.engine.deaths,
        "same_places": places == sorted(ray.replicas.views),
    }


async def replica_killed(ray: Gateway) -> dict[str, Any]:
    """SIGKILL of a replica under streams: only its own are lost, its engine ends with it, and Serve replaces it."""
    open_streams = [asyncio.create_task(ray.collect(request(f"kill-{n}", 400))) for n in range(STREAMS)]
    await until(lambda: running(ray) == STREAMS)
    victim, process = next(iter(engine_processes().items()))
    before = len(ray.deaths)
    os.kill(victim, signal.SIGKILL)
    codes = Counter([code(await each) for each in open_streams])
    after = [code(await ray.collect(request(f"next-{n}", 4))) for n in range(8)]
    await until(lambda: len(ray.deaths) > before)
    recovery_s = await ray.until_ready(REPLICAS)
    return {
        "codes": dict(codes),
        "after": after,
        "dead": len(ray.deaths[-1]),
        "engine_alive": process.is_running(),
        "recovery_s": round(recovery_s, 1),
        "places": sorted(ray.replicas.views),
    }


async def rolling_update(ray: Gateway, folder: Path) -> dict[str, Any]:
    """Another version of the deployment replaces every replica while streams run and begin; none fails.

    A tenant is erased while a replica with requests of it drains.
    """
    before = {view.replica_id for view in ray.replicas.views.values() if view.replica_id is not None}
    stop, codes = asyncio.Event(), []

    async def keep_sending(sender: int) -> None:
        number = 0
        while not stop.is_set():
            codes.append(code(await ray.collect(request(f"roll-{sender}-{number}", 100))))
            number += 1

    deaths = len(ray.deaths)
    erased = [asyncio.create_task(ray.collect(each)) for each in requests_of(ERASED, 4)]
    await until(lambda: running(ray) == len(erased))
    erased_on = {call.replica_id for call in ray.engine._calls.values()}
    senders = [asyncio.create_task(keep_sending(sender)) for sender in range(4)]
    deploying = asyncio.create_task(
        asyncio.to_thread(deploy, folder, SCRIPT, REPLICAS, {"max_num_seqs": ROWS})
    )
    await until(lambda: any(each and not ray.replicas.lists(each) for each in erased_on))
    still_open = sum(not each.done() for each in erased)
    await ray.engine.forget(ERASED)
    erased_codes = Counter([code(await each) for each in erased])
    await deploying
    await until(lambda: not before & {view.replica_id for view in ray.replicas.views.values()})
    await ray.until_ready(REPLICAS)
    stop.set()
    await asyncio.gather(*senders)
    return {
        "codes": dict(Counter(codes)),
        "deaths": len(ray.deaths) - deaths,
        "open": still_open,
        "erased": dict(erased_codes),
    }


async def full(ray: Gateway) -> dict[str, Any]:
    """Where every replica is full, requests wait at the gateway: until one is free, an abort, or their time is over."""
    places = 2 * ROWS * REPLICAS
    taken = [asyncio.create_task(ray.collect(request(f"full-{n}", LONG))) for n in range(places)]
    await until(lambda: running(ray) == places)
    waiting = asyncio.create_task(ray.collect(request("waiting", 4)))
    aborted = asyncio.create_task(ray.collect(request("given-up", 4)))
    timed_out = code(await ray.collect(request("late", 4, queue_timeout_s=0.3)))
    waited = not waiting.done()
    await ray.engine.abort("given-up")
    for number in range(places):
        await ray.engine.abort(f"full-{number}")
    return {
        "late": timed_out,
        "aborted": code(await aborted),
        "waited": waited,
        "then": code(await waiting),
        "taken": sorted({code(await each) for each in taken}),
    }


async def deadline(ray: Gateway) -> dict[str, Any]:
    """The total time of a request ends it on its replica, with its usage."""
    before = aborts(ray)
    events = await ray.collect(request("timed", LONG, total_timeout_s=0.5))
    await until(lambda: running(ray) == 0 and aborts(ray) > before)
    last = events[-1]
    return {
        "code": code(events),
        "charged": isinstance(last, Failed) and last.usage[0].completion_tokens > 0,
    }


async def autoscaling(folder: Path) -> dict[str, Any]:
    """An application of its own: requests that wait at the gateway bring a replica, which leaves again without a failed stream."""
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": ROWS,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 1.0,
        "look_back_period_s": 1.0,
        "metrics_interval_s": 0.2,
    }
    settings, slow = {"max_num_seqs": ROWS // 2}, replace(SCRIPT, token_interval_s=0.1)
    await asyncio.to_thread(
        partial(deploy, folder, slow, "auto", settings, app=SCALED, autoscaling_config=scaling)
    )
    async with gateway(folder, SCALED) as ray:
        await ray.until_ready(1)
        # One replica has places for `ROWS` of them, as many as it should have: only those that wait are too many.
        asked = [asyncio.create_task(ray.collect(request(f"scaled-{n}", LONG))) for n in range(3 * ROWS)]
        up_s = await ray.until_ready(2)
        for number in range(1, 3 * ROWS):
            await ray.engine.abort(f"scaled-{number}")
        last = asyncio.create_task(ray.collect(request("last", 20)))
        await ray.engine.abort("scaled-0")
        down_s = await ray.until_ready(1)
        codes = Counter([code(await each) for each in (*asked, last)])
    await asyncio.to_thread(serve.delete, SCALED)
    return {"up_s": round(up_s, 1), "down_s": round(down_s, 1), "codes": dict(codes)}


def requests_of(namespace: bytes, count: int) -> list[EngineRequest]:
    return [request(f"{namespace[:1].decode()}-{n}", LONG, namespace=namespace) for n in range(count)]


def joined(events: Sequence[Event]) -> list[Any]:
    """The events with all deltas of a choice as one."""
    tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    text = "".join(event.text for event in events if isinstance(event, Delta))
    return [tokens, text, *(event for event in events if not isinstance(event, Delta))]


def code(events: Sequence[Event]) -> str:
    last = events[-1] if events else None
    if isinstance(last, Failed):
        return last.code
    return last.reason if isinstance(last, Finished) else "none"


def connected(ray: Gateway) -> list[Any]:
    return [view for view in ray.replicas.views.values() if view.connected]


def aborts(ray: Gateway) -> int:
    return sum(view.last_stats.aborted_requests for view in connected(ray))


def running(ray: Gateway) -> int:
    return sum(view.open_requests for view in ray.replicas.views.values())


async def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.02)


def zipf(count: int, adapters: int, random: Random) -> list[int]:
    weights = [1 / (rank + 1) for rank in range(adapters)]
    return random.choices(range(adapters), weights, k=count)


def random_hits(order: Sequence[int], random: Random) -> float:
    """The hit rate of choosing replicas at random, with the same slots."""
    slots: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(REPLICAS)]
    hit = 0
    for adapter in order:
        resident = random.choice(slots)
        hit += adapter in resident
        resident[adapter] = None
        resident.move_to_end(adapter)
        if len(resident) > SLOTS:
            resident.popitem(last=False)
    return hit / len(order)


async def run_all(folder: Path) -> None:
    async with gateway(folder) as ray:
        await ray.until_ready(REPLICAS)
        checks: list[Callable[[Gateway], Awaitable[dict[str, Any]]]] = [
            streams,
            abort,
            forget,
            deadline,
            hits,
            engine_killed,
            replica_killed,
            partial(rolling_update, folder=folder),
            full,
        ]
        for check in checks:
            name = check.func.__name__ if isinstance(check, partial) else check.__name__
            await report(name, partial(check, ray))
            await until(lambda: running(ray) == 0)  # by the reports, which are up to a second old
    await report("autoscaling", partial(autoscaling, folder))


async def report(name: str, check: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    began = time.monotonic()
    try:
        facts = await check()
    except (TimeoutError, EngineError) as error:
        facts = {"error": repr(error)}
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"check": name, "seconds": seconds, **facts}), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    raise_loopback()
    began = time.monotonic()
    with cluster():
        deploy(folder, SCRIPT, REPLICAS)
        print(json.dumps({"check": "start", "seconds": round(time.monotonic() - began, 1)}), flush=True)
        asyncio.run(run_all(folder))


if __name__ == "__main__":
    main()
