"""An engine on a CPU whose graphs are simulated: a captured step runs again over the static buffers.

Invariant: whatever a step does not write again is poisoned before it, inputs and results alike, so that nothing can be left
over.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.engine.random_llama import save_random_llama
from tests.engine.runner.cuda_graphs.static_buffers import buffers_of

from loraplex.engine.batch.forward_batch import BatchRows, ForwardBatch, UnknownTokens
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.lora.batch import LoraBatch, group_rows
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKind, AdapterKinds
from loraplex.engine.runner.cuda_graphs.buckets import Buckets, StepShape
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticBlocks, StaticInputs
from loraplex.engine.runner.cuda_graphs.step_graphs import FinalStates, Grouping, StepGraphs
from loraplex.engine.sampling.scorer import StepScores
from loraplex.engine.sampling.step_logits import StepLogits, greedy_tokens
from loraplex.engine.sampling_params import SamplingParams

VOCAB, HIDDEN, BLOCKS, BLOCK_SIZE = 96, 32, 40, 4
ADAPTERS = ("a", "bb", "ccc", "dddd")
CPU = torch.device("cpu")
POISON = 1 << 30
MAX_TOKENS = 24
"""Tokens of a step."""


class RandomAdapters:
    """An adapter is what its digest says, and changes what comes out."""

    def load(self, adapter: AdapterRef) -> LoraWeights:
        generator = torch.Generator().manual_seed(sum(adapter.digest.encode()))
        rank = 1 + len(adapter.digest) % 4
        modules = {
            f"layers.{layer}.o_proj": LoraModule(
                torch.randn(rank, HIDDEN, generator=generator), torch.randn(HIDDEN, rank, generator=generator)
            )
            for layer in range(2)
        }
        modules["lm_head"] = LoraModule(
            torch.randn(rank, HIDDEN, generator=generator), torch.randn(VOCAB, rank, generator=generator)
        )
        return LoraWeights(adapter.digest, modules)


class SimulatedReplayer:
    """Keeps the step itself. Between replays every static tensor holds what would break or show in the next."""

    def __init__(self, inputs: StaticInputs, results: StepLogits) -> None:
        self._inputs = inputs
        self._results = results
        self.nbytes = 0
        self.captures = 0

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        self.captures += 1

        def replay() -> None:
            self._results.logits.fill_(torch.nan)
            if self._results.greedy is not None:
                self._results.greedy.fill_(POISON)
            step()
            self._poison()

        return replay

    def _poison(self) -> None:
        for buffer in buffers_of(self._inputs):
            buffer.fill_(POISON)


def tiny_model(folder: Path, *, deterministic: bool) -> LoadedModel:
    """A random Llama of two layers in float32."""
    save_random_llama(
        folder,
        std=0.3,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=3,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=BLOCKS)
    return load_model(
        EngineConfig(
            model=str(folder), dtype="float32", device="cpu", cache=cache, deterministic=deterministic
        )
    )


class Run:
    """An engine with simulated graphs or without, and what came out of it. `mask` makes the
    mask of a request with a grammar.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        graphs: bool,
        overlap: str = "off",
        few: int = 2,
        rows: int = 7,
        deterministic: bool = False,
        grouping: Grouping | None = None,
        shapes: tuple[StepShape, ...] = (),
        mask: Callable[[], Any] | None = None,
    ) -> None:
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=BLOCKS)
        scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=MAX_TOKENS, overlap=overlap)
        settings = EngineConfig(model="", cache=cache, scheduler=scheduler, deterministic=deterministic)
        self._deterministic = deterministic
        masks = None if mask is None else lambda namespace, grammar: mask()
        self.engine = Engine(model, settings, RandomAdapters(), mask_factory=masks)
        self.runner = self.engine.runner
        self.kinds: list[AdapterKind] = []
        self.compared: list[StepShape | None] = []
        self.outputs: dict[str, list[int]] = {}
        self.buckets = Buckets(rows, MAX_TOKENS)
        self.buckets.shapes = shapes or self.buckets.shapes
        self.graphs = self._replay(few, grouping or self._group) if graphs else None

    def _replay(self, few: int, grouping: Grouping) -> StepGraphs:
        blocks = StaticBlocks(128 // BLOCK_SIZE, BLOCK_SIZE, BLOCKS)
        inputs = self._inputs = StaticInputs(self.buckets, blocks, CPU)
        rows = self.buckets.rows
        results = StepLogits(torch.empty(rows, VOCAB), torch.empty(rows, dtype=torch.int64))
        replayer = SimulatedReplayer(inputs, results)
        # One block more than the pool hands out, as on a GPU.
        cache = self.runner._kv_cache
        cache[:] = [layer.new_zeros(BLOCKS + 1, *layer.shape[1:]) for layer in cache]
        kinds = AdapterKinds(few, is_one=self._deterministic)
        states = FinalStates(self.buckets.most, HIDDEN, torch.float32, CPU)

        def forward(batch: ForwardBatch) -> torch.Tensor:
            return self.runner.forward(batch, None if batch.chunks is None else states.keep)

        graphs = StepGraphs(forward, inputs, results, self.buckets, replayer, grouping, kinds, states)
        report = graphs.capture()
        counts = [len(kinds.kinds(shape.tokens)) for shape in self.buckets.shapes]
        assert report.graphs == replayer.captures == sum(counts)
        mixed = [count for count, shape in zip(counts, self.buckets.shapes, strict=True) if shape.chunks]
        assert report.mixed == sum(mixed)
        self.kinds.clear()
        self.runner.replay(graphs)
        return graphs

    def _group(self, row_slots: torch.Tensor, kind: AdapterKind, is_mixed: bool) -> LoraBatch | None:
        """On a CPU decodes and chunks have kernels of their own."""
        self.kinds.append(kind)
        decodes = int((self._inputs.lengths[: len(row_slots)] > 0).sum())
        return group_rows(row_slots.tolist(), CPU, decodes if is_mixed and not self._deterministic else None)

    def compare_steps(self) -> None:
        """Run every step eagerly before it is launched: logits, keys and values must be the same to the bit."""
        runner, launched, cache = self.runner, self.runner._logits, self.runner._kv_cache
        transfers = HostTransfers(CPU)

        def compared(rows: BatchRows, unknown: UnknownTokens | None, scores: StepScores | None) -> StepLogits:
            before = [layer.clone() for layer in cache]
            eager = runner.forward(rows.batch(CPU, transfers, unknown, runner._adapters))
            expected = [layer.clone() for layer in cache]
            for layer, kept in zip(cache, before, strict=True):
                layer.copy_(kept)
                layer[BLOCKS].fill_(torch.nan)  # what padding writes is not read
            replayed = self.graphs.num_replayed if self.graphs else 0
            found = launched(rows, unknown, scores)
            torch.testing.assert_close(found.logits, eager, rtol=0, atol=0)
            assert found.greedy is None or torch.equal(found.greedy, greedy_tokens(eager))
            for layer, whole in zip(cache, expected, strict=True):
                torch.testing.assert_close(layer[:BLOCKS], whole[:BLOCKS], rtol=0, atol=0)
            is_replayed = self.graphs is not None and self.graphs.num_replayed > replayed
            self.compared.append(self._shape(rows) if is_replayed else None)
            return found

        runner._logits = compared  # type: ignore[method-assign]

    def _shape(self, rows: BatchRows) -> StepShape | None:
        counts = (len(rows.token_ids), len(rows.decodes), len(rows.chunks), len(rows.sampled))
        return self.buckets.of(*counts)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        adapter: str | None,
        grammar: bytes | None = None,
        **sampling: Any,
    ) -> None:
        self.outputs[request_id] = []
        reference = AdapterRef(namespace=bytes(32), digest=adapter, blob_path="") if adapter else None
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                namespace=bytes(32),
                prompt_token_ids=prompt,
                sampling=SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | sampling),
                adapter=reference,
                grammar=grammar,
            )
        )

    def step(self) -> None:
        result = self.engine.step()
        assert not result.failures
        for output in result.outputs:
            self.outputs[output.sequence.request_id].append(output.token_id)
        if not result.ran and self.engine.has_unfinished:
            self.engine.adapters.on_loaded.wait(0.05)

    def play(
        self,
        seed: int,
        requests: int = 18,
        adapters: tuple[str, ...] = ADAPTERS,
        grammars: tuple[bytes, ...] = (),
    ) -> "Run":
        """Requests that join and leave: every bucket, every kind, mixed steps between."""
        for name in adapters:
            self.add(name, [5], name, max_tokens=1)
        # From here on the time of a load does not decide which rows are in a step.
        while self.engine.has_unfinished:
            self.step()
        choose = random.Random(seed)
        for index in range(requests):
            prompt = [choose.randrange(3, VOCAB) for _ in range(choose.randrange(1, 12))]
            adapter = choose.choice([None, None, *adapters])
            grammar = choose.choice([None, *grammars])
            self.add(str(index), prompt, adapter, grammar, max_tokens=choose.randrange(2, 14))
            for _ in range(choose.choice([0, 0, 2, 5])):
                self.step()
        while self.engine.has_unfinished:
            self.step()
        stats = self.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == BLOCKS
        self.engine.close()
        return self
