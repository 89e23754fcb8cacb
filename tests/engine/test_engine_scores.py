"""Rows that score and write nothing, against `transformers` and PEFT: prompts, given tokens and continuations.

Invariant: a score is the log-softmax of the whole model's logits in float32, whoever shares the batch and however it is cut.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from tests.engine.test_engine import ADAPTERS, BROKEN, NAMESPACE, Harness, Reference, harnesses, prompts

from loraplex.engine import sampling_params
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.errors import InvalidRequest, PromptTooLong
from loraplex.engine.messages import EngineRequest, ScoreRequest
from loraplex.engine.sampling import scorer
from loraplex.engine.sampling_params import SamplingParams

NAMES = [None, *ADAPTERS]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def peft(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("engine-scores"))


@pytest.fixture
def engine(peft: Reference) -> Iterator[Callable[..., Harness]]:
    yield from harnesses(peft)


def add(
    harness: Harness,
    name: str,
    prompt: list[int],
    adapter: str | None = None,
    *,
    max_tokens: int = 0,
    n: int = 1,
    **scores: Any,
) -> list[Sequence]:
    request = EngineRequest(
        request_id=name,
        namespace=NAMESPACE,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, n=n, temperature=0.0),
        adapter=harness.adapter(adapter),
        scores=ScoreRequest(**scores),
    )
    return harness.engine.add(request)


def expected(peft: Reference, adapter: str | None, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]: log-probabilities of the successor of each token."""
    with torch.no_grad():
        logits: torch.Tensor = peft.adapted[adapter](torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def check_prompt(peft: Reference, adapter: str | None, sequence: Sequence, top: int) -> None:
    """Values, ranks and alternatives of every token of the prompt."""
    prompt = sequence.request.prompt_token_ids
    reference = expected(peft, adapter, prompt)
    scores = sequence.scores.prompt if sequence.scores is not None else None
    assert scores is not None and [score.token_id for score in scores] == prompt[1:]
    for position, score in enumerate(scores):
        row = reference[position]
        own = row[score.token_id]
        assert score.logprob == pytest.approx(own.item(), abs=TOLERANCE)
        likelier = int((row > own + TOLERANCE).sum()), int((row > own - TOLERANCE).sum())
        assert likelier[0] < score.rank <= likelier[1] + 1
        values = [value for _, value in score.top]
        assert values == pytest.approx(row.topk(top).values.tolist(), abs=TOLERANCE)
        assert all(value == pytest.approx(row[token].item(), abs=TOLERANCE) for token, value in score.top)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_scored_prompts_equal_peft_in_any_company(
    peft: Reference, engine: Callable[..., Harness], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a few tokens, preemptions, rows that write beside them, and a head in slices of three positions."""
    monkeypatch.setattr(scorer, "CPU_SCORE_SLICE_BYTES", 3 * 4 * 128)
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 5, "overlap": overlap}
    harness = engine(num_blocks=24, scheduler=limits)
    jobs = list(enumerate(prompts(21, seed=30)))
    scored: list[tuple[str | None, Sequence, int]] = []
    for index, prompt in jobs:
        adapter, top = NAMES[index % len(NAMES)], index % 4
        if index % 3 == 0:
            harness.add(str(index), prompt, adapter, max_tokens=30, ignore_eos=True)
            continue
        (sequence,) = add(
            harness, str(index), prompt, adapter, max_tokens=6 if index % 3 == 1 else 0, prompt_logprobs=top
        )
        scored.append((adapter, sequence, top))
    harness.run()
    assert not harness.failures and harness.engine.stats().preemptions > 0
    for adapter, sequence, top in scored:
        check_prompt(peft, adapter, sequence, top)
    for index, prompt in jobs:
        if index % 3 != 2:
            peft.check(NAMES[index % len(NAMES)], prompt, harness.outputs[str(index), 0])
    assert {harness.reasons[str(index), 0] for index, _ in jobs if index % 3 == 2} == {"length"}


def test_given_tokens_are_scored_at_their_positions(peft: Reference, engine: Callable[..., Harness]) -> None:
    harness = engine()
    (prompt,) = [[5, *range(3, 40)]]
    wanted = {0: [7], 20: [100, 3, 3], 37: list(range(128))}
    (alone,) = add(harness, "alone", prompt, "ends", token_ids=wanted)
    (beside,) = add(harness, "beside", prompt, "ends", token_ids=wanted, prompt_logprobs=2)
    harness.run()
    reference = expected(peft, "ends", prompt)
    assert alone.scores is not None and beside.scores is not None and alone.scores.prompt is None
    for scores in (alone.scores, beside.scores):
        assert {position: len(values) for position, values in scores.token_ids.items()} == {
            0: 1,
            20: 3,
            37: 128,
        }
        for position, values in scores.token_ids.items():
            assert values == pytest.approx(reference[position, wanted[position]].tolist(), abs=TOLERANCE)
    check_prompt(peft, "ends", beside, 2)


@pytest.mark.parametrize("length", [1, 8, 9, 30])
def test_continuations_share_the_prompt_and_are_scored_to_their_end(
    peft: Reference, engine: Callable[..., Harness], length: int
) -> None:
    harness = engine()
    prompt = [3 + index % 90 for index in range(length)]
    continuations = [[50], [50, 51], [9, 8, 7, 6, 5, 4, 3, 9, 10, 11], [50, 52, 53]]
    choices = add(harness, "c", prompt, "attention", n=4, continuations=continuations, ending_ids=[2, 60])
    harness.run()
    for sequence, continuation in zip(choices, continuations, strict=True):
        reference = expected(peft, "attention", prompt + continuation)
        found = sequence.scores.token_ids if sequence.scores is not None else {}
        last = length - 1 + len(continuation)
        targets = {length - 1 + i: [token] for i, token in enumerate(continuation)} | {last: [2, 60]}
        assert found.keys() == targets.keys()
        for position, values in found.items():
            assert values == pytest.approx(reference[position, targets[position]].tolist(), abs=TOLERANCE)
    stats = harness.engine.stats()
    assert stats.prompt_tokens == length + sum(map(len, continuations)) - 1 + 1
    assert stats.generation_tokens == 0
    # The others compute what is behind the last block that the prompt fills.
    shared = (length - 1) // 8 * 8
    assert stats.step_tokens == 4 * length + sum(map(len, continuations)) - 3 * shared


def test_the_cache_covers_what_is_not_scored_and_gets_what_is_computed(
    peft: Reference, engine: Callable[..., Harness]
) -> None:
    harness = engine()
    prompt = [3 + index % 90 for index in range(40)]
    (whole,) = add(harness, "whole", prompt, prompt_logprobs=0)
    harness.run()
    (again,) = add(harness, "again", prompt, prompt_logprobs=0)
    (late,) = add(harness, "late", prompt, token_ids={20: [5], 39: [6]})
    harness.add("text", prompt, max_tokens=4)
    harness.run()
    assert whole.num_cached_tokens == again.num_cached_tokens == 0, "every token of these is scored"
    assert late.num_cached_tokens == 16, "the block with the first scored position is computed"
    assert harness.engine.stats().cached_prompt_tokens == 16 + 32, "text finds the blocks of a scored prompt"
    check_prompt(peft, None, again, 0)
    reference = expected(peft, None, prompt)
    assert late.scores is not None
    assert late.scores.token_ids[20] == pytest.approx([reference[20, 5].item()], abs=TOLERANCE)


def test_rows_that_score_take_no_place_of_rows_that_write(engine: Callable[..., Harness]) -> None:
    harness = engine(scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 64})
    for index in range(2):
        harness.add(str(index), [5, 6, 7], max_tokens=60, ignore_eos=True)
    harness.step()
    harness.add("waits", [5, 6, 7], max_tokens=2)
    sequences = [add(harness, f"s{i}", [4 + i, 6, 7], prompt_logprobs=1)[0] for i in range(5)]
    steps = 0
    while any(f"s{i}" not in {name for name, _ in harness.reasons} for i in range(5)):
        harness.step()
        steps += 1
    assert steps == 3, "two places of their own in each step, whoever waits to write before them"
    assert harness.engine.stats().running == 2 and len(harness.outputs["0", 0]) == 1 + steps
    harness.run()
    assert all(sequence.scores is not None and sequence.scores.prompt for sequence in sequences)


def test_scored_positions_count_against_the_tokens_of_a_step(engine: Callable[..., Harness]) -> None:
    """The head costs, so a step has fewer positions that are scored than tokens that are only computed."""
    harness = engine(scheduler={"max_num_batched_tokens": 32, "max_num_seqs": 4})
    cost = harness.engine.model.config.score_cost
    assert cost == pytest.approx(1.4 * 128 * 64 / (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)))
    add(harness, "s", [5] * 65, prompt_logprobs=0)
    harness.step()
    assert harness.engine.stats().step_tokens == int(32 / (1 + cost))
    harness.run()


def test_scores_that_are_not_finite_fail_alone(peft: Reference, engine: Callable[..., Harness]) -> None:
    harness = engine(quarantine_after=1)
    (fine,) = add(harness, "fine", [5, 6, 7, 8], "mlp", prompt_logprobs=1)
    add(harness, "broken", [5, 6, 7, 8], BROKEN, prompt_logprobs=1)
    harness.run()
    assert harness.failures == {"broken": "non_finite_logits"}
    check_prompt(peft, "mlp", fine, 1)
    assert harness.engine.stats().quarantined_adapters


def test_rows_that_score_are_cancelled_and_charged_like_others(engine: Callable[..., Harness]) -> None:
    harness = engine(scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 4})
    add(harness, "gone", [5] * 100, prompt_logprobs=0)
    harness.step()
    (ended,) = harness.engine.abort("gone")
    assert ended.num_prefilled_tokens > 0 and ended.num_output_tokens == 0
    policy = harness.engine.scheduler._policy
    before = policy.counter(NAMESPACE)
    add(harness, "c", [6] * 20, n=2, continuations=[[7, 8], [9]])
    harness.run()
    assert policy.counter(NAMESPACE) - before == 22 + (21 - 16)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("n", {"n": 2}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("scores", {"token_ids": {4: [1]}}),
        ("scores", {"token_ids": {0: [128]}}),
        ("scores", {"continuations": [[]]}),
        ("n", {"continuations": [[3], [4]]}),
        ("n", {"n": sampling_params.MAX_CHOICES + 1}),
    ],
)
def test_refusals_name_the_field(engine: Callable[..., Harness], field: str, changes: dict[str, Any]) -> None:
    harness = engine()
    wanted = {name: value for name, value in changes.items() if name != "n"}
    request = EngineRequest(
        request_id="r",
        namespace=NAMESPACE,
        prompt_token_ids=[5, 6, 7, 8],
        sampling=SamplingParams(max_tokens=0, n=changes.get("n", 1)),
        scores=ScoreRequest(**wanted),
    )
    with pytest.raises(InvalidRequest) as refusal:
        harness.engine.add(request)
    assert refusal.value.field == field
    with pytest.raises(InvalidRequest, match="`max_tokens` must be at least 1"):
        harness.engine.add(msgspec.structs.replace(request, scores=None))


def test_a_continuation_that_does_not_fit_is_refused(engine: Callable[..., Harness]) -> None:
    with pytest.raises(PromptTooLong):
        add(engine(num_blocks=2), "r", [5] * 10, n=2, continuations=[[3], [4] * 7])


def test_random_joins_and_leaves_lose_no_score(peft: Reference, engine: Callable[..., Harness]) -> None:
    choose = random.Random(8)
    harness = engine(
        num_blocks=30, scheduler={"max_num_batched_tokens": 20, "max_num_seqs": 4, "overlap": "on"}
    )
    waiting = list(enumerate(prompts(30, seed=31)))
    scored, aborted = dict[str, tuple[str | None, Sequence]](), set[str]()
    while waiting or harness.engine.has_unfinished:
        while waiting and choose.random() < 0.4:
            index, prompt = waiting.pop()
            adapter = choose.choice(NAMES)
            (sequence,) = add(
                harness, str(index), prompt, adapter, max_tokens=choose.choice([0, 0, 9]), prompt_logprobs=1
            )
            scored[str(index)] = adapter, sequence
        if scored and choose.random() < 0.05:
            name = choose.choice([*scored])
            aborted |= {name} if harness.engine.abort(name) else set()
        harness.step()
    assert not harness.failures and aborted
    for name, (adapter, sequence) in scored.items():
        if name not in aborted:
            check_prompt(peft, adapter, sequence, 1)
