"""The attacks by name.

Invariant: an attacker sends for the whole time of its job, whatever the server does.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

from tests.benchmarks.attackers.connections import (
    Attack,
    drip_after_answer,
    flood_bodies,
    flood_connections,
    ignore_answers,
)
from tests.benchmarks.attackers.floods import flood_with_forged_keys, flood_with_prompts
from tests.benchmarks.attackers.grammars import send_growing_grammars
from tests.benchmarks.attackers.job import AttackJob

Attacker: TypeAlias = Callable[[AttackJob], Awaitable[Mapping[str, int]]]
"""Returns the number of responses by status, and of refused connections."""
CONNECTIONS: Final = 200
IDLE_CONNECTIONS: Final = 1500


async def _send_prompts(job: AttackJob) -> Mapping[str, int]:
    return _by_text(await flood_with_prompts(job.base_url, job.api_key, job.seconds))


async def _send_forged_keys(job: AttackJob) -> Mapping[str, int]:
    return _by_text(await flood_with_forged_keys(job.base_url, job.api_key, job.seconds))


def _through(attack: Attack, connections: int = CONNECTIONS) -> Attacker:
    async def run(job: AttackJob) -> Mapping[str, int]:
        result = await attack(job.base_url, job.api_key, job.seconds, connections)
        return _by_text(result.statuses) | {"opened": result.opened, "refused": result.refused}

    return run


def _by_text(statuses: Mapping[int, int]) -> dict[str, int]:
    return Counter({str(status): count for status, count in statuses.items()})


ATTACKERS: Final[Mapping[str, Attacker]] = {
    "growing grammars": send_growing_grammars,
    "prompts": _send_prompts,
    "large bodies": _through(flood_bodies),
    "drips after the response": _through(drip_after_answer),
    "idle connections": _through(flood_connections, IDLE_CONNECTIONS),
    "unread responses": _through(ignore_answers),
    "forged keys": _send_forged_keys,
}
