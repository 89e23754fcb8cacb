"""Replayed decode steps against eager ones. The replay is simulated: the captured step runs again over the static buffers.

Whatever a step does not write again is poisoned before it, inputs and logits alike, so that nothing can be left over.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.batch.forward_batch import AdapterPath, BatchRows
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.kernels import dispatch
from loraplex.engine.lora.batch import LoraBatch, group_rows
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.runner.cuda_graphs.buckets import Buckets
from loraplex.engine.runner.cuda_graphs.decode_graphs import AdapterKind, AdapterKinds, DecodeGraphs, Grouping
from loraplex.engine.runner.cuda_graphs.static_groups import StaticGroups
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticInputs, StaticShape
from loraplex.engine.sampling_params import SamplingParams

VOCAB, HIDDEN, BLOCKS, BLOCK_SIZE = 96, 32, 40, 4
ADAPTERS = ("a", "bb", "ccc", "dddd")
CPU = torch.device("cpu")


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
        return LoraWeights(adapter.digest, modules)


class SimulatedReplayer:
    """Keeps the step itself. Between replays every static tensor holds what would break or show in the next."""

    def __init__(self, inputs: StaticInputs, logits: torch.Tensor) -> None:
        self._inputs = inputs
        self._logits = logits
        self.nbytes = 0
        self.captures = 0

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        self.captures += 1

        def replay() -> None:
            self._logits.fill_(torch.nan)
            step()
            self._poison()

        return replay

    def _poison(self) -> None:
        for buffer in self._inputs.buffers:
            buffer.fill_(1 << 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("graphs")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=3,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.normal_(std=0.3)
    llama.save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=BLOCKS)
    return load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu", cache=cache))


class Run:
    """An engine on a CPU, with simulated graphs or without, and what came out of it."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        graphs: bool,
        overlap: str = "off",
        few: int = 2,
        rows: int = 7,
        grouping: Grouping | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=BLOCKS)
        scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=24, overlap=overlap)
        self._rows = rows
        self._grouping = grouping or self._group
        self._sizes = sizes
        settings = EngineConfig(model="", cache=cache, scheduler=scheduler)
        self.engine = Engine(model, settings, RandomAdapters())
        self.kinds: list[AdapterKind] = []
        self.outputs: dict[str, list[int]] = {}
        self.graphs = self._replay(few) if graphs else None

    def _replay(self, few: int) -> DecodeGraphs:
        inputs = StaticInputs(StaticShape(self._rows, 128 // BLOCK_SIZE, BLOCK_SIZE, BLOCKS), CPU)
        logits, buckets = torch.empty(self._rows, VOCAB), Buckets(self._rows)
        buckets.sizes = self._sizes or buckets.sizes
        replayer = SimulatedReplayer(inputs, logits)
        runner = self.engine.runner
        # One block more than the pool hands out, as on a GPU.
        cache = runner._kv_cache
        cache[:] = [layer.new_zeros(BLOCKS + 1, *layer.shape[1:]) for layer in cache]
        graphs = DecodeGraphs(
            runner.forward, inputs, logits, buckets, replayer, self._grouping, AdapterKinds(few)
        )
        report = graphs.capture()
        kinds = sum(len(AdapterKinds(few).kinds(rows)) for rows in buckets.sizes)
        assert report.graphs == replayer.captures == kinds
        self.kinds.clear()
        runner.replay(graphs)
        return graphs

    def _group(self, row_slots: torch.Tensor, kind: AdapterKind, is_mixed: bool) -> LoraBatch | None:
        assert not is_mixed
        self.kinds.append(kind)
        return group_rows(row_slots.tolist(), CPU)

    def add(self, request_id: str, prompt: list[int], adapter: str | None, **sampling: Any) -> None:
        self.outputs[request_id] = []
        reference = AdapterRef(namespace=bytes(32), digest=adapter, blob_path="") if adapter else None
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                namespace=bytes(32),
                prompt_token_ids=prompt,
                sampling=SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | sampling),
                adapter=reference,
            )
        )

    def step(self) -> None:
        result = self.engine.step()
        assert not result.failures
        for output in result.outputs:
            self.outputs[output.sequence.request_id].append(output.token_id)
        if not result.ran and self.engine.has_unfinished:
            self.engine.adapters.on_loaded.wait(0.05)

    def play(self, seed: int, requests: int = 18, adapters: tuple[str, ...] = ADAPTERS) -> "Run":
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
            self.add(str(index), prompt, adapter, max_tokens=choose.randrange(2, 14))
            for _ in range(choose.choice([0, 0, 2, 5])):
                self.step()
        while self.engine.has_unfinished:
            self.step()
        stats = self.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == BLOCKS
        self.engine.close()
        return self


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("seed", [1, 2])
def test_replayed_steps_give_the_tokens_of_eager_ones(model: LoadedModel, seed: int, overlap: str) -> None:
    eager = Run(model, graphs=False).play(seed)
    replayed = Run(model, graphs=True, overlap=overlap).play(seed)
    assert replayed.outputs == eager.outputs
    assert replayed.graphs is not None and replayed.graphs.num_replayed > 20
    assert set(replayed.kinds) == {AdapterKind.FEW, AdapterKind.MANY}


def test_padding_writes_to_no_block_of_the_pool(model: LoadedModel) -> None:
    run = Run(model, graphs=True)
    cache = run.engine.runner._kv_cache
    for layer in cache:
        layer.fill_(7.0)
    for index in range(3):
        run.add(str(index), [5 + index, 9], None, max_tokens=4)
    while run.engine.has_unfinished:
        run.step()
    run.engine.close()
    touched = {block for layer in cache for block in range(BLOCKS + 1) if bool((layer[block] != 7.0).any())}
    assert BLOCKS in touched and len(touched) == 1 + 3 * 2
    assert all(bool((layer[BLOCKS][1:] == 7.0).all()) for layer in cache), "one slot takes it all"
    assert not run.kinds, "rows of the base alone pay for no adapter"


def test_without_adapters_only_base_steps_are_captured(model: LoadedModel) -> None:
    run = Run(model, graphs=True, few=0)
    run.add("base", [5, 6], None, max_tokens=5)
    run.add("adapted", [5, 6], "a", max_tokens=9)
    while run.engine.has_unfinished:
        run.step()
    run.engine.close()
    assert run.graphs is not None and not run.kinds
    assert len(run.outputs["adapted"]) == 9


def test_a_step_of_forced_tokens_is_not_replayed() -> None:
    """Several tokens of a row decode side by side and the last alone is sampled: a captured step samples every row."""
    inputs = StaticInputs(StaticShape(4, 8, BLOCK_SIZE, BLOCKS), CPU)
    logits = torch.zeros(4, VOCAB)
    replayer = SimulatedReplayer(inputs, logits)
    graphs = DecodeGraphs(
        lambda batch: torch.ones(batch.num_sampled, VOCAB),
        inputs,
        logits,
        Buckets(4),
        replayer,
        lambda row_slots, kind, is_mixed: None,
        AdapterKinds(0),
    )
    graphs.capture()
    request = EngineRequest(
        request_id="r", namespace=b"", prompt_token_ids=[5, 6], sampling=SamplingParams(max_tokens=9)
    )
    sequence = Sequence(request, 0, 0.0, 0, [5, 6, 7, 8])
    for tokens, is_replayed in (((7,), True), ((7, 8), False)):
        plan = StepPlan((PlannedRow(sequence, 2, tokens, (0, 1), None, True),))
        assert plan.rows[0].decodes
        found = graphs.run(BatchRows(plan, BLOCK_SIZE, {}), None)
        assert (found is not None) == is_replayed


@pytest.mark.parametrize(
    ("limits", "rows", "kinds"),
    [
        (AdapterKinds(0), 64, "BASE"),
        (AdapterKinds(8), 64, "BASE FEW MANY"),
        (AdapterKinds(8), 8, "BASE FEW"),
        (AdapterKinds(8, is_one=True), 4, "BASE MANY"),
    ],
)
def test_the_kinds_that_there_are(limits: AdapterKinds, rows: int, kinds: str) -> None:
    assert [kind.name for kind in limits.kinds(rows)] == kinds.split()
    if limits.few:
        found = {limits.of(adapters) for adapters in (0, 1, 8, 9, 64) if adapters <= rows}
        assert found == set(limits.kinds(rows))


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter has a process of its own")
def test_the_triton_backend_is_replayed_as_it_is_run(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of rows, table columns and lengths are read by the kernels themselves, from buffers full of poison."""
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.REFERENCE)
    eager = Run(model, graphs=False, rows=4).play(3, requests=4, adapters=("a", "bb"))
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
    grouping = StaticGroups(AdapterPath(), max_adapters=8)
    options: dict[str, Any] = {"overlap": "on", "few": 8, "rows": 4, "sizes": (4,)}
    replayed = Run(model, graphs=True, grouping=grouping, **options).play(3, requests=4, adapters=("a", "bb"))
    assert replayed.outputs == eager.outputs
    assert replayed.graphs is not None and replayed.graphs.num_replayed > 5


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(f"{__file__}::test_the_triton_backend_is_replayed_as_it_is_run", seconds=12)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == 1
