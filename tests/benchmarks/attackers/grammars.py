"""Requests with grammars whose compiled form grows with every token that is decoded."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import count

import httpx
from tests.benchmarks.attackers.job import AttackJob

WORKERS = 8
PAUSE_S = 0.1
MAX_TOKENS = 25


async def send_growing_grammars(job: AttackJob) -> Mapping[str, int]:
    """Send one grammar after another, all different."""
    numbers = count(1_000_000 * job.number)
    statuses: Counter[str] = Counter()
    headers = {"authorization": f"Bearer {job.api_key}"}
    async with httpx.AsyncClient(base_url=job.base_url, headers=headers, timeout=120) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(job.seconds), asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(_send_one_after_another(client, job.model, numbers, statuses))
    return statuses


async def _send_one_after_another(
    client: httpx.AsyncClient, model: str, numbers: "count[int]", statuses: Counter[str]
) -> None:
    while True:
        body = {
            "model": model,
            "prompt": "Write:",
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "structured_outputs": {"regex": growing_regex(next(numbers))},
        }
        response = await client.post("/v1/completions", json=body)
        statuses[str(response.status_code)] += 1
        await asyncio.sleep(PAUSE_S)


def growing_regex(number: int) -> str:
    """A regular expression with some millions of states, of which decoding makes a few thousand with each token."""
    return f"{number}[a-z ]*[aeiou][a-z ]{{20}}"
