"""Greedy tokens of one mixed running batch equal `transformers`+PEFT run one request at a time, in fp32.

With `--quantization` the reference computes with the same weights, rounded and turned back.

`python -m pytest -q -s tests/end_to_end/test_parity.py --full-parity` prints the figures of 24 requests of 64 tokens.
"""

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.end_to_end.peft_reference import BASE, RECIPES, Case, Completion, PeftReference, write_adapters

from loraplex.adapters.loader import PeftAdapterSource
from loraplex.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.model_loading import load_model, load_tokenizer
from loraplex.engine.sampling_params import SamplingParams

MARGIN = 1e-3
TENANTS = 3
CHANGED_WITHIN = 12
MakeEngine = Callable[[int, int, int], Engine]
SUBJECTS = (
    "the history of the lighthouse",
    "how bread is baked",
    "a letter to a friend about the sea",
    "the rules of chess",
    "why leaves turn red",
    "the rivers of Europe and the towns that lie on their banks, from their springs to the sea",
)


@dataclass(frozen=True)
class Oracle:
    """The requests, the reference's response to each, and the folder of the adapters."""

    cases: list[Case]
    answers: list[Completion]
    adapters: dict[str, Path]
    tokens: int


@pytest.fixture(scope="module")
def oracle(
    request: pytest.FixtureRequest,
    demo_model: Path,
    quantization: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Oracle:
    full = request.config.getoption("full_parity", default=False)
    count, tokens = (24, 64) if full else (10, 24)
    adapters = write_adapters(demo_model, tmp_path_factory.mktemp("adapters"))
    cases = make_cases(demo_model, count)
    reference = PeftReference(demo_model, adapters, quantization)
    began = time.monotonic()
    answers = [reference.answer(case, tokens) for case in cases]
    print(
        f"\nreference: {count} requests x {tokens} tokens one at a time in {time.monotonic() - began:.1f} s"
    )
    return Oracle(cases, answers, adapters, tokens)


def make_cases(model: Path, count: int) -> list[Case]:
    """`count` prompts of 7 to about 130 tokens, spread over all adapters and the base."""
    tokenizer = load_tokenizer(str(model))
    names = [BASE, *(recipe.name for recipe in RECIPES)]
    texts = (
        f"Number {index}. " + " ".join([f"Write about {SUBJECTS[index % len(SUBJECTS)]}."] * (1 + index % 5))
        for index in range(count)
    )
    return [
        Case(names[index % len(names)], tuple(tokenizer.encode(text).ids)) for index, text in enumerate(texts)
    ]


@pytest.fixture
def make_engine(demo_model: Path, quantization: str) -> Iterator[MakeEngine]:
    """Engines in fp32: number of KV blocks, tokens per block, tokens per step."""
    engines: list[Engine] = []

    def make(num_blocks: int, block_size: int, max_num_batched_tokens: int) -> Engine:
        config = EngineConfig(
            model=str(demo_model),
            dtype="float32",
            device="cpu",
            quantization=quantization,
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=max_num_batched_tokens),
            cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
        )
        model = load_model(config)
        engines.append(Engine(model, config, PeftAdapterSource(model.config, model.dtype)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@dataclass
class Run:
    """Drives an engine and collects the tokens of each request."""

    engine: Engine
    oracle: Oracle
    tokens: dict[str, list[int]] = field(default_factory=dict)
    most_running: int = 0
    most_adapters: int = 0

    def add(self, request_id: str, case: Case, max_tokens: int) -> None:
        self.tokens[request_id] = []
        namespace = hashlib.sha256(bytes([len(case.adapter) % TENANTS])).digest()
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                namespace=namespace,
                prompt_token_ids=list(case.prompt),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                adapter=None if case.adapter == BASE else self._reference(case.adapter, namespace),
            )
        )

    def step(self) -> None:
        result = self.engine.step()
        assert not result.failures, result.failures
        for output in result.outputs:
            self.tokens[output.sequence.request_id].append(output.token_id)
        if not result.ran:
            time.sleep(0.001)
        stats = self.engine.stats()
        self.most_running = max(self.most_running, stats.running)
        self.most_adapters = max(self.most_adapters, len(stats.running_adapters))

    def finish(self) -> None:
        while self.engine.has_unfinished:
            self.step()
        stats = self.engine.stats()
        assert stats.referenced_blocks == stats.pinned_adapters == 0
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks

    def _reference(self, name: str, namespace: bytes) -> AdapterRef:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return AdapterRef(namespace=namespace, digest=digest, blob_path=str(self.oracle.adapters[name]))


def compare(run: Run, title: str) -> None:
    """Every request's tokens are the reference's, up to where the reference itself was undecided."""
    oracle = run.oracle
    narrow = ended = compared = 0
    least = min(min(answer.margins) for answer in oracle.answers)
    for index, (case, answer) in enumerate(zip(oracle.cases, oracle.answers, strict=True)):
        found = run.tokens[f"case-{index}"]
        assert len(found) == oracle.tokens
        differs = next((at for at, token in enumerate(answer.tokens) if found[at] != token), None)
        if differs is not None:
            assert answer.margins[differs] <= MARGIN, (case.adapter, differs, answer.margins[differs])
        compared += oracle.tokens if differs is None else differs
        ended += differs is not None
        narrow += min(answer.margins) <= MARGIN
    total = len(oracle.cases) * oracle.tokens
    print(
        f"{title}: {len(oracle.cases)} requests, up to {run.most_running} rows and {run.most_adapters} adapters "
        f"at once; {compared} of {total} tokens equal; {narrow} rows met a top-2 margin of at most {MARGIN:g}, "
        f"{ended} differed from there on; least margin {least:.2g}; preemptions {run.engine.stats().preemptions}"
    )


def test_every_adapter_changes_the_answer(oracle: Oracle, make_engine: MakeEngine) -> None:
    """Or equality would prove nothing."""
    run = Run(make_engine(400, 16, 512), oracle)
    by_adapter = {case.adapter: index for index, case in enumerate(oracle.cases)}
    assert len(by_adapter) == len(RECIPES) + 1
    for name, index in by_adapter.items():
        run.add(name, Case(BASE, oracle.cases[index].prompt), CHANGED_WITHIN)
    run.finish()
    answers = {name: oracle.answers[index].tokens[:CHANGED_WITHIN] for name, index in by_adapter.items()}
    unchanged = [name for name, tokens in answers.items() if tuple(run.tokens[name]) == tokens]
    assert unchanged == [BASE]


def test_one_running_batch(oracle: Oracle, make_engine: MakeEngine) -> None:
    run = Run(make_engine(400, 16, 512), oracle)
    for index, case in enumerate(oracle.cases):
        run.add(f"case-{index}", case, oracle.tokens)
    run.finish()
    compare(run, "one batch")
    assert run.most_running == len(oracle.cases)
    assert run.most_adapters == len(RECIPES)


def test_joins_leaves_and_preemptions(oracle: Oracle, make_engine: MakeEngine) -> None:
    """Rows join at random steps while others are aborted, in a KV pool with space for some of them only."""
    draw = random.Random(7)
    needed = sum(-(-(len(case.prompt) + oracle.tokens) // 4) for case in oracle.cases)
    run = Run(make_engine(needed * 2 // 5, 4, 48), oracle)
    arrivals = list(enumerate(oracle.cases))
    draw.shuffle(arrivals)
    passing: dict[str, int] = {}
    joined = left = 0
    while arrivals or passing:
        if arrivals and draw.random() < 0.8:
            index, case = arrivals.pop()
            run.add(f"case-{index}", case, oracle.tokens)
        if arrivals and draw.random() < 0.4:
            joined += 1
            run.add(f"passing-{joined}", draw.choice(oracle.cases), oracle.tokens)
            passing[f"passing-{joined}"] = draw.randrange(1, 30)
        run.step()
        passing = {name: steps - 1 for name, steps in passing.items()}
        for name in [name for name, steps in passing.items() if steps == 0]:
            run.engine.abort(name)
            left += len(run.tokens[name]) < oracle.tokens
            del passing[name]
    run.finish()
    compare(run, f"joins and leaves ({left} rows left unfinished)")
    assert left > 0
    assert run.engine.stats().preemptions > 0
