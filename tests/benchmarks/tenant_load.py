"""The process of a tenant that offers requests at a rate, whatever becomes of them: `python -m tests.benchmarks.tenant_load`.

Invariant: it shares no event loop with the clients that are measured, and gives way to them and to the server on the processors:
elsewhere it is another machine's work. It prints a line when it begins, offers until its standard
input ends, and prints what it offered.
"""

import asyncio
import os
import random
import sys
from collections import Counter

import msgspec
from tests.benchmarks.child import end_child, start_child

from loraplex.platform.bench.client import CompletionRequest, StreamRecord, stream_completion
from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.bench.workload import arrival_offsets, draw_prompts

MODULE = "tests.benchmarks.tenant_load"
BEGUN = b"begun\n"
STOP_S = 30.0
NICENESS = 15


class OfferJob(msgspec.Struct, frozen=True):
    """`rate` requests per second for at most `seconds`: prompts of `input_len` ids of `pool`, and one of `models` for each,
    drawn by `seed`.
    """

    base_url: str
    api_key: str
    models: list[str]
    pool: list[int]
    input_len: int
    output_len: int
    rate: float
    seconds: float
    seed: int


class Offered(msgspec.Struct, kw_only=True):
    """Requests sent, `seconds` from the first to the end, the latest sending after its time, and responses by outcome.

    `unanswered`: they had no end when the offer ended. `exhausted`: the offer ended before it was asked to.
    """

    sent: int = 0
    seconds: float = 0.0
    late_s: float = 0.0
    answered: int = 0
    unanswered: int = 0
    failed: dict[str, int] = {}
    exhausted: bool = False

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.sent / self.seconds


async def offer(job: OfferJob, stop: asyncio.Event) -> Offered:
    """Offer requests until `stop` is set; those without an answer are cancelled then."""
    loop = asyncio.get_running_loop()
    offsets = arrival_offsets(max(2, int(job.rate * job.seconds)), job.rate, job.seed)
    prompts = draw_prompts(job.pool, len(offsets), job.input_len, job.seed)
    models = random.Random(job.seed).choices(job.models, k=len(offsets))
    records: list[StreamRecord] = []
    offered = Offered()
    began = loop.time()

    async def send_all() -> None:
        async with asyncio.TaskGroup() as group:
            for model, prompt, offset in zip(models, prompts, offsets, strict=True):
                await asyncio.sleep(began + offset - loop.time())
                offered.late_s = max(offered.late_s, loop.time() - began - offset)
                request = CompletionRequest(model, prompt, job.output_len, job.api_key)
                records.append(StreamRecord(request))
                group.create_task(stream_completion(job.base_url, request, records[-1]))
            offered.exhausted = True
            await stop.wait()

    sending, stopped = asyncio.create_task(send_all()), asyncio.create_task(stop.wait())
    await asyncio.wait([sending, stopped], return_when=asyncio.FIRST_COMPLETED)
    offered.sent, offered.seconds = len(records), loop.time() - began
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    ended = [record for record in records if record.ended_at]
    offered.answered = sum(record.error is None for record in ended)
    offered.failed = dict(Counter(record.error[:40] for record in ended if record.error is not None))
    offered.unanswered = len(records) - len(ended)
    return offered


async def begin_offer(job: OfferJob) -> asyncio.subprocess.Process:
    """Start the tenant's process and wait until it offers. Raises `BenchFailed`."""
    process = await start_child(MODULE, msgspec.json.encode(job) + b"\n")
    assert process.stdout is not None
    if await process.stdout.readline() != BEGUN:
        await end_child(process, STOP_S)
        raise BenchFailed("the other tenant's process offered nothing")
    return process


async def end_offer(process: asyncio.subprocess.Process) -> Offered:
    """End the offer and return its outcome. Raises `BenchFailed`, also if it ended on its own."""
    offered = msgspec.json.decode(await end_child(process, STOP_S), type=Offered)
    if offered.exhausted:
        raise BenchFailed("the other tenant's requests ended before those of the quiet one")
    return offered


async def main() -> None:
    """Run one job."""
    os.nice(NICENESS)
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    job = msgspec.json.decode(await reader.readline(), type=OfferJob)
    stop = asyncio.Event()

    async def watch() -> None:
        await reader.read()
        stop.set()

    watching = asyncio.create_task(watch())
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.buffer.flush()
    offered = await offer(job, stop)
    await watching
    sys.stdout.buffer.write(msgspec.json.encode(offered) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
