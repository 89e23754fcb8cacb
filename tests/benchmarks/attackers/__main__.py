"""The process of an attacker: reads an `AttackJob` from standard input and prints its outcome."""

import asyncio
import sys

import msgspec
from tests.benchmarks.attackers.job import AttackJob
from tests.benchmarks.attackers.registry import ATTACKERS


async def main() -> None:
    """Run one job."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=AttackJob)
    sys.stdout.buffer.write(msgspec.json.encode(await ATTACKERS[job.attack](job)) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
