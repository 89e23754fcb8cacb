"""Whether a tenant can tell by the time to its first token what another tenant has cached (PROMPTPEEK, NDSS 2025)."""

import math
import random
import statistics
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from tests.engine.local_engine.engine_requests import VOCAB, request

from loraplex.engine.engine import Engine

ATTACKER, VICTIM = b"a" * 32, b"v" * 32
PAIRS, MOST_PAIRS = 32, 256
PROMPT_TOKENS = 512
CHANCE = 1e-3
"""Of a false alarm in one run, were the times alike. Pairs are added until the control is below it: a busy machine needs more."""
LONG_PAIRS, LONG_CHANCE = 2000, 0.01


def first_token_s(core: Engine, namespace: bytes, prompt: list[int]) -> float:
    """Seconds of a lone request from its receipt to its first token, which is its last."""
    wanted = msgspec.structs.replace(
        request(max_tokens=1),
        namespace=namespace,
        prompt_token_ids=prompt,
        request_id=f"r{time.monotonic_ns()}",
    )
    began = time.perf_counter()
    core.add(wanted)
    while not core.step().outputs:
        pass
    taken = time.perf_counter() - began
    while core.has_unfinished:
        core.step()
    return taken


def likelihood(first: list[float], second: list[float]) -> float:
    """The probability of a difference of this size between paired samples that are alike.

    The signed-rank test (Wilcoxon 1945), whose sum is normal for some dozens of pairs: ranks, because pauses of the machine make
    outliers.
    """
    differences = np.subtract(first, second)
    ranks = np.abs(differences).argsort().argsort() + 1.0
    deviation = float((np.sign(differences) * ranks).sum() / np.sqrt((ranks**2).sum()))
    return math.erfc(abs(deviation) / math.sqrt(2))


def add_pair(core: Engine, draw: random.Random, times: dict[str, list[float]]) -> None:
    """Time one prompt that the victim has cached, and one that no tenant has, in an order of chance."""
    cached, unknown = ([draw.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(2))
    first_token_s(core, VICTIM, cached)
    probes = [
        ("miss", ATTACKER, unknown),
        ("cached by the victim", ATTACKER, cached),
        ("own", VICTIM, cached),
    ]
    draw.shuffle(probes)
    for name, namespace, prompt in probes:
        times.setdefault(name, []).append(first_token_s(core, namespace, prompt))


def test_what_another_tenant_cached_takes_as_long_as_what_is_not_cached(core: Engine) -> None:
    draw = random.Random(0)
    times: dict[str, list[float]] = {}
    for pair in range(MOST_PAIRS):
        if pair >= PAIRS and likelihood(times["own"], times["miss"]) < CHANCE:
            break
        add_pair(core, draw, times)
    assert likelihood(times["own"], times["miss"]) < CHANCE, "the test cannot tell a hit from a miss"
    assert likelihood(times["cached by the victim"], times["miss"]) > CHANCE


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More threads wait for each other on a busy machine, ten times as long as they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_no_difference_is_found_over_many_pairs(core: Engine) -> None:
    """Alike tenants differ by chance once in 100 runs: only a difference in two runs one after the other is one."""
    found = []
    for run in range(2):
        draw, times = random.Random(run), dict[str, list[float]]()
        for _ in range(LONG_PAIRS):
            add_pair(core, draw, times)
        medians = {name: round(statistics.median(taken) * 1e6) for name, taken in times.items()}
        found.append(likelihood(times["cached by the victim"], times["miss"]))
        print(f"\n{LONG_PAIRS} pairs: p = {found[-1]:.3f}, medians in microseconds: {medians}")
        assert likelihood(times["own"], times["miss"]) < CHANCE, "the test cannot tell a hit from a miss"
        if found[-1] > LONG_CHANCE:
            return
    pytest.fail(f"a tenant's time to first token tells what another one has cached: p = {found}")


COUNTED = ("cached_prompt_tokens", "prefix_cache_hits", "prefix_cache_queries", "steps", "step_tokens")


def work_of(core: Engine, namespace: bytes, prompt: list[int]) -> dict[str, int]:
    """What the engine counts for one request."""
    before = core.stats()
    first_token_s(core, namespace, prompt)
    after = core.stats()
    return {name: getattr(after, name) - getattr(before, name) for name in COUNTED}


def test_what_another_tenant_cached_is_computed_in_full_in_as_many_steps(core: Engine) -> None:
    """The exact twin of the times."""
    draw = random.Random(0)
    cached, unknown = ([draw.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(2))
    first_token_s(core, VICTIM, cached)
    of_others, of_nobody = work_of(core, ATTACKER, cached), work_of(core, ATTACKER, unknown)
    own = work_of(core, VICTIM, cached)
    assert of_others == of_nobody
    assert of_others["step_tokens"] >= PROMPT_TOKENS > own["step_tokens"]
    assert of_others["cached_prompt_tokens"] == 0 < own["cached_prompt_tokens"]
