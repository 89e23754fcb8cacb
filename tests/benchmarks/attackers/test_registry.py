"""Every attacker gets through to a server and ends when it is told to; the stub answers whatever they send."""

import asyncio
from collections import Counter

import pytest
from tests.benchmarks.attackers.job import AttackJob
from tests.benchmarks.attackers.registry import ATTACKERS
from tests.benchmarks.attacks import run_attacker, run_stub

WITHIN_S = 20.0


@pytest.mark.parametrize("attack", ATTACKERS)
async def test_an_attacker_loads_a_server_until_it_is_cancelled(attack: str) -> None:
    statuses: Counter[str] = Counter()
    async with run_stub() as stub, asyncio.timeout(WITHIN_S):
        attacking = asyncio.create_task(_attack(attack, stub, statuses))
        while not statuses:
            await asyncio.sleep(0.01)
        attacking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attacking
    assert statuses.total() > 0


async def test_the_process_of_an_attacker_reports_its_responses() -> None:
    async with run_stub() as stub:
        job = AttackJob(next(iter(ATTACKERS)), stub, "key", "model", 0)
        async with run_attacker(job) as statuses:
            await asyncio.sleep(3)
    assert statuses["200"] > 0


async def _attack(attack: str, stub: str, statuses: "Counter[str]") -> None:
    await ATTACKERS[attack](AttackJob(attack, stub, "key", "model", 0), statuses)
