"""The process of an attacker: reads an `AttackJob` as one line, attacks until its standard input ends, prints the statuses."""

import asyncio
import sys
from collections import Counter
from contextlib import suppress

import msgspec
from tests.benchmarks.attackers.job import AttackJob
from tests.benchmarks.attackers.registry import ATTACKERS


async def main() -> None:
    """Run one job."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=AttackJob)
    statuses: Counter[str] = Counter()
    attacking = asyncio.ensure_future(ATTACKERS[job.attack](job, statuses))
    ending = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
    await asyncio.wait((attacking, ending), return_when=asyncio.FIRST_COMPLETED)
    if attacking.done():
        attacking.result()
        raise RuntimeError(f"the attack {job.attack} ended by itself")
    attacking.cancel()
    with suppress(asyncio.CancelledError):
        await attacking
    sys.stdout.buffer.write(msgspec.json.encode(statuses) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
