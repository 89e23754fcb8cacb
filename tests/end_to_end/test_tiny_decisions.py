"""Decisions of tiny models in the process of the test equal `transformers` with PEFT: labels, pairs of letters, written values."""

import json
import math
from itertools import product
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pytest
from tests.end_to_end.decision_reference import (
    INPUTS,
    QUESTIONS,
    Reference,
    answers_of,
    check_equal,
    decide,
    shares,
)
from tests.end_to_end.opinionated_model import (
    StartEngine,
    paths_in,
    save_opinionated_model,
    save_random_adapter,
    save_trained_adapter,
    start_engine,
)
from tests.end_to_end.test_scores import BOUND
from tests.platform.web.gateway import StartGateway, start_gateway

from loraplex.tenants.registry.records import AdapterProfile

__all__ = ["start_engine", "start_gateway"]


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Any:
    return save_opinionated_model(tmp_path / "model")


@pytest.mark.parametrize("count", [20, pytest.param(len(INPUTS), marks=pytest.mark.long)])
async def test_answers_of_a_tiny_model_equal_brute_force(
    start_gateway: StartGateway, start_engine: StartEngine, chat_tokenizer: Any, tmp_path: Path, count: int
) -> None:
    model, names = tmp_path / "model", ["demo/base", "first", "second", "third"]
    digests = [f"{number:064}" for number in range(len(names))]
    for seed, digest in enumerate(digests[1:]):
        save_random_adapter(model, tmp_path / digest, seed)
    gateway = await start_gateway(real_engine=await start_engine(model), adapter_path=paths_in(tmp_path))
    for name, digest in zip(names[1:], digests[1:], strict=True):
        await gateway.adapter("acme", name, digest)
    client, seen = gateway.client(), set[str]()
    for name, digest in zip(names, digests, strict=True):
        reference = Reference(model, None if digest == digests[0] else tmp_path / digest)
        for given in INPUTS[:count]:
            raw = await decide(client, name, given, QUESTIONS)
            check_equal(reference, given, raw)
            seen.add(json.dumps(answers_of(raw)))
    assert len(seen) == len(names) * count, "every model has an opinion of its own"


async def test_pairs_of_letters_equal_brute_force(
    start_gateway: StartGateway, start_engine: StartEngine, chat_tokenizer: Any, tmp_path: Path
) -> None:
    """255 choices: each pair along all ways to write it, and all of them share one certainty."""
    gateway = await start_gateway(real_engine=await start_engine(tmp_path / "model"))
    choices = [{"value": str(number)} for number in range(255)]
    question = {"type": "choice", "instructions": "Which one?", "choices": choices}
    [answer] = answers_of(await decide(gateway.client(), "demo/base", INPUTS[0], [question]))
    found = shares(answer)
    assert math.fsum(found) == pytest.approx(1, abs=1e-6)
    reference, pairs = Reference(tmp_path / "model", None), [*product(ascii_uppercase, repeat=2)][:255]
    lines = "\n".join(f"{a}{b}: {number}" for number, (a, b) in enumerate(pairs))
    prompt = reference.prompt(
        INPUTS[0], f"Which one?\n\nOptions:\n{lines}\n\nWrite the letters of one option."
    )
    tried = range(0, 255, 50)
    spelled = [[reference.encode(blank + "".join(pairs[at])) for blank in ("", " ")] for at in tried]
    expected = [sum(math.exp(reference.logprob(prompt, ids)) for ids in each) for each in spelled]
    ratios = [math.log(found[at] / each) for at, each in zip(tried, expected, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), abs=BOUND)


@pytest.mark.parametrize("ends", [True, False])
async def test_values_of_an_adapter_that_writes_them_equal_brute_force(
    start_gateway: StartGateway, start_engine: StartEngine, chat_tokenizer: Any, tmp_path: Path, ends: bool
) -> None:
    """With the end of each, where the model has one."""
    model, digest = tmp_path / "model", "a" * 64
    save_opinionated_model(model, ends=ends)
    values = ["billing", "technical", "true"]
    text = (
        "Which team is this for?\n\nOptions:\n- billing (payments, refunds)\n- technical\n- true\n\n"
        "Write one option as it stands there."
    )
    base = Reference(model, None)
    end = [base.encode("<|im_end|>"), []][not ends]
    taught = {given: values[number % 3] for number, given in enumerate(INPUTS[::40])}
    prompts = [base.prompt(given, text) for given in taught]
    save_trained_adapter(
        model, tmp_path / digest, prompts, [base.encode(each) + end for each in taught.values()]
    )
    gateway = await start_gateway(real_engine=await start_engine(model), adapter_path=paths_in(tmp_path))
    await gateway.adapter("acme", "writer", digest, AdapterProfile(decision={"read": "values"}))
    reference = Reference(model, tmp_path / digest)
    for (given, right), prompt in zip(taught.items(), prompts, strict=True):
        [answer] = answers_of(await decide(gateway.client(), "writer", given, [QUESTIONS[2]]))
        logs = [reference.logprob(prompt, reference.encode(each) + end) for each in values]
        whole = math.log(sum(map(math.exp, logs)))
        assert [math.log(each) for each in shares(answer)] == pytest.approx(
            [each - whole for each in logs], abs=BOUND
        )
        assert str(answer["choice"]).lower() == right and max(shares(answer)) > 0.9
