"""Every attacker sends for its time and reports what it got; the stub answers whatever they send."""

import pytest
from tests.benchmarks.attackers.job import AttackJob
from tests.benchmarks.attackers.registry import ATTACKERS
from tests.benchmarks.attacks import run_attacker, run_stub


@pytest.mark.parametrize("attack", ATTACKERS)
async def test_an_attacker_reports_its_outcome(attack: str) -> None:
    async with run_stub() as stub:
        outcome = await ATTACKERS[attack](AttackJob(attack, stub, "lpx_live_x", "model", 0, 2.0))
    assert sum(outcome.values()) > 0


async def test_the_process_of_an_attacker_reports_its_responses() -> None:
    async with (
        run_stub() as stub,
        run_attacker(AttackJob("prompts", stub, "key", "model", 0, 2.0)) as outcome,
    ):
        assert not outcome
    assert set(outcome) == {"200"} and outcome["200"] > 0
