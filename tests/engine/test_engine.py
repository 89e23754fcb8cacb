"""`Engine` end to end on a tiny random Llama in fp32, against `transformers` and PEFT one request at a time.

Invariant: in any batch, a request's greedy tokens are the reference's wherever its top-2 margin exceeds 1e-3.
"""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.adapters.loader import PeftAdapterSource
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.errors import AdapterLoadFailed, InvalidRequest, PromptTooLong, UnsupportedFeature
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest, TokenLogprob
from loraplex.engine.model_loading import load_model
from loraplex.engine.sampling_params import SamplingParams

VOCAB, HIDDEN, LAYERS, EOS = 128, 64, 2, 2
NAMESPACE = bytes(32)
MARGIN = 1e-3

# name -> PEFT's arguments; ranks differ by module in "patterned"
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    "mlp": {"r": 3, "lora_alpha": 6, "target_modules": ["gate_proj", "down_proj"]},
    "everything": {
        "r": 17,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    },
    "patterned": {
        "r": 4,
        "lora_alpha": 4,
        "rank_pattern": {"k_proj": 1, "up_proj": 20},
        "target_modules": ["k_proj", "up_proj", "o_proj"],
    },
    "ends": {"r": 8, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "default": {"task_type": None},
}
BROKEN = "broken"


def randomize(model: Any, pattern: str, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if pattern in name:
                values = scale * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values + 1.0 if "norm" in name else values)


class Reference:
    """The same model in `transformers`, and under PEFT for each adapter; the files both sides read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model"
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=1,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        self.base = LlamaForCausalLM(config).eval()
        randomize(self.base, "", 0.15, seed=1)
        self.base.save_pretrained(self.path)
        words = {f"w{i}": i for i in range(VOCAB)}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(self.path / "tokenizer.json"))
        self.adapted: dict[str | None, Any] = {None: self.base}
        self.folders: dict[str, Path] = {}
        for seed, (name, settings) in enumerate(ADAPTERS.items()):
            lora = PeftConfig(**{"task_type": "CAUSAL_LM", **settings})
            model = get_peft_model(copy.deepcopy(self.base), lora)
            randomize(model, "lora_", 0.15, seed=10 + seed)
            model.save_pretrained(str(folder / name), save_embedding_layers=False)
            self.adapted[name], self.folders[name] = model.eval(), folder / name

    def margins(self, adapter: str | None, prompt: list[int], output: list[int]) -> list[float]:
        """How far each token of `output` lies below the best one, given all before it. 0 is the greedy choice."""
        with torch.no_grad():
            logits = self.adapted[adapter](torch.tensor([prompt + output]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        margins: list[float] = (rows.max(dim=1).values - chosen).tolist()
        return margins

    def check(self, adapter: str | None, prompt: list[int], output: list[int]) -> None:
        assert max(self.margins(adapter, prompt, output)) <= MARGIN, (adapter, prompt, output)


class Source:
    """The adapters as PEFT saved them, and one whose B holds a NaN."""

    def __init__(self, reference: Reference) -> None:
        self._peft = PeftAdapterSource(load_model_config(str(reference.path)), torch.float32)

    def load(self, adapter: AdapterRef) -> LoraWeights:
        if adapter.digest == BROKEN:
            b = torch.zeros(HIDDEN, 4)
            b[3, 1] = torch.nan
            return LoraWeights(BROKEN, {"layers.0.o_proj": LoraModule(torch.randn(4, HIDDEN), b)})
        return self._peft.load(adapter)


class Harness:
    """An engine, and what came out of it by (request id, choice)."""

    def __init__(self, reference: Reference, **config: Any) -> None:
        settings = EngineConfig(
            model=str(reference.path),
            dtype=config.pop("dtype", "float32"),
            device="cpu",
            deterministic=config.pop("deterministic", False),
            cache=CacheConfig(block_size=8, num_blocks=config.pop("num_blocks", 256)),
            scheduler=SchedulerConfig(**config.pop("scheduler", {})),
            lora=LoraConfig(**config),
        )
        self.reference = reference
        self.engine = Engine(load_model(settings), settings, Source(reference))
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprob | None]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.failures: dict[str, str] = {}

    def adapter(self, name: str | None) -> AdapterRef | None:
        if name is None:
            return None
        path = str(self.reference.folders.get(name, ""))
        return AdapterRef(namespace=NAMESPACE, digest=name, blob_path=path)

    def add(self, request_id: str, prompt: list[int], adapter: str | None = None, **sampling: Any) -> None:
        greedy = {"temperature": 0.0, "max_tokens": 24} | sampling
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                namespace=NAMESPACE,
                prompt_token_ids=prompt,
                sampling=SamplingParams(**greedy),
                adapter=self.adapter(adapter),
            )
        )

    def step(self) -> None:
        result = self.engine.step()
        for output in result.outputs:
            key = (output.sequence.request_id, output.sequence.choice)
            self.outputs.setdefault(key, []).append(output.token_id)
            self.logprobs.setdefault(key, []).append(output.logprob)
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
        self.failures.update({sequence.request_id: error.code for sequence, error in result.failures})
        if not result.ran and self.engine.has_unfinished:
            self.engine.adapters.on_loaded.wait(0.05)

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps")

    def check_idle(self) -> None:
        stats = self.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
        assert (stats.running, stats.waiting, stats.waiting_for_adapter) == (0, 0, 0)
        assert self.engine.adapters.num_pinned == 0


def harnesses(reference: Reference, **fixed: Any) -> Iterator[Callable[..., Harness]]:
    """What a fixture yields from: a maker of harnesses that have to be idle when their test has ended."""
    made: list[Harness] = []

    def make(**config: Any) -> Harness:
        made.append(Harness(reference, **fixed, **config))
        return made[-1]

    yield make
    for one in made:
        one.check_idle()
        one.engine.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def harness(reference: Reference) -> Iterator[Callable[..., Harness]]:
    yield from harnesses(reference)


def prompts(count: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(3, VOCAB) for _ in range(choose.randrange(1, 40))] for _ in range(count)]


def test_greedy_tokens_equal_generate(reference: Reference, harness: Callable[..., Harness]) -> None:
    engine = harness()
    for index, prompt in enumerate(prompts(6, seed=1)):
        engine.add(str(index), prompt)
    engine.run()
    for index, prompt in enumerate(prompts(6, seed=1)):
        generated = reference.base.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=24,
            do_sample=False,
        )
        assert engine.outputs[str(index), 0] == generated[0, len(prompt) :].tolist()


def test_preempted_sequences_lose_no_token(reference: Reference, harness: Callable[..., Harness]) -> None:
    engine = harness(num_blocks=12, scheduler={"max_num_batched_tokens": 64, "max_num_seqs": 8})
    for index, prompt in enumerate(prompts(8, seed=2)):
        engine.add(str(index), prompt, max_tokens=40, ignore_eos=True)
    engine.run()
    assert engine.engine.stats().preemptions > 0
    for index, prompt in enumerate(prompts(8, seed=2)):
        assert len(engine.outputs[str(index), 0]) == 40
        reference.check(None, prompt, engine.outputs[str(index), 0])


def test_mixed_adapters_equal_peft_one_at_a_time(
    reference: Reference, harness: Callable[..., Harness]
) -> None:
    engine = harness()
    names = [None, *ADAPTERS]
    for index, prompt in enumerate(prompts(18, seed=3)):
        engine.add(str(index), prompt, names[index % len(names)])
    engine.run()
    assert not engine.failures
    stats = engine.engine.stats()
    assert stats.resident_adapters != [] and stats.memory_rate > 0
    assert stats.step_weight_bytes == stats.steps * engine.engine.model.streamed_bytes
    assert stats.step_kv_bytes > 0 and stats.step_adapter_bytes > 0
    for index, prompt in enumerate(prompts(18, seed=3)):
        reference.check(names[index % len(names)], prompt, engine.outputs[str(index), 0])


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_changes_what_the_base_says(
    reference: Reference, harness: Callable[..., Harness], name: str
) -> None:
    engine = harness()
    (prompt,) = prompts(1, seed=4)
    engine.add("adapted", prompt, name, ignore_eos=True)
    engine.add("base", prompt, ignore_eos=True)
    engine.run()
    assert max(reference.margins(None, prompt, engine.outputs["adapted", 0])) > MARGIN
    reference.check(None, prompt, engine.outputs["base", 0])


def test_adapters_swap_within_a_budget_that_holds_two(
    reference: Reference, harness: Callable[..., Harness]
) -> None:
    names = [*ADAPTERS]
    source = Source(reference)
    adapters = [
        source.load(AdapterRef(namespace=NAMESPACE, digest=n, blob_path=str(f)))
        for n, f in reference.folders.items()
    ]
    sizes = [sum(each.a.nbytes + each.b.nbytes for each in one.modules.values()) for one in adapters]
    engine = harness(max_bytes=sum(sorted(sizes)[-2:]))
    for index, prompt in enumerate(prompts(15, seed=5)):
        engine.add(str(index), prompt, names[index % len(names)])
    engine.run()
    assert engine.engine.stats().adapter_evictions > 0
    for index, prompt in enumerate(prompts(15, seed=5)):
        reference.check(names[index % len(names)], prompt, engine.outputs[str(index), 0])


@pytest.mark.parametrize(("seed", "overlap"), [(1, "off"), (2, "on"), (3, "on")])
def test_random_joins_and_leaves_change_no_tokens(
    reference: Reference, harness: Callable[..., Harness], seed: int, overlap: str
) -> None:
    choose = random.Random(seed)
    limits = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "max_adapters_per_step": 3}
    engine = harness(num_blocks=40, scheduler=limits | {"overlap": overlap})
    jobs = {
        str(i): (choose.choice([None, *ADAPTERS]), prompt)
        for i, prompt in enumerate(prompts(24, seed=10 + seed))
    }
    waiting, live, aborted = list(jobs), [], set()
    while waiting or engine.engine.has_unfinished:
        while waiting and choose.random() < 0.4:
            live.append(waiting.pop())
            adapter, prompt = jobs[live[-1]]
            engine.add(live[-1], prompt, adapter, max_tokens=choose.randrange(1, 40))
        if live and choose.random() < 0.04:
            aborted.add(live[-1])
            engine.engine.abort(live[-1])
        engine.step()
    assert not engine.failures
    assert all((request_id, 0) in engine.reasons for request_id in jobs if request_id not in aborted)
    for (request_id, _), output in engine.outputs.items():
        adapter, prompt = jobs[request_id]
        reference.check(adapter, prompt, output)


def test_a_row_that_stops_with_a_step_in_flight_leaves_nothing(harness: Callable[..., Harness]) -> None:
    """Its adapter is pinned until that step is completed, so there is work left until then."""
    (prompt,), name = prompts(1, seed=4), next(iter(ADAPTERS))
    waiting, ahead = harness(), harness(scheduler={"overlap": "on"})
    waiting.add("r", prompt, name)
    waiting.run()
    tokens = waiting.outputs["r", 0]
    stop = tokens[5]
    ahead.add("r", prompt, name, stop_token_ids=(stop,))
    while not ahead.reasons:
        ahead.step()
    assert ahead.engine.is_ahead and ahead.engine.stats().pinned_adapters == 1
    ahead.run()
    assert not ahead.engine.is_ahead and ahead.engine.stats().pinned_adapters == 0
    assert ahead.outputs["r", 0] == tokens[: tokens.index(stop) + 1]


def test_seeded_samples_do_not_depend_on_the_batch(harness: Callable[..., Harness]) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "n": 2, "presence_penalty": 0.5}
    jobs = list(zip(prompts(5, seed=6), [None, *ADAPTERS], strict=False))
    together, alone = harness(), harness()
    for index, (prompt, adapter) in enumerate(jobs):
        together.add(str(index), prompt, adapter, **sampling)
    together.run()
    for index, (prompt, adapter) in enumerate(jobs):
        alone.add(str(index), prompt, adapter, **sampling)
        alone.run()
    assert together.outputs == alone.outputs
    assert together.outputs["0", 0] != together.outputs["0", 1]


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"deterministic": True}])
def test_logprobs_are_bitwise_independent_of_the_batch(
    harness: Callable[..., Harness], settings: dict[str, Any]
) -> None:
    """Neighbours share adapters, so that groups and prefill chunks differ from those of a lone run."""
    jobs = [(prompt, [None, *ADAPTERS][i % 4]) for i, prompt in enumerate(prompts(12, seed=8))]
    together, alone = harness(**settings), harness(**settings)
    for index, (prompt, adapter) in enumerate(jobs):
        together.add(str(index), prompt, adapter, logprobs=3)
    together.run()
    for index, (prompt, adapter) in enumerate(jobs):
        alone.add(str(index), prompt, adapter, logprobs=3)
        alone.run()
    assert together.logprobs == alone.logprobs
    assert all(together.logprobs.values())


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_nan_adapter_fails_alone_and_is_quarantined(
    reference: Reference, harness: Callable[..., Harness], overlap: str
) -> None:
    """Ahead of its results a step goes on with a token that there is not."""
    engine = harness(quarantine_after=2, scheduler={"overlap": overlap})
    (base, adapted) = prompts(2, seed=7)
    engine.add("base", base, max_tokens=60, ignore_eos=True)
    engine.add("adapted", adapted, "everything", max_tokens=60, ignore_eos=True)
    for attempt in range(3):
        engine.add(f"broken {attempt}", base, BROKEN)
        while f"broken {attempt}" not in engine.failures:
            engine.step()
    engine.run()
    assert engine.failures == {
        "broken 0": "non_finite_logits",
        "broken 1": "non_finite_logits",
        "broken 2": "adapter_quarantined",
    }
    assert engine.engine.stats().corrupted_requests == 2
    reference.check(None, base, engine.outputs["base", 0])
    reference.check("everything", adapted, engine.outputs["adapted", 0])


def test_the_cached_prefix_of_one_adapter_is_not_anothers(
    reference: Reference, harness: Callable[..., Harness]
) -> None:
    engine = harness()
    prompt = [3 + i % 60 for i in range(50)]
    for turn, name in enumerate(["attention", "mlp", None, "attention"]):
        engine.add(str(turn), prompt, name)
        engine.run()
        reference.check(name, prompt, engine.outputs[str(turn), 0])
    stats = engine.engine.stats()
    assert stats.cached_prompt_tokens == 48 and stats.prompt_tokens == 200


def test_refusals(harness: Callable[..., Harness]) -> None:
    engine = harness(num_blocks=8)
    with pytest.raises(PromptTooLong):
        engine.add("long", [5] * 60, max_tokens=10)
    with pytest.raises(InvalidRequest):
        engine.add("empty", [])
    request = EngineRequest(
        request_id="grammar",
        namespace=NAMESPACE,
        prompt_token_ids=[5],
        sampling=SamplingParams(max_tokens=1),
        grammar=b"root ::= 'a'",
    )
    with pytest.raises(UnsupportedFeature):
        engine.engine.add(request)


def test_a_missing_blob_fails_its_request_alone(
    reference: Reference, harness: Callable[..., Harness]
) -> None:
    engine = harness()
    engine.add("missing", [5, 6], "no such adapter")
    engine.add("base", [5, 6])
    engine.run()
    assert engine.failures == {"missing": AdapterLoadFailed.code}
    reference.check(None, [5, 6], engine.outputs["base", 0])
