"""Grammars through the real engine on a tiny random Llama: a row's grammar affects that row only."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.batch.step_plan import StepPlan
from loraplex.engine.config import CacheConfig, EngineConfig, GrammarConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.errors import AdapterLoadFailed
from loraplex.engine.lora.weights import LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest, TokenLogprob, WaitCauses
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask

    MaskType = type[ScriptedMask]

VOCAB, END = 128, 1
PROMPT = [5, 9, 17]


class NoAdapters:
    def load(self, adapter: AdapterRef) -> LoraWeights:
        raise AdapterLoadFailed(f"no adapter {adapter.digest}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("engine-grammar")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=3,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.normal_(std=0.2)
    llama.save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    return load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"))


class Harness:
    """An engine whose factory hands out what `masks` holds by the request's grammar, and what came out."""

    def __init__(
        self, model: LoadedModel, *, num_blocks: int = 128, mask_timeout_s: float = 60.0, **scheduler: Any
    ) -> None:
        self.masks: dict[bytes, Any] = {}
        self.compiled: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()
        settings = EngineConfig(
            model="",
            cache=CacheConfig(block_size=4, num_blocks=num_blocks),
            scheduler=SchedulerConfig(**scheduler),
            grammar=GrammarConfig(mask_timeout_s=mask_timeout_s),
        )
        sized = LoadedModel(
            **{name: getattr(model, name) for name in model.__slots__} | {"num_blocks": num_blocks}
        )
        self.engine = Engine(sized, settings, NoAdapters(), mask_factory=self._compile)
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprob | None]] = {}
        self.causes: dict[str, WaitCauses] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.failures: dict[str, str] = {}
        self.slowest_s = 0.0

    def _compile(self, namespace: bytes, grammar: bytes) -> Any:
        self.compiled.append(grammar)
        assert self.gate.wait(60)
        return self.masks[grammar]

    def add(self, request_id: str, mask: Any = None, prompt: list[int] = PROMPT, **sampling: Any) -> None:
        grammar = None if mask is None else request_id.encode()
        if mask is not None and mask != "broken":
            self.masks[request_id.encode()] = mask
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                namespace=bytes(32),
                prompt_token_ids=prompt,
                sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 24} | sampling),
                grammar=grammar,
            )
        )

    def step(self) -> bool:
        began = time.monotonic()
        result = self.engine.step()
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        for output in result.outputs:
            key = (output.sequence.request_id, output.sequence.choice)
            self.outputs.setdefault(key, []).append(output.token_id)
            self.logprobs.setdefault(key, []).append(output.logprob)
            self.causes[output.sequence.request_id] = output.sequence.causes
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
        self.failures.update({sequence.request_id: error.code for sequence, error in result.failures})
        return result.ran

    def run(self) -> "Harness":
        deadline = time.monotonic() + 60
        while self.engine.has_unfinished:
            assert time.monotonic() < deadline
            if not self.step():
                time.sleep(0.001)
        stats = self.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
        assert (stats.running, stats.waiting, stats.waiting_for_grammar) == (0, 0, 0)
        return self


@pytest.fixture
def harness(model: LoadedModel) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(**options: Any) -> Harness:
        made.append(Harness(model, **options))
        return made[-1]

    yield make
    for one in made:
        one.gate.set()
        one.engine.close()
    for thread in threading.enumerate():
        if thread.name.startswith("mask-"):
            thread.join(5)


DOCUMENTS = [
    (20, 21, 22, 23, first, *range(40, 40 + 2 * first), last, 60, 61) for first in (3, 4) for last in (5, 6)
]


def test_rows_with_and_without_a_grammar_share_a_batch(
    harness: Callable[..., Harness], scripted_mask: "MaskType"
) -> None:
    alone = harness()
    alone.add("free", ignore_eos=True)
    alone.run()
    run = harness()
    run.add("free", ignore_eos=True)
    for index in range(5):
        run.add(str(index), scripted_mask(DOCUMENTS), [5, 9, index], temperature=1.0, seed=index)
    run.run()
    assert run.outputs["free", 0] == alone.outputs["free", 0]
    assert not run.failures
    assert all(
        tuple(run.outputs[str(i), 0]) in DOCUMENTS and run.reasons[str(i), 0] == "stop" for i in range(5)
    )
    stats = run.engine.stats()
    assert (stats.grammar_compilations, stats.grammar_failures) == (5, 0)
    assert stats.mask_seconds > 0 and stats.grammar_compile_seconds > 0 and stats.forced_tokens == 0
    assert [run.causes[str(index)].grammars_before for index in range(5)] == [*range(5)]
    assert all(run.causes[str(index)].compile_s > 0 for index in range(5))
    assert run.causes["free"].compile_s == 0


@pytest.mark.parametrize("num_blocks", [8, 128])
def test_forced_tokens_change_no_answer(
    harness: Callable[..., Harness], scripted_mask: "MaskType", num_blocks: int
) -> None:
    answers = []
    for fast_forward in (True, False):
        run = harness(num_blocks=num_blocks, max_num_batched_tokens=12, max_num_seqs=6)
        for index in range(8):
            mask = scripted_mask(DOCUMENTS, fast_forward=fast_forward)
            run.add(str(index), mask, [5, 9, index])
        run.add("free", ignore_eos=True)
        run.run()
        answers.append(run.outputs)
        stats = run.engine.stats()
        assert (stats.forced_tokens > 0) == fast_forward
        assert (stats.preemptions > 0) == (num_blocks == 8)
    assert answers[0] == answers[1]


def test_choices_share_one_compilation(harness: Callable[..., Harness], scripted_mask: "MaskType") -> None:
    run = harness()
    run.add("many", scripted_mask(DOCUMENTS), n=4, temperature=1.0, seed=1)
    run.run()
    assert run.compiled == [b"many"]
    answers = [tuple(run.outputs["many", choice]) for choice in range(4)]
    assert set(answers) <= set(DOCUMENTS) and len(set(answers)) > 1


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(
    harness: Callable[..., Harness], scripted_mask: "MaskType"
) -> None:
    run = harness()
    run.add("bad", "broken", n=2)
    run.add("unforkable", scripted_mask(DOCUMENTS, broken="fork"), n=2)
    run.add("good", scripted_mask(DOCUMENTS))
    run.run()
    assert run.failures == {"bad": "grammar_failed", "unforkable": "grammar_failed"}
    assert tuple(run.outputs["good", 0]) in DOCUMENTS
    assert run.engine.stats().grammar_failures == 2


def test_an_abort_while_the_grammar_is_compiled_leaves_nothing(
    harness: Callable[..., Harness], scripted_mask: "MaskType"
) -> None:
    run = harness()
    run.gate.clear()
    run.add("first", scripted_mask(DOCUMENTS), n=2)
    run.add("second", scripted_mask(DOCUMENTS))
    run.step()
    assert run.engine.stats().waiting_for_grammar == 2
    assert len(run.engine.abort("first")) == 2
    run.add("first", scripted_mask([(7, 8)]))
    run.gate.set()
    run.run()
    assert run.outputs["first", 0] == [7, 8], "the old request's mask is not the new one's"
    assert tuple(run.outputs["second", 0]) in DOCUMENTS


@pytest.mark.parametrize(
    "sampling", [{}, {"min_tokens": 3}, {"logit_bias": {7: 100.0}}, {"temperature": 1.0, "top_p": 0.5}]
)
def test_a_mask_that_allows_nothing_ends_its_request_alone(
    harness: Callable[..., Harness], scripted_mask: "MaskType", sampling: dict[str, Any]
) -> None:
    run = harness()
    run.add("empty", scripted_mask([]), **sampling)
    run.add("free", ignore_eos=True)
    run.run()
    assert run.failures == {"empty": "nothing_allowed"}
    assert len(run.outputs["free", 0]) == 24


def test_the_grammar_wins_over_min_tokens_and_bias(
    harness: Callable[..., Harness], scripted_mask: "MaskType"
) -> None:
    run = harness()
    run.add("ends", scripted_mask([(7,)]), min_tokens=9, ignore_eos=True)
    run.add("goes on", scripted_mask([(7,), (7, 8, 9)]), min_tokens=2, logit_bias={END: 100.0, 99: 100.0})
    run.run()
    assert run.outputs["ends", 0] == [7]
    assert run.outputs["goes on", 0] == [7, 8, 9]


def test_a_matcher_that_raises_ends_its_request_alone(
    harness: Callable[..., Harness], scripted_mask: "MaskType"
) -> None:
    run = harness()
    for method in ("fill", "accept", "forced_tokens"):
        run.add(method, scripted_mask(DOCUMENTS, broken=method))
    run.add("free", ignore_eos=True)
    run.run()
    assert run.failures == dict.fromkeys(("fill", "accept", "forced_tokens"), "grammar_failed")
    assert len(run.outputs["free", 0]) == 24


def test_a_late_mask_changes_no_response_and_delays_no_other_row(
    harness: Callable[..., Harness], scripted_mask: "MaskType"
) -> None:
    answers = []
    for is_late in (False, True):
        run, gates = harness(), {0: threading.Event(), 3: threading.Event()}
        run.add("slow", scripted_mask(DOCUMENTS, gates=gates if is_late else None))
        run.add("quick", scripted_mask(DOCUMENTS), [5, 9])
        run.add("free", ignore_eos=True, max_tokens=100)
        if is_late:
            while ("quick", 0) not in run.reasons:
                run.step()
            assert ("slow", 0) not in run.outputs
            gates[0].set()
            while ("free", 0) not in run.reasons or len(run.outputs.get(("slow", 0), [])) < 3:
                run.step()
            assert len(run.outputs["slow", 0]) == 3
            gates[3].set()
        run.run()
        answers.append(run.outputs)
    assert answers[0] == answers[1]
    assert run.engine.stats().late_masks >= 2


def test_a_mask_that_takes_too_long_ends_its_request_alone(
    harness: Callable[..., Harness], scripted_mask: "MaskType"
) -> None:
    run = harness(mask_timeout_s=1.0)
    run.add("stuck", scripted_mask(DOCUMENTS, slow_at={2: 1.5}))
    run.add("quick", scripted_mask(DOCUMENTS), [5, 9])
    run.add("free", ignore_eos=True, max_tokens=100)
    run.run()
    assert run.failures == {"stuck": "grammar_too_slow"} and len(run.outputs["stuck", 0]) == 2
    assert tuple(run.outputs["quick", 0]) in DOCUMENTS
    assert run.slowest_s < 1.0, "a step waited for the mask"


def test_log_probabilities_are_those_of_sampled_tokens_to_the_end(
    harness: Callable[..., Harness], scripted_mask: "MaskType"
) -> None:
    documents = [(20, *[6] * 20, 7), (20, 8, 9)]
    run = harness()
    for logprobs in (None, 1):
        mask = scripted_mask(documents, fast_forward=True, closes=True)
        run.add(str(logprobs), mask, max_tokens=8, logprobs=logprobs, logit_bias={6: 100.0})
    run.run()
    assert run.outputs["None", 0] == run.outputs["1", 0] == [20, 8, 9]
    assert run.reasons["1", 0] == "stop"
    found = run.logprobs["1", 0]
    assert [entry.token_id for entry in found if entry is not None] == [20, 8, 9]


def submit_mixed(run: Harness, mask: "MaskType") -> None:
    """Rows that need their newest token on the host for the next one: grammars, penalties, endings; and rows that do not."""
    long = [(20, *[6] * 20, 7), (20, 8, 9)]
    for seed in range(4):
        prompt = [5, 9, 17, *range(20, 24 + 3 * seed)]
        common = {"seed": seed, "ignore_eos": True, "max_tokens": 12 + seed}
        run.add(f"greedy {seed}", None, prompt, **common)
        run.add(f"random {seed}", None, prompt, temperature=1.0, top_p=0.9, logprobs=2, n=2, **common)
        run.add(f"penalised {seed}", None, prompt, repetition_penalty=1.5, frequency_penalty=1.0, **common)
        run.add(f"stopped {seed}", None, prompt, stop_token_ids=tuple(range(3, 120, 7)), min_tokens=2 + seed)
        run.add(
            f"held {seed}", mask(DOCUMENTS, fast_forward=seed % 2 == 0), prompt, temperature=1.0, seed=seed
        )
        for logprobs in (None, 1):
            closing = mask(long, fast_forward=True, closes=True)
            bias = {6: 100.0}
            run.add(
                f"closed {seed} {logprobs}", closing, prompt, max_tokens=8, logprobs=logprobs, logit_bias=bias
            )


@pytest.mark.parametrize("num_blocks", [24, 256])
def test_running_ahead_of_the_device_changes_no_answer(
    harness: Callable[..., Harness], scripted_mask: "MaskType", num_blocks: int
) -> None:
    runs = []
    for overlap in ("off", "on"):
        run = harness(num_blocks=num_blocks, max_num_batched_tokens=48, max_num_seqs=12, overlap=overlap)
        submit_mixed(run, scripted_mask)
        run.run()
        runs.append(run)
    waiting, ahead = runs
    assert ahead.outputs == waiting.outputs and ahead.reasons == waiting.reasons
    assert not ahead.failures and not waiting.failures
    assert [[p and p.token_id for p in row] for row in ahead.logprobs.values()] == [
        [p and p.token_id for p in waiting.logprobs[key]] for key in ahead.logprobs
    ]
    assert (ahead.engine.stats().preemptions > 0) == (num_blocks == 24)
    assert {ahead.outputs[f"closed 0 {logprobs}", 0][-1] for logprobs in (None, 1)} == {9}


def raise_fault(*_: Any) -> Any:
    raise RuntimeError("a scripted fault")


@pytest.mark.parametrize("stage", ["launch", "sample", "collect"])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_late_mask_in_a_repeated_step_costs_no_token(
    harness: Callable[..., Harness], scripted_mask: "MaskType", stage: str, overlap: str
) -> None:
    """Every fifth step raises, and some masks take longer than a step waits for them."""
    outputs = []
    for raises in (False, True):
        run, steps = harness(overlap=overlap), itertools.count()

        def launch_or_raise(
            plan: StepPlan, rows: Any = None, launch: Any = run.engine.runner.launch, steps: Any = steps
        ) -> Any:
            step = launch(plan, rows)
            if next(steps) % 5 == 4:
                if stage == "launch":
                    raise_fault()
                setattr(step, stage, raise_fault)
            return step

        if raises:
            run.engine.runner.launch = launch_or_raise  # type: ignore[method-assign]
        run.add("slow", scripted_mask(DOCUMENTS, slow_at={0: 0.05, 2: 0.05, 3: 0.05}))
        run.add("free")
        run.run()
        assert not run.failures and (not raises or next(steps) > 10)
        outputs.append(run.outputs)
    assert outputs[0] == outputs[1]
