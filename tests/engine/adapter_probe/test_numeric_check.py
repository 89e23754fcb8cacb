"""Probes an adapter on a running engine: figures against the reference, faults of the adapter, and rows that run
meanwhile.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from tests.engine.test_engine_adapters import in_pages
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.adapter_probe import numeric_check
from loraplex.engine.adapter_probe.probe import with_code
from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.errors import (
    AdapterError,
    AdapterInexact,
    AdapterLoadFailed,
    EngineOverloaded,
    EngineUnavailable,
    NonFiniteLogits,
    RequestTimeout,
)
from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.sgmv import sgmv
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.lora import pool_factory
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.site import LoraSite
from loraplex.engine.lora.weights import PROJECTIONS, LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest, Event, Failed, ProbeReport
from loraplex.engine.model_loading import load_model
from loraplex.engine.sampling_params import SamplingParams

VOCAB, HIDDEN, INTERMEDIATE, LAYERS = 96, 32, 48, 2
KV = 16
SHAPES = {
    **dict.fromkeys(("q_proj", "o_proj"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("k_proj", "v_proj"), (KV, HIDDEN)),
    **dict.fromkeys(("gate_proj", "up_proj"), (INTERMEDIATE, HIDDEN)),
    "down_proj": (HIDDEN, INTERMEDIATE),
    "lm_head": (VOCAB, HIDDEN),
    "embed_tokens": (HIDDEN, VOCAB),
}
"""(outputs, inputs) by kind of module."""
SITES_OF_ALL = 2 + 4 * LAYERS


def module(kind: str, rank: int, seed: int, scale: float = 0.2) -> LoraModule:
    outputs, inputs = SHAPES[kind]
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator) * scale for shape in ((rank, inputs), (outputs, rank)))
    return LoraModule(a, b)


def everything(digest: str = "all") -> LoraWeights:
    """All modules, at ranks of less and more than a page."""
    names = [f"layers.{layer}.{kind}" for layer in range(LAYERS) for kind in PROJECTIONS]
    names += ["lm_head", "embed_tokens"]
    ranks = zip(names, count(3, 5), strict=False)
    return LoraWeights(
        digest, {name: module(name.rpartition(".")[2], 1 + rank % 40, rank) for name, rank in ranks}
    )


class Source:
    """Adapters by digest; what is an error is raised. Loads wait for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.adapters: dict[str, LoraWeights | AdapterError] = {"all": everything()}

    def load(self, adapter: AdapterRef) -> LoraWeights:
        self.gate.wait(60)
        found = self.adapters[adapter.digest]
        if isinstance(found, AdapterError):
            raise found
        return found


def ref(digest: str = "all") -> AdapterRef:
    return AdapterRef(namespace=bytes(32), digest=digest, blob_path="")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(
        str(path / "tokenizer.json")
    )
    return path


@pytest.fixture
def source() -> Source:
    return Source()


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(folder: Path, source: Source) -> MakeEngine:
    def make(dtype: str = "float32", clock: Callable[[], float] | None = None, **lora: Any) -> Engine:
        config = EngineConfig(
            model=str(folder),
            dtype=dtype,
            device="cpu",
            cache=CacheConfig(block_size=8, num_blocks=160),
            scheduler=SchedulerConfig(overlap="off"),
            lora=LoraConfig(**lora),
        )
        model = load_model(config)
        return Engine(model, config, source) if clock is None else Engine(model, config, source, clock=clock)

    return make


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[LocalEngine]:
    local = LocalEngine(engine)
    try:
        yield local
        assert engine.adapters.num_pinned == 0
    finally:
        await local.close()


def request(request_id: str, max_tokens: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(
        request_id=request_id, namespace=bytes(32), prompt_token_ids=[5, 6], sampling=sampling
    )


@pytest.mark.parametrize(
    ("dtype", "is_paged", "page_dtype"),
    [
        ("float32", False, "auto"),
        ("bfloat16", False, "auto"),
        ("float32", True, "auto"),
        ("float32", True, "int8"),
    ],
)
async def test_a_sound_adapter_passes_and_its_figures_are_reported(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, dtype: str, is_paged: bool, page_dtype: str
) -> None:
    if is_paged:
        monkeypatch.setattr(pool_factory, "open_memory", in_pages)
        monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.REFERENCE)
    async with serving(make_engine(dtype, page_dtype=page_dtype)) as local:
        report = await local.probe(ref())
    assert (report.code, report.finite, report.generated_tokens) == (None, True, 8)
    assert report.modules == 7 * LAYERS + 2 and report.max_error.keys() == SHAPES.keys()
    assert report.effect > 0.1
    assert max(report.max_error.values()) < report.bound < 0.2
    if dtype == "float32" and page_dtype == "auto":
        assert max(report.max_error.values()) < 1e-5


async def test_an_adapter_of_zeros_passes_without_effect(make_engine: MakeEngine, source: Source) -> None:
    zeros = LoraModule(torch.randn(4, HIDDEN), torch.zeros(HIDDEN, 4))
    source.adapters["zeros"] = LoraWeights("zeros", {"layers.0.q_proj": zeros})
    async with serving(make_engine()) as local:
        report = await local.probe(ref("zeros"))
    assert (report.code, report.effect, report.max_error) == (None, 0.0, {"q_proj": 0.0})


@pytest.mark.parametrize("scale", [1e-30, 1e6])
async def test_the_size_of_an_adapter_does_not_fail_it(
    make_engine: MakeEngine, source: Source, scale: float
) -> None:
    source.adapters["sized"] = LoraWeights("sized", {"layers.1.down_proj": module("down_proj", 9, 1, scale)})
    async with serving(make_engine("bfloat16")) as local:
        assert (await local.probe(ref("sized"))).code is None


async def test_a_device_that_computes_wrong_results_is_detected(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One column of one projection of one layer."""

    def wrong(x: torch.Tensor, y: torch.Tensor, site: LoraSite, lora: LoraBatch) -> None:
        sgmv(x, y, site, lora)
        if site.names == ("layers.1.o_proj",):
            y[:, 7] = 0.0

    monkeypatch.setattr(numeric_check, "sgmv", wrong)
    async with serving(make_engine()) as local:
        report = await local.probe(ref())
    assert report.code == AdapterInexact.code and report.max_error["o_proj"] > 0.05
    assert "o_proj differs from the reference" in report.message
    assert all(error < 1e-5 for kind, error in report.max_error.items() if kind != "o_proj")


async def test_values_that_the_models_type_does_not_hold_are_refused(
    make_engine: MakeEngine, source: Source
) -> None:
    huge = LoraModule(torch.full((4, HIDDEN), 1e30), torch.full((HIDDEN, 4), 1e30))
    source.adapters["huge"] = LoraWeights("huge", {"layers.0.o_proj": huge})
    async with serving(make_engine()) as local:
        report = await local.probe(ref("huge"))
    assert (report.code, report.finite) == (NonFiniteLogits.code, False)
    assert report.max_error == {"o_proj": float("inf")}, "the figures tell which module"


async def test_an_adapter_that_does_not_load_is_its_own_fault(
    make_engine: MakeEngine, source: Source
) -> None:
    source.adapters["gone"] = AdapterLoadFailed("the blob is missing")
    async with serving(make_engine()) as local:
        report = await local.probe(ref("gone"))
        assert (report.code, report.message) == (AdapterLoadFailed.code, "the blob is missing")
        assert (await local.probe(ref())).code is None


async def test_probes_and_requests_run_together(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as local, asyncio.timeout(60):

        async def answer(request_id: str) -> list[Event]:
            return [event async for event in local.submit(request(request_id, 60))]

        alone = await answer("alone")
        *reports, beside = await asyncio.gather(local.probe(ref()), local.probe(ref()), answer("beside"))
    assert [report.code for report in reports if isinstance(report, ProbeReport)] == [None, None]
    assert not any(isinstance(event, Failed) for event in beside)
    tokens = [
        [token for event in events if hasattr(event, "token_ids") for token in event.token_ids]
        for events in (alone, beside)
    ]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 60


async def test_a_closing_engine_ends_its_probes(make_engine: MakeEngine, source: Source) -> None:
    engine = make_engine()
    local = LocalEngine(engine)
    source.gate.clear()
    modules = asyncio.create_task(local._probe_modules(ref()))
    while not engine.numeric_check.is_busy:
        await asyncio.sleep(0.005)
    closing = asyncio.create_task(local.close())
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(modules, 60)
    source.gate.set()
    await closing
    with pytest.raises(EngineUnavailable):
        await local.probe(ref())


class Clock:
    """Advances by `tick` with every look at it."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def step_until(engine: Engine, done: "Future[ProbeReport]") -> list[int]:
    """How many rows each step brought forward, until the probe is done."""
    rows: list[int] = []
    for _ in range(20_000):
        if done.done():
            return rows
        rows.append(len(engine.step().outputs))
        if not rows[-1]:
            engine.adapters.on_loaded.wait(0.005)
    raise AssertionError("the probe does not end")


def test_a_step_does_few_sites_and_rows_go_on(make_engine: MakeEngine) -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    warm: Future[ProbeReport] = Future()
    engine.numeric_check.start(ref(), warm)
    step_until(engine, warm)
    clock.tick = numeric_check.STEP_BUDGET_S / 2
    engine.add(request("row", 200))
    engine.step()
    done: Future[ProbeReport] = Future()
    engine.numeric_check.start(ref(), done)
    rows = step_until(engine, done)
    assert len(rows) >= SITES_OF_ALL / 2 and set(rows) == {1}
    assert 0 < done.result().longest_step_s < 10 * numeric_check.STEP_BUDGET_S
    engine.abort("row")
    engine.close()


def test_only_so_many_wait_and_a_cancelled_one_lets_the_next_go(
    make_engine: MakeEngine, source: Source
) -> None:
    engine = make_engine()
    futures: list[Future[ProbeReport]] = [Future() for _ in range(numeric_check.MAX_WAITING + 1)]
    for future in futures:
        engine.numeric_check.start(ref(), future)
    assert isinstance(futures[-1].exception(0), EngineOverloaded)
    assert futures[0].cancel()
    step_until(engine, futures[1])
    assert futures[1].result().code is None
    engine.close()
    assert isinstance(futures[2].exception(0), EngineUnavailable)


def test_a_probe_that_gets_no_turn_ends_and_lets_its_adapter_go(
    make_engine: MakeEngine, source: Source
) -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    done: Future[ProbeReport] = Future()
    engine.numeric_check.start(ref(), done)
    source.gate.clear()
    engine.step()
    clock.now += numeric_check.PROBE_TIMEOUT_S + 1
    engine.step()
    assert isinstance(done.exception(0), RequestTimeout)
    assert engine.adapters.num_pinned == 0 and not engine.numeric_check.is_busy
    source.gate.set()
    engine.close()


def test_a_report_fails_by_its_worst_module() -> None:
    report = ProbeReport(digest="d", max_error={"q_proj": 0.001, "k_proj": float("nan")}, bound=0.01)
    assert with_code(report).code == AdapterInexact.code
    fine = ProbeReport(digest="d", max_error={"q_proj": 0.01}, bound=0.01)
    assert with_code(fine) == fine


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter has a process of its own")
def test_the_triton_backend_is_probed_by_every_path(
    make_engine: MakeEngine, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.models.test_triton_decoder import count_kernels

    monkeypatch.setattr(pool_factory, "open_memory", in_pages)
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
    names = {"layers.0.k_proj": 17, "layers.1.down_proj": 3, "embed_tokens": 8, "lm_head": 8}
    source.adapters["few"] = LoraWeights(
        "few", {name: module(name.rpartition(".")[2], rank, rank) for name, rank in names.items()}
    )
    engine = make_engine()
    launched = count_kernels(monkeypatch)
    done: Future[ProbeReport] = Future()
    engine.numeric_check.start(ref("few"), done)
    step_until(engine, done)
    report = done.result()
    assert report.modules == 4 and report.finite and max(report.max_error.values()) < 1e-4
    assert report.max_error.keys() == {"k_proj", "down_proj", "embed_tokens", "lm_head"}
    sites = len(names) - 1
    # Decodes of few adapters and prompts in tiles, decodes of many row by row; an embedding is the same in all three.
    assert launched["shrink_tile_kernel"] == launched["expand_tile_kernel"] == 2 * sites
    assert launched["shrink_row_kernel"] == launched["expand_row_kernel"] == sites
    assert launched["embedding_kernel"] == 3
    engine.close()


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(f"{__file__}::test_the_triton_backend_is_probed_by_every_path", seconds=5)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == 1
