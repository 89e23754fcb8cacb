"""No step launches a kernel that the warm-up has not: every specialisation that Triton would compile is recorded, and
every operator of the sampler.

Kernels are not run, and what they would write is zeros: only what is launched counts here, as on a GPU for sm_90.
"""

import importlib
import itertools
import pkgutil
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.conftest import ScriptedMask
from tests.engine.interpreter_runs import INTERPRETING
from tests.engine.kernels.launch_recorder import HopperDriver
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.kernels import cpu, dispatch
from loraplex.engine.kernels.cpu import numba_bridge
from loraplex.engine.kernels.cpu.numba_bridge import ParallelKernel
from loraplex.engine.kernels.reference import bitmask as reference
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest, ProbeReport
from loraplex.engine.model_loading import load_model
from loraplex.engine.runner import warm_up
from loraplex.engine.runner.warm_up import SAMPLINGS, WarmUp, first_of_each
from loraplex.engine.sampling.sampler import PendingTokens, Sampler
from loraplex.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter has a process of its own")

VOCAB, HIDDEN, INTERMEDIATE = 17_000, 64, 4352
"""Wide enough for every tile of a quantized product, and soon multiplied."""
MODEL_LEN, STEP_TOKENS, ROWS = 1024, 512, 96
DOCUMENT = tuple(range(40, 60))
GRAMMARS = (None, b"one", b"all")
WAVES = (
    (1, 0, 4, GRAMMARS),
    (3, 0, 900, GRAMMARS),
    (20, 0, 30, GRAMMARS),
    (ROWS, 0, 4, (None,)),
    (ROWS, 12, 90, GRAMMARS),
)
"""Rows, adapters, tokens of the longest prompt, and grammars of requests that come at once."""
NAMESPACE = bytes(32)
OPTIONS = ("frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos")
OTHERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"logit_bias": {0: 1.0}},
    {"top_k": 2},
    {"top_p": 0.9},
    {"min_p": 0.1},
)


class Driver(HopperDriver):
    """A device of its own, so that no kernel of another test is mistaken for one compiled here."""

    def get_current_device(self) -> int:
        return 64


class Recorder:
    """What Triton and numba would compile, instead of compiling it."""

    def __init__(self) -> None:
        self.launched: set[tuple[str, str]] = set()

    def triton(self, *, key: str, fn: Any, **_: Any) -> bool:
        self.launched.add((fn.name.rpartition(".")[2], key))
        return True

    def numba(self, function: Callable[[Any], None], num_arguments: int, **options: Any) -> ParallelKernel:
        self.launched.add((function.__qualname__, str(len(self.launched))))
        return ParallelKernel(function, num_arguments, **options)


class RandomAdapters:
    """Adapters of all projections; their digest is their rank."""

    def load(self, adapter: AdapterRef) -> LoraWeights:
        rank = int(adapter.digest)
        shapes = {"q_proj": (HIDDEN, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
        modules = {
            f"layers.0.{name}": LoraModule(torch.randn(rank, inputs), torch.randn(outputs, rank) * 0.01)
            for name, (outputs, inputs) in shapes.items()
        }
        return LoraWeights(adapter.digest, modules)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm-up")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MODEL_LEN,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Every Triton kernel is bound as for an H200 and not run; new tensors are zeros, and masks are applied by torch."""
    triton = pytest.importorskip("triton")
    from loraplex.engine.kernels.triton import launch_plans, logit_masks

    recorder, apply_bitmask = Recorder(), logit_masks.apply_bitmask

    def applied(*operands: torch.Tensor) -> None:
        apply_bitmask(*operands)
        reference.apply_bitmask(*operands)

    monkeypatch.setattr(logit_masks, "apply_bitmask", applied)

    def bound(_: Any, __: Any, kernel: Any, grid: Any, operands: Any, constants: dict[str, Any]) -> None:
        kernel[grid](*operands, **constants)

    # A plan needs a compiled kernel, and none is compiled.
    monkeypatch.setattr(launch_plans, "_launch", bound)
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", recorder.triton)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return recorder


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Kernels that other tests have compiled in this process are forgotten."""
    if not numba_bridge.is_available():
        pytest.skip("this CPU has no compiled kernels")
    recorder = Recorder()
    for found in pkgutil.iter_modules(cpu.__path__, f"{cpu.__name__}."):
        module = importlib.import_module(found.name)
        if hasattr(module, "_kernel"):
            module._kernel.cache_clear()
            monkeypatch.setattr(module, "ParallelKernel", recorder.numba)
    return recorder


class Traffic:
    """An engine, and requests of all sizes, samplings, masks and adapters for it."""

    def __init__(self, folder: Path, quantization: str = "none", pages: str = "auto", **options: Any) -> None:
        cache = CacheConfig(num_blocks=2048, kv_dtype="fp8" if pages == "fp8" else "auto")
        scheduler = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=STEP_TOKENS, overlap="on")
        config = EngineConfig(
            model=str(folder),
            dtype="bfloat16",
            device="cpu",
            quantization=quantization,
            cache=cache,
            scheduler=scheduler,
            lora=LoraConfig(page_dtype=pages, max_page_error=1.0),
            **options,
        )
        self._random = random.Random(7)
        self._engine = Engine(
            load_model(config), config, RandomAdapters(), mask_factory=lambda _, grammar: self._mask(grammar)
        )

    def play(self) -> None:
        """Steps of few and of many rows, of prompts alone and beside decodes, and a probe."""
        self._engine.numeric_check.start(_adapter(3), done := Future[ProbeReport]())
        for rows, adapters, longest, grammars in WAVES:
            for index in range(rows):
                self._add(f"{rows}/{adapters}/{index}", adapters, longest, grammars)
            while self._engine.has_unfinished:
                result = self._engine.step()
                assert not [str(error) for _, error in result.failures]
        while not done.done():
            self._engine.step()
        done.result()
        self._engine.close()

    def _add(self, name: str, adapters: int, longest: int, grammars: tuple[bytes | None, ...]) -> None:
        choose = self._random
        sampling = SamplingParams(
            max_tokens=choose.choice((1, 8, 8, 20)),
            temperature=choose.choice((0.0, 1.0)),
            top_k=choose.choice((0, 0, 40)),
            top_p=choose.choice((1.0, 0.9)),
            min_p=choose.choice((0.0, 0.1)),
            presence_penalty=choose.choice((0.0, 0.0, 1.0)),
            logit_bias=choose.choice(({}, {7: 1.0})),
            min_tokens=choose.choice((0, 1)),
            logprobs=choose.choice((None, None, 2)),
            ignore_eos=True,
        )
        self._engine.add(
            EngineRequest(
                request_id=name,
                namespace=NAMESPACE,
                prompt_token_ids=[choose.randrange(2, VOCAB) for _ in range(choose.randint(1, longest))],
                sampling=sampling,
                adapter=_adapter(choose.randint(1, adapters)) if adapters and choose.random() < 0.9 else None,
                grammar=choose.choice(grammars),
            )
        )

    def _mask(self, grammar: bytes) -> ScriptedMask:
        """`one` document is forced as soon as its first token is sampled."""
        return ScriptedMask([DOCUMENT, (2, *DOCUMENT)], fast_forward=grammar == b"one")


def _adapter(rank: int) -> AdapterRef:
    return AdapterRef(namespace=NAMESPACE, digest=str(rank), blob_path="")


CASES = [
    ("none", "auto", False),
    ("int8", "int8", False),
    ("int4", "fp8", False),
    ("int4", "auto", True),
]


@pytest.mark.parametrize(("quantization", "pages", "deterministic"), CASES)
def test_no_step_launches_a_kernel_for_the_first_time(
    quantization: str, pages: str, deterministic: bool, folder: Path, on_hopper: Recorder
) -> None:
    traffic = Traffic(folder, quantization, pages, deterministic=deterministic)
    warm = set(on_hopper.launched)
    traffic.play()
    assert {name for name, _ in warm} >= {"decode_kernel", "bitmask_kernel", "cutoff_kernel"}
    assert sorted(on_hopper.launched - warm) == []


def test_no_step_on_a_cpu_compiles(folder: Path, on_cpu: Recorder) -> None:
    for quantization in ("none", "int8"):
        traffic = Traffic(folder, quantization)
        warm = set(on_cpu.launched)
        traffic.play()
        assert not on_cpu.launched - warm
    assert len(on_cpu.launched) > 5


def test_without_a_warm_up_the_same_steps_compile(
    folder: Path, on_hopper: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WarmUp, "run", lambda _: None)
    traffic = Traffic(folder, "int8")
    warm = set(on_hopper.launched)
    traffic.play()
    cold = [name for name, _ in on_hopper.launched - warm]
    assert {"bitmask_kernel", "cutoff_kernel", "prefill_kernel", "decode_kernel"} <= set(cold)
    assert cold.count("decode_kernel") > 1, "more rows than the least that a kernel is compiled for"
    assert cold.count("wide_kernel") > 1 and cold.count("skinny_kernel") > 1, "rows choose tiles"


Operator = tuple[str, tuple[tuple[torch.dtype, int, bool], ...]]
"""Its name, and of each operand the type, the number of dimensions, and whether it is empty."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[Operator] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.seen.add((str(func), tuple((one.dtype, one.dim(), not one.numel()) for one in operands)))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def operators_of_first_tokens() -> set[Operator]:
    """What runs for one row of each combination of parameters, alone."""
    sampler, operators = Sampler(VOCAB, [1]), Operators()
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    with torch.inference_mode():
        for values in itertools.product((0.0, 1.0), (1.0, 1.1), (0, 1), (False, True)):
            for others in OTHERS:
                options: dict[str, Any] = dict(zip(OPTIONS, values, strict=True)) | others
                sampling = SamplingParams(max_tokens=2, **options)
                request = EngineRequest(
                    request_id="", namespace=NAMESPACE, prompt_token_ids=[0], sampling=sampling
                )
                sequence = Sequence(request=request, choice=0, arrival=0.0, seed=0, token_ids=[0])
                with operators:
                    sampler.start(logits, [sequence])
    return operators.seen


@pytest.mark.parametrize("left_out", [None, "frequency_penalty", "ignore_eos"])
def test_no_first_token_runs_an_operator_that_the_warm_up_has_not(
    left_out: str | None,
    operators_of_first_tokens: set[Operator],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An empty operand counts as another operator: a device may refuse it. Without its entry it is missing."""
    operators, start = Operators(), Sampler.start

    def recorded(*arguments: Any) -> PendingTokens:
        with operators:
            return start(*arguments)

    entries = tuple(s for s in SAMPLINGS if left_out is None or not getattr(s, left_out))
    assert len(entries) == len(SAMPLINGS) - (left_out is not None)
    monkeypatch.setattr(Sampler, "start", recorded)
    monkeypatch.setattr(WarmUp, "_steps", lambda _: iter(()))
    monkeypatch.setattr(warm_up, "SAMPLINGS", entries)
    Traffic(folder)
    assert bool(operators_of_first_tokens - operators.seen) is (left_out is not None)


def test_the_first_number_of_each_value() -> None:
    assert first_of_each(lambda rows: None, 4096) == [1]
    assert first_of_each(lambda rows: (rows > 16, rows > 40), 64) == [1, 17, 41]
