"""Random schedules of requests: whatever joins, leaves, fails or is preempted, everything ends and is given back."""

import random
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.errors import (
    AdapterLoadFailed,
    EngineOverloaded,
    GrammarFailed,
    NonFiniteLogits,
    RequestTimeout,
)

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask, Simulation

Uncompiled: TypeAlias = "tuple[list[Sequence], ScriptedMask]"

END_TOKEN = 1
ADAPTERS = [None, None, "a", "b", "c", "bad"]


def random_submit(
    run: "Simulation",
    random_: random.Random,
    scripted_mask: "type[ScriptedMask]",
    uncompiled: "list[Uncompiled]",
) -> None:
    stem = random_.choice([[2] * 17, [3] * 9, [4]])
    length = random_.randint(1, 40 - len(stem))
    fields: dict[str, Any] = {}
    if random_.random() < 0.2:
        fields = {"queue_timeout_s": 3.0, "first_token_timeout_s": 4.0, "total_timeout_s": 6.0}
    mask = random_mask(random_, scripted_mask) if random_.random() < 0.5 else None
    if mask is not None:
        fields["grammar"] = b"{}"
    choices = run.submit(
        stem + [random_.randint(2, 3) for _ in range(length)],
        tenant=random_.choice("tu"),
        adapter=random_.choice(ADAPTERS),
        max_tokens=random_.randint(1, 20),
        sampling={"n": random_.choice([1, 1, 1, 3])},
        cache_salt=random_.choice([b"", b"", b"s"]),
        **fields,
    )
    if mask is not None:
        uncompiled.append((choices, mask))


def random_mask(random_: random.Random, mask: "type[ScriptedMask]") -> "ScriptedMask":
    """Documents that branch early, so that tokens are forced after it; some close, some break down."""
    documents = [
        tuple(random_.randint(5, 7) for _ in range(random_.randint(1, 25)))
        for _ in range(random_.randint(1, 4))
    ]
    return mask(
        documents,
        fast_forward=random_.random() < 0.7,
        closes=random_.random() < 0.5,
        broken="accept" if random_.random() < 0.1 else "",
    )


def random_delays(run: "Simulation", uncompiled: "list[Uncompiled]", random_: random.Random) -> None:
    """Compile some grammars, let some masks be late and late ones arrive."""
    for job in [job for job in uncompiled if random_.random() < 0.5]:
        uncompiled.remove(job)
        run.give_mask(*job)
    masked = [s for s in run.sequences if s.token_mask is not None]
    for sequence in masked:
        sequence.awaits_mask &= random_.random() < 0.5
    run.late = {s for s in masked if random_.random() < 0.2}


def random_interruption(run: "Simulation", random_: random.Random) -> None:
    sequence = random_.choice(run.sequences)
    kind = random_.random()
    if kind < 0.4:
        run.scheduler.abort(sequence.request_id)
    elif kind < 0.7 and sequence.num_output_tokens:
        run.scheduler.finish(sequence, "stop")
    elif kind < 0.8:
        run.nan.add(sequence)
    run.check()


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    blocks=st.sampled_from([15, 24, 60]),
    caching=st.booleans(),
    budget=st.integers(1, 3),
    cap=st.integers(1, 3),
    overlap=st.booleans(),
)
def test_everything_ends_and_is_given_back(
    simulation: "type[Simulation]",
    scripted_mask: "type[ScriptedMask]",
    seed: int,
    blocks: int,
    caching: bool,
    budget: int,
    cap: int,
    overlap: bool,
) -> None:
    random_ = random.Random(seed)
    run = simulation(
        num_blocks=blocks,
        prefix_caching=caching,
        residency={"budget": budget, "load_s": 0.3, "broken": {"bad"}},
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_adapters_per_step=cap,
        max_adapter_wait_s=1.0,
        overlap=overlap,
    )
    uncompiled: list[Uncompiled] = []
    for _ in range(80):
        random_delays(run, uncompiled, random_)
        if random_.random() < 0.4:
            random_submit(run, random_, scripted_mask, uncompiled)
        if run.sequences and random_.random() < 0.15:
            random_interruption(run, random_)
        run.step()
    while run.is_busy:
        random_delays(run, uncompiled, random_)
        run.step()
    run.check_idle()
    assert all(s.status is SequenceStatus.FINISHED and s.finish_reason for s in run.sequences)
    assert {type(e) for _, e in run.failures} <= {
        AdapterLoadFailed,
        EngineOverloaded,
        GrammarFailed,
        NonFiniteLogits,
        RequestTimeout,
    }
    assert len({s.request_id for s, _ in run.failures}) == len(run.failures)
    for sequence in run.sequences:
        if sequence.finish_reason == "length":
            assert sequence.num_output_tokens == sequence.request.sampling.max_tokens
        assert sequence.token_mask is None
        if sequence in run.masks:
            check_document(sequence, run.masks[sequence])


def check_document(sequence: Sequence, mask: "ScriptedMask") -> None:
    """What came out under a grammar is the beginning of a document, and a whole one if it could be closed in time."""
    output = tuple(t for t in sequence.token_ids[sequence.num_prompt_tokens :] if t != END_TOKEN)
    assert any(document[: len(output)] == output for document in mask.documents)
    if sequence.finish_reason == "length":
        can_close = min(map(len, mask.documents)) <= sequence.request.sampling.max_tokens
        assert not (mask.closes and can_close)


def test_a_prefix_is_computed_once_while_preemptions_happen(simulation: "type[Simulation]") -> None:
    prompts = [[2] * 24 + [10 + index] for index in range(20)]
    runs = [simulation(prefix_caching=caching, num_blocks=40, max_num_seqs=4) for caching in (True, False)]
    for run in runs:
        for tokens in prompts:
            run.submit(tokens, max_tokens=6)
        run.run()
        run.check_idle()
    assert runs[0].computed_tokens < 0.5 * runs[1].computed_tokens
    assert [s.token_ids for s in runs[0].sequences] == [s.token_ids for s in runs[1].sequences]


@pytest.mark.parametrize("adapters", [0, 500])
def test_planning_a_steady_decode_stays_cheap_with_a_thousand_waiting(
    simulation: "type[Simulation]", adapters: int
) -> None:
    run = simulation(num_blocks=4096, max_num_seqs=64, residency={"budget": 8, "load_s": 0.1})
    for index in range(64):
        # Tenants with one row each: none gives way to those that wait, so the decode stays steady.
        run.submit([2 + index] * 8, tenant=f"busy{index}", max_tokens=200)
    for _ in range(8):
        run.step()
    alone = planning_seconds(run)
    for index in range(1000):
        adapter = f"a{index % adapters}" if adapters else None
        run.submit([index + 2] * 64, tenant=f"t{index % 200}", adapter=adapter, max_tokens=100)
    assert run.scheduler.num_running == 64
    assert planning_seconds(run) < 10 * alone


def planning_seconds(run: "Simulation") -> float:
    """The median CPU time of 40 plans of 64 rows."""
    times = []
    for _ in range(40):
        begin = time.thread_time()
        plan = run.scheduler.schedule()
        times.append(time.thread_time() - begin)
        assert plan is not None and len(plan.rows) == 64
        run.scheduler.complete(plan, run.execute(plan))
        run.now += 0.03
    return sorted(times)[20]
