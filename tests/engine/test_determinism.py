"""What a seed promises: the same log-probabilities, bit by bit, whatever the company, the cuts, the prefix hit and preemptions.

Invariant: `deterministic` promises them in every type. Without it a CPU gives them in bfloat16, except behind blocks that
decoding wrote.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engine.test_engine import Harness, Reference, harnesses, prompts

MODES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "deterministic bfloat16": {"dtype": "bfloat16", "deterministic": True},
    "deterministic float32": {"deterministic": True},
    "deterministic float32, 8-bit pages": {
        "deterministic": True,
        "page_dtype": "int8",
        "max_page_error": 1.0,
    },
}
NAMES = [None, "everything", "ends"]
PROMPT = [3 + i * 7 % 120 for i in range(70)]
BLOCK = 8


@pytest.fixture(scope="module")
def peft(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("determinism"))


@pytest.fixture(params=MODES)
def make(request: pytest.FixtureRequest, peft: Reference) -> Iterator[Callable[..., Harness]]:
    yield from harnesses(peft, **MODES[request.param])


def test_bits_depend_on_neither_the_cuts_nor_the_hit(make: Callable[..., Harness]) -> None:
    """Steps of 1 to 69 tokens cut the prompt everywhere; every number of its blocks is cached by another prompt."""
    whole = make(scheduler={"max_num_batched_tokens": 256})
    for name in NAMES:
        whole.add(str(name), PROMPT, name, max_tokens=2, logprobs=5)
        whole.run()
    for budget in [*range(1, 18, 2), *range(2, 40, 6), 31, 33, 47, 63, 64, 69]:
        cut = make(scheduler={"max_num_batched_tokens": budget, "max_num_seqs": 1})
        for blocks in range(len(PROMPT) // BLOCK + 1):
            name = NAMES[(budget + blocks) % 3]
            cut.engine.scheduler.cache.clear()
            cut.add("other", [*PROMPT[: blocks * BLOCK], 5], name, max_tokens=1)
            cut.run()
            before = cut.engine.stats().cached_prompt_tokens
            cut.add("same", PROMPT, name, max_tokens=2, logprobs=5)
            cut.run()
            assert cut.engine.stats().cached_prompt_tokens - before == blocks * BLOCK
            assert cut.logprobs.pop(("same", 0)) == whole.logprobs[str(name), 0], (budget, blocks, name)


def test_bits_depend_on_neither_company_nor_preemptions(make: Callable[..., Harness]) -> None:
    """Responses are longer than the rows that recompute them, and end within a block, as prompts do."""
    jobs = [(prompt, NAMES[i % 3]) for i, prompt in enumerate(prompts(7, seed=21))]
    sampling = {"temperature": 0.9, "seed": 7, "max_tokens": 75, "logprobs": 3, "ignore_eos": True}
    alone = make()
    for index, (prompt, name) in enumerate(jobs):
        alone.add(str(index), prompt, name, **sampling)
        alone.run()
    for num_blocks, budget in [(256, 256), (256, 13), (38, 256), (38, 61)]:
        together = make(
            num_blocks=num_blocks, scheduler={"max_num_batched_tokens": budget, "max_num_seqs": 7}
        )
        for index, (prompt, name) in enumerate(jobs):
            together.add(str(index), prompt, name, **sampling)
        together.run()
        assert (together.engine.stats().preemptions > 0) == (num_blocks == 38)
        assert together.logprobs == alone.logprobs, (num_blocks, budget)


def test_a_chat_continues_with_the_same_bits(make: Callable[..., Harness]) -> None:
    """In deterministic mode a response's blocks are computed again; otherwise they are found, and nothing is promised."""
    fresh, chat = make(), make()
    chat.add("turn", PROMPT[:21], "everything", max_tokens=30, ignore_eos=True)
    chat.run()
    prompt = [*PROMPT[:21], *chat.outputs["turn", 0], 9, 10]
    for engine in (fresh, chat):
        engine.add("next", prompt, "everything", logprobs=3)
        engine.run()
    found = chat.engine.stats().cached_prompt_tokens
    if chat.engine.scheduler.cache.prompts_only:
        assert chat.logprobs["next", 0] == fresh.logprobs["next", 0]
        assert found == 21 // BLOCK * BLOCK
    else:
        assert found == 50 // BLOCK * BLOCK


def test_a_preempted_response_does_not_take_blocks_that_a_prompt_wrote(make: Callable[..., Harness]) -> None:
    """Another request has the row's tokens so far as its prompt, so that its blocks were computed as a chunk."""
    alone, both = make(), make()
    alone.add("row", PROMPT[:21], max_tokens=60, ignore_eos=True, logprobs=3)
    alone.run()
    both.add("other", [*PROMPT[:21], *alone.outputs["row", 0]], max_tokens=1)
    both.run()
    both.add("row", PROMPT[:21], max_tokens=60, ignore_eos=True, logprobs=3)
    for _ in range(40):
        both.step()
    (sequence,) = both.engine.scheduler._requests["row"].sequences
    both.engine.scheduler._batch._preempt(sequence)
    both.run()
    assert sequence.num_preemptions == 1
    if both.engine.scheduler.cache.prompts_only:
        assert both.logprobs["row", 0] == alone.logprobs["row", 0]
    assert len(both.outputs["row", 0]) == 60
