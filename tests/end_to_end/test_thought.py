"""Answers with thought at temperature 1 through the whole product: every form by every budget, streamed and whole, on two kinds of model."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tests.end_to_end.generations import tool
from tests.end_to_end.live_server import LiveServer, until
from tests.end_to_end.schemas import MANY
from tests.end_to_end.thinking_model import qwen3_tokenizer, save_thinking_model
from tests.end_to_end.thoughts import (
    THINKING_FORMS,
    Oracle,
    ThoughtAnswer,
    ThoughtCase,
    ask,
    cases,
    summary,
)
from tests.platform.web.gateway import BASE_MODEL, Gateway, StartGateway, start_gateway
from tokenizers import Tokenizer

from loraplex.adapters.loader import PeftAdapterSource
from loraplex.engine.config import CacheConfig, EngineConfig, GrammarConfig
from loraplex.engine.engine import Engine
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.model_loading import load_model
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.platform.demo.tenants import ADAPTERS_FOLDER as BUNDLED

__all__ = ["start_gateway"]

CONCURRENT = 16
STYLES = {"thinks": ("<think>", "</think>"), "ponders": ("[T]", "[/T]")}
# Fewer than sixteen rows need, so that some are preempted in the middle of a thought.
FEW_BLOCKS = 160


@dataclass
class Thinker:
    """A gateway in this process over a real engine with a tiny model."""

    gateway: Gateway
    engine: LocalEngine
    tokenizer: Any
    is_special: bool

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.gateway.url}/v1", api_key=self.gateway.key, max_retries=0, timeout=300)

    @property
    def oracle(self) -> Oracle:
        decode = self.tokenizer.backend_tokenizer.decode
        return Oracle(
            lambda ids: decode(ids, skip_special_tokens=not self.is_special),
            decode,
            {self.tokenizer.eos_token_id},
        )

    def bias(self) -> dict[str, float]:
        """Let the model begin and end its thought itself now and then."""
        ids = self.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
        return dict(zip(map(str, ids), (4.0, 3.0), strict=True))


@pytest.fixture(params=["added", "special"])
def kind(request: pytest.FixtureRequest) -> str:
    """How the tokenizer has the markers: as Qwen3's does, or as control tokens; `qwen3`: its own tokenizer."""
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "thinking"


@pytest.fixture
def chat_tokenizer(kind: str, folder: Path) -> Any:
    if kind != "qwen3":
        return save_thinking_model(folder, special=kind == "special")
    folder.mkdir()
    tokenizer, template = qwen3_tokenizer(folder)
    return save_thinking_model(folder, tokenizer=tokenizer, template=template)


@pytest.fixture(scope="module")
def thinking_adapters(demo: LiveServer) -> Iterator[list[str]]:
    """A bundled adapter once more for each of `STYLES`, in production; removed at the end."""
    headers = {"authorization": f"Bearer {demo.access.tenants[0].admin_key}"}
    with httpx.Client(base_url=f"{demo.url}/tenant/v1", headers=headers, timeout=60) as client:
        for name, (start, end) in STYLES.items():
            add_adapter(client, name, "think" if end == "</think>" else {"start": start, "end": end})
        yield [*STYLES]
        for name in STYLES:
            remove_adapter(client, name)


def add_adapter(client: httpx.Client, name: str, style: str | dict[str, str]) -> None:
    client.post("adapters", json={"name": name}).raise_for_status()
    files = {each.name: (each.name, each.read_bytes()) for each in (BUNDLED / "pirate").iterdir()}
    client.post(f"adapters/{name}/versions", files=files).raise_for_status()
    version = f"adapters/{name}/versions/1"
    until(lambda: client.get(version).json()["state"] == "ready", 60, "the version is ready")
    match = {"if-match": client.get(version).headers["etag"]}
    client.patch(version, json={"reasoning_style": style}, headers=match).raise_for_status()
    alias, new = f"adapters/{name}/aliases/production", {"if-none-match": "*"}
    client.put(alias, json={"version": 1}, headers=new).raise_for_status()


def remove_adapter(client: httpx.Client, name: str) -> None:
    client.delete(f"adapters/{name}/aliases/production").raise_for_status()
    until(lambda: client.delete(f"adapters/{name}").status_code != httpx.codes.CONFLICT, 60, "it is deleted")


@pytest.fixture
async def thinker(
    start_gateway: StartGateway, chat_tokenizer: Any, folder: Path, kind: str
) -> AsyncIterator[Thinker]:
    settings = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        deterministic=True,
        cache=CacheConfig(num_blocks=FEW_BLOCKS),
        grammar=GrammarConfig(mask_timeout_s=60.0),
    )
    model = load_model(settings)
    ends = frozenset(model.config.eos_token_ids)
    compiler = MaskCompiler(Vocabulary(model.tokenizer.to_str(), model.config.vocab_size, ends))
    source = PeftAdapterSource(model.config, model.dtype, model.digest)
    engine = LocalEngine(Engine(model, settings, source, mask_factory=compiler.compile))
    yield Thinker(await start_gateway(real_engine=engine), engine, chat_tokenizer, kind == "special")
    await engine.close()


def at_once(calls: Sequence[Callable[[], ThoughtAnswer]]) -> list[ThoughtAnswer]:
    with ThreadPoolExecutor(CONCURRENT) as pool:
        return list(pool.map(lambda call: call(), calls))


def checked(
    drawn: list[ThoughtCase], answers: list[ThoughtAnswer], oracles: list[Oracle], took: float
) -> Counter[str]:
    """Raises for wrong answers, all of them in one message."""
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    for case, answer, oracle in zip(drawn, answers, oracles, strict=True):
        try:
            kinds[oracle.verdict(case, answer)] += 1
        except Exception as error:  # noqa: BLE001 - reported below, with all others
            wrong.append(
                f"{type(error).__name__} {error}: {case}: {answer}: {oracle.decode(answer.token_ids)!r}"[
                    :2000
                ]
            )
    assert not wrong, f"{len(wrong)} of {len(drawn)}:\n" + "\n".join(wrong[:5])
    print(f"\n{summary(kinds, answers, took)}")
    return kinds


async def drawn_answers(thinker: Thinker, drawn: list[ThoughtCase]) -> list[ThoughtAnswer]:
    """The answers, and every third once more in the other way, which must be the same."""
    client, bias = thinker.client(), thinker.bias()
    others = [
        replace(case, order=replace(case.order, streamed=not case.order.streamed)) for case in drawn[::3]
    ]
    calls = [partial(ask, client, BASE_MODEL, case, logit_bias=bias) for case in [*drawn, *others]]
    answers = await asyncio.to_thread(at_once, calls)
    for first, second in zip(answers[: len(drawn) : 3], answers[len(drawn) :], strict=True):
        assert first.parts == second.parts
    return answers[: len(drawn)]


async def test_a_model_with_tokens_as_markers(thinker: Thinker, pytestconfig: pytest.Config) -> None:
    drawn, began = cases(1_000 if pytestconfig.getoption("--long") else 60), time.monotonic()
    answers = await drawn_answers(thinker, drawn)
    kinds = checked(drawn, answers, [thinker.oracle] * len(drawn), time.monotonic() - began)
    assert_coverage(drawn, answers, kinds)
    short = {
        case.budget
        for case, each in zip(drawn, answers, strict=True)
        if 0 < (each.counted or 0) < (case.budget or 0)
    }
    assert short >= {16, 64}, "some thoughts end by themselves"
    if pytestconfig.getoption("--long"):
        assert (await thinker.engine.stats()).preemptions > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3"])
async def test_qwen3s_own_tokenizer_and_template(thinker: Thinker) -> None:
    """Each form by each budget, streamed and whole: a step over 152k tokens takes ten times as long."""
    drawn, began = cases(250), time.monotonic()
    answers = await drawn_answers(thinker, drawn)
    kinds = checked(drawn, answers, [thinker.oracle] * len(drawn), time.monotonic() - began)
    assert_coverage(drawn, answers, kinds)


def test_the_demo_with_markers_of_text(
    demo: LiveServer, thinking_adapters: list[str], demo_model: Path, pytestconfig: pytest.Config
) -> None:
    """One adapter version with the usual markers, one with a pair of its own; neither is a token of the base model."""
    drawn, client = cases(1_000 if pytestconfig.getoption("--long") else 60), demo.client()
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    oracles = [
        Oracle(tokenizer.decode, tokenizer.decode, {tokenizer.get_vocab()["<|im_end|>"]}, start, end)
        for start, end in STYLES.values()
    ]
    turns = [number % len(oracles) for number in range(len(drawn))]
    calls = [
        partial(ask, client, thinking_adapters[turn], case) for turn, case in zip(turns, drawn, strict=True)
    ]
    began = time.monotonic()
    answers = at_once(calls)
    kinds = checked(drawn, answers, [oracles[turn] for turn in turns], time.monotonic() - began)
    assert_coverage(drawn, answers, kinds)


def assert_coverage(drawn: list[ThoughtCase], answers: list[ThoughtAnswer], kinds: Counter[str]) -> None:
    """Most constrained answers are whole, and every budget but 0 has thoughts, some of them up to it."""
    constrained = sum(case.order.form is not None for case in drawn)
    assert kinds["document"] + kinds["calls"] > 0.7 * constrained, kinds
    assert {case.order.form.name for case in drawn if case.order.form} == {
        form.name for form in THINKING_FORMS
    }
    thoughtful = {case.budget for case, answer in zip(drawn, answers, strict=True) if answer.thought}
    full = {case.budget for case, each in zip(drawn, answers, strict=True) if each.counted == case.budget}
    assert thoughtful == {1, 16, 64, None} and full >= {1, 16, 64}


@pytest.mark.parametrize("kind", ["added"])
async def test_the_second_turn_of_a_tool_loop_is_cached(thinker: Thinker) -> None:
    client: Any = thinker.client()
    tools = [tool(name, schema, False) for name, schema in MANY.items()]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in a city? " * 10}]
    fields = {"model": BASE_MODEL, "tools": tools, "temperature": 1.0, "seed": 1, "max_tokens": 200}
    extra = {"thinking_token_budget": 16}
    create = partial(asyncio.to_thread, client.chat.completions.create, **fields, extra_body=extra)
    first = await create(messages=messages, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    assert message.reasoning and len(message.tool_calls) == 1 and first.usage.prompt_tokens > 1_900
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    second = await create(messages=[*messages, message.model_dump(exclude_none=True), result])
    usage = second.usage
    assert usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens / 2
    share = usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens
    print(f"\n{share:.1%} of {usage.prompt_tokens} tokens")
    assert share >= 0.95
