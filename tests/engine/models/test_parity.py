"""The decoder over the paged KV cache equals `transformers` (fp32), however the tokens are cut into steps.

Every case of the tiny models is run: architectures, biases, tied embeddings, rope variants, windows shorter than the prompt.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import BatchRows
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.batch.sequence import Sequence as EngineSequence
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.weights import decoder_state
from loraplex.engine.kernels import dispatch
from loraplex.engine.kv_cache.tensors import allocate_kv_cache
from loraplex.engine.messages import EngineRequest
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 13
TOKENS = 200
CPU = torch.device("cpu")


class Tiny(Protocol):
    path: Path
    reference: Any

    def logits(self, token_ids: list[int]) -> Tensor: ...


@dataclass(slots=True)
class Row:
    """A sequence under test: its tokens, its blocks in no order, the logits so far."""

    sequence: EngineSequence
    block_table: tuple[int, ...]
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def plan(self, count: int) -> PlannedRow:
        end = self.computed + count
        return PlannedRow(
            sequence=self.sequence,
            start=self.computed,
            token_ids=tuple(self.sequence.token_ids[self.computed : end]),
            block_table=self.block_table[: -(-end // BLOCK_SIZE)],
            adapter=None,
            samples=end == len(self.sequence.token_ids) or count == 1,
        )


class Steps:
    """Runs steps over one decoder and one KV cache and keeps the logits of every token."""

    def __init__(self, path: Path, rows: int, token_ids: list[list[int]]) -> None:
        config = load_model_config(str(path))
        state = decoder_state(config, open_checkpoint(str(path), config), torch.float32)
        self.decoder = Decoder(config, state, TOKENS)
        num_blocks = rows * BLOCKS_PER_SEQUENCE + 1
        self.cache = allocate_kv_cache(config, num_blocks, BLOCK_SIZE, torch.float32, CPU)
        blocks = list(range(num_blocks))
        random.Random(5).shuffle(blocks)
        self.rows = [
            Row(make_sequence(ids), tuple(blocks[index * BLOCKS_PER_SEQUENCE :][:BLOCKS_PER_SEQUENCE]))
            for index, ids in enumerate(token_ids)
        ]

    def step(self, counts: dict[int, int]) -> None:
        """Computes the next `counts[row]` tokens of each row, single tokens first as the scheduler has it."""
        order = sorted(counts, key=lambda index: counts[index] > 1)
        plan = StepPlan(tuple(self.rows[index].plan(counts[index]) for index in order))
        batch = BatchRows(plan, BLOCK_SIZE, {}).batch(CPU, HostTransfers(CPU))
        every_token = replace(batch, sampled_tokens=None, num_sampled=plan.num_tokens)
        logits = self.decoder.forward(every_token, self.cache)
        parts = torch.split(logits, [counts[index] for index in order])
        for index, part in zip(order, parts, strict=True):
            self.rows[index].logits.append(part)
            self.rows[index].computed += counts[index]

    def logits(self, row: int) -> Tensor:
        return torch.cat(self.rows[row].logits)


@pytest.fixture(
    params=[dispatch.KernelBackend.REFERENCE, dispatch.KernelBackend.COMPILED],
    ids=lambda backend: backend.name.lower(),
)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test on each backend of the kernels that this CPU has."""
    if dispatch.backend_for(torch.empty(0)) is dispatch.KernelBackend.REFERENCE is not request.param:
        pytest.skip("this CPU has no compiled kernels")
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: request.param)


@pytest.mark.usefixtures("backend")
def test_prompt_in_chunks_then_decodes(tiny_model: Tiny, prompt: list[int]) -> None:
    steps = Steps(tiny_model.path, 1, [prompt])
    for count in [64, 64, 60] + [1] * 12:
        steps.step({0: count})
    assert_equal(steps.logits(0), tiny_model.logits(prompt))


def test_mixed_batches_of_decodes_and_chunks(tiny_model: Tiny, prompt: list[int]) -> None:
    prompts = [prompt, prompt[::-1], prompt[60:] + prompt[:60]]
    steps = Steps(tiny_model.path, 3, prompts)
    choose = random.Random(11)
    while unfinished := [index for index, row in enumerate(steps.rows) if row.computed < TOKENS]:
        counts = {index: choose.choice([1, 1, 5, 33, 80]) for index in unfinished if choose.random() < 0.8}
        if counts:
            steps.step({i: min(count, TOKENS - steps.rows[i].computed) for i, count in counts.items()})
    for index, ids in enumerate(prompts):
        assert_equal(steps.logits(index), tiny_model.logits(ids))


def test_logits_of_sampled_rows_only(llama_model: Tiny, prompt: list[int]) -> None:
    steps = Steps(llama_model.path, 2, [prompt, prompt[:70]])
    plan = StepPlan((steps.rows[0].plan(50), steps.rows[1].plan(70)))
    logits = steps.decoder.forward(
        BatchRows(plan, BLOCK_SIZE, {}).batch(CPU, HostTransfers(CPU)), steps.cache
    )
    assert logits.shape == (1, 128)
    assert_equal(logits, llama_model.logits(prompt[:70])[-1:])


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_sharded_checkpoint_gives_the_same_logits(
    tiny: Callable[[str], Tiny], tmp_path: Path, prompt: list[int], case: str
) -> None:
    tiny(case).reference.save_pretrained(tmp_path, max_shard_size="60KB")
    steps = Steps(tmp_path, 1, [prompt])
    steps.step({0: TOKENS})
    assert_equal(steps.logits(0), tiny(case).logits(prompt))


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def make_sequence(token_ids: Sequence[int]) -> EngineSequence:
    ids = list(token_ids)
    request = EngineRequest(
        request_id="r", namespace=bytes(32), prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1)
    )
    return EngineSequence(request=request, choice=0, arrival=0.0, seed=0, token_ids=ids)
