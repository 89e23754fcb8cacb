"""Answers with thought at temperature 1 through the whole product: every form by every budget, streamed and whole, on two kinds of model."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.end_to_end.thinking_model import save_thinking_model
from tests.end_to_end.thoughts import Oracle, ThoughtAnswer, ThoughtCase, ask, cases, summary
from tests.platform.web.gateway import BASE_MODEL, Gateway, StartGateway, start_gateway

from loraplex.adapters.loader import PeftAdapterSource
from loraplex.engine.config import CacheConfig, EngineConfig, GrammarConfig
from loraplex.engine.engine import Engine
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.model_loading import load_model
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import Vocabulary

__all__ = ["start_gateway"]

CONCURRENT = 16
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
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "thinking"


@pytest.fixture
def chat_tokenizer(kind: str, folder: Path) -> Any:
    return save_thinking_model(folder, special=kind == "special")


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


def at_once(calls: list[Callable[[], ThoughtAnswer]]) -> list[ThoughtAnswer]:
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
            wrong.append(f"{type(error).__name__} {error}: {case}: {answer}: {oracle.decode(answer.token_ids)!r}"[:2000])
    assert not wrong, f"{len(wrong)} of {len(drawn)}:\n" + "\n".join(wrong[:5])
    print(f"\n{summary(kinds, answers, took)}")
    return kinds


async def test_a_model_with_tokens_as_markers(thinker: Thinker, pytestconfig: pytest.Config) -> None:
    drawn, client, bias = cases(1_000 if pytestconfig.getoption("--long") else 60), thinker.client(), thinker.bias()
    began = time.monotonic()
    answers = await asyncio.to_thread(
        at_once, [partial(ask, client, BASE_MODEL, case, logit_bias=bias) for case in drawn]
    )
    kinds = checked(drawn, answers, [thinker.oracle] * len(drawn), time.monotonic() - began)
    print(await thinker.engine.stats())
