"""Whether a tenant can tell by the time to its first token what another tenant has cached (PROMPTPEEK, NDSS 2025)."""

import random
import time

import msgspec
import numpy as np
from tests.engine.local_engine.engine_requests import VOCAB, request

from loraplex.engine.engine import Engine

ATTACKER, VICTIM = b"a" * 32, b"v" * 32
PAIRS, MOST_PAIRS = 32, 256
PROMPT_TOKENS, RESAMPLES = 512, 20_000
CHANCE = 1e-3
"""Of a false alarm in one run, were the times alike. Pairs are added until the control is below it: a busy machine needs more."""


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

    A permutation test on signed ranks (Wilcoxon 1945): ranks, because pauses of the machine make outliers.
    """
    differences = np.subtract(first, second)
    ranks = np.abs(differences).argsort().argsort() + 1
    signs = np.random.default_rng(0).choice([-1, 1], size=(RESAMPLES, len(ranks)))
    observed = abs((np.sign(differences) * ranks).sum())
    return float((np.abs(signs @ ranks) >= observed).mean())


def test_what_another_tenant_cached_takes_as_long_as_what_is_not_cached(core: Engine) -> None:
    draw = random.Random(0)
    times: dict[str, list[float]] = {"miss": [], "cached by the victim": [], "own": []}
    for pair in range(MOST_PAIRS):
        if pair >= PAIRS and likelihood(times["own"], times["miss"]) < CHANCE:
            break
        cached, unknown = ([draw.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(2))
        first_token_s(core, VICTIM, cached)
        probes = [
            ("miss", ATTACKER, unknown),
            ("cached by the victim", ATTACKER, cached),
            ("own", VICTIM, cached),
        ]
        draw.shuffle(probes)
        for name, namespace, prompt in probes:
            times[name].append(first_token_s(core, namespace, prompt))
    assert likelihood(times["own"], times["miss"]) < CHANCE, "the test cannot tell a hit from a miss"
    assert likelihood(times["cached by the victim"], times["miss"]) > CHANCE
