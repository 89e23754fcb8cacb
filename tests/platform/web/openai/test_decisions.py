"""`/v1/decisions` for the official client: rows that reach the engine, answers, usage, and what is refused."""

import asyncio
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from openai.types.decision import Decision
from tests.platform.conftest import build_tokenizer

from loraplex.engine.errors import AdapterQuarantined
from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript, Fault
from loraplex.platform.web.openai.decision_models import DecisionResponse
from loraplex.tenants.registry.records import AdapterProfile

MODEL = "demo/base"
DIGESTS = ("a" * 64, "b" * 64)
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "Is it urgent?", "name": "urgent"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "true"}, {"value": True, "description": "yes"}, {"value": "other"}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "instructions": "How angry?",
    "levels": [{"label": "calm"}, {"label": "mad"}],
}
QUARANTINED = Fault(kind="fail", code=AdapterQuarantined.code, message="the adapter is quarantined")
QUESTIONS = [PREDICATE, CHOICE, SCORE]


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    """The small tokenizer has a token for each letter, but for no word that these questions are answered with."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["Yes", "No"])
    return tokenizer


def many(count: int) -> dict[str, Any]:
    return CHOICE | {"choices": [{"value": f"option {number}"} for number in range(count)]}


async def test_answers_have_the_types_of_the_official_package(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript())
    raw = await gateway.client().decisions.with_raw_response.create(
        model=MODEL, input="Help!", questions=QUESTIONS
    )
    answer = raw.parse()
    Decision.model_validate(answer.model_dump(), strict=True)
    DecisionResponse.model_validate(answer.model_dump(), strict=True, extra="forbid")
    predicate, choice, score = answer.answers
    assert (predicate.name, predicate.probability) == ("urgent", 0.5)
    assert [(type(each.value), each.value) for each in choice.probabilities] == [
        (str, "true"),
        (bool, True),
        (str, "other"),
    ]
    assert sum(each.probability for each in choice.probabilities) == pytest.approx(1, abs=1e-9)
    assert choice.confidence == pytest.approx(0, abs=1e-9) and choice.name is None
    assert (score.score, score.confidence) == (pytest.approx(0.5), pytest.approx(0))
    assert [(each.label, each.value) for each in score.probabilities] == [("calm", 0), ("mad", 1)]
    assert raw.headers["x-loraplex-decision-format"] == "1"
    assert raw.headers["x-loraplex-decision-calibration"] == "none"
    assert gateway.recorder.questions == {"predicate": 1, "choice": 1, "score": 1}


async def test_each_question_is_a_row_behind_the_input(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript())
    answer = await gateway.client().decisions.create(model=MODEL, input="Help! " * 20, questions=QUESTIONS)
    rows = gateway.engine.requests
    assert [len(QUESTIONS)] == [len(rows)] and {row.sampling.max_tokens for row in rows} == {0}
    shared = 0
    while len({row.prompt_token_ids[shared] for row in rows}) == 1:
        shared += 1
    assert shared > 20
    for row in rows:
        [(position, labels)] = row.scores.token_ids.items()
        assert position == len(row.prompt_token_ids) - 1 and len(set(labels)) == len(labels)
    usage = answer.usage
    assert usage.output_tokens == 0 and usage.total_tokens == usage.input_tokens
    assert usage.input_tokens < sum(len(row.prompt_token_ids) for row in rows)
    [(reserved, settled)] = [(each, used) for each, used in gateway.admissions.settled]
    assert reserved.request.prompt_tokens == settled.prompt_tokens == usage.input_tokens
    assert reserved.request.sequences == 1 and settled.completion_tokens == 0


async def test_what_an_assistant_refused_is_read(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript())
    for refusal in ("I will not do that", "I cannot see it"):
        said = {"role": "assistant", "content": [{"type": "refusal", "refusal": refusal}]}
        await gateway.client().decisions.create(
            model=MODEL, input=[{"role": "user", "content": "Do it!"}, said], questions=[PREDICATE]
        )
    first, second = (row.prompt_token_ids for row in gateway.engine.requests)
    assert first != second


async def test_255_choices_share_one_certainty(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript())
    answer = await gateway.client().decisions.create(model=MODEL, input="Help!", questions=[many(255)])
    [choice] = answer.answers
    assert len(choice.probabilities) == 255
    assert sum(each.probability for each in choice.probabilities) == pytest.approx(1, abs=1e-6)


async def test_questions_may_name_other_adapters_of_the_tenant(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(info=replace(DEFAULT_INFO, eos_token_ids=[2])))
    await gateway.adapter("acme", "triage", DIGESTS[0])
    await gateway.adapter("acme", "mood", DIGESTS[1], AdapterProfile(decision={"read": "values"}))
    raw = await gateway.client().decisions.with_raw_response.create(
        model="triage", input="Help!", questions=[PREDICATE, many(3) | {"model": "mood"}, SCORE]
    )
    assert raw.headers["x-loraplex-adapter"] == "triage@1, mood@1"
    assert raw.headers["x-loraplex-adapter-digest"] == ", ".join(DIGESTS)
    rows = {row.adapter.digest: row for row in gateway.engine.requests}
    assert [row.adapter.digest for row in gateway.engine.requests].count(DIGESTS[0]) == 2
    assert len(rows[DIGESTS[1]].scores.continuations) == 3 and rows[DIGESTS[1]].scores.ending_ids == [2]
    settled = [(each.request.digest, used.prompt_tokens) for each, used in gateway.admissions.settled]
    assert sorted(digest for digest, _ in settled) == [*DIGESTS]
    assert sum(tokens for _, tokens in settled) == raw.parse().usage.input_tokens


async def test_adapters_whose_rows_take_all_places_do_not_wait_for_each_other(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(info=replace(DEFAULT_INFO, eos_token_ids=[2])))
    questions = [many(100) | {"model": f"reader-{number}"} for number in range(3)]
    for number in range(3):
        profile = AdapterProfile(decision={"read": "values"})
        await gateway.adapter("acme", f"reader-{number}", DIGESTS[0], profile)
    async with asyncio.timeout(20):
        answer = await gateway.client().decisions.create(model=MODEL, input="Help!", questions=questions)
    assert [len(each.probabilities) for each in answer.answers] == [100] * 3


async def test_headers_of_adapters_have_one_place_for_each(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript())
    await gateway.adapter("acme", "triage", DIGESTS[0])
    raw = await gateway.client().decisions.with_raw_response.create(
        model=MODEL, input="Help!", questions=[PREDICATE, SCORE | {"model": "triage"}]
    )
    names = ("x-loraplex-adapter", "x-loraplex-adapter-digest", "x-loraplex-decision-calibration")
    assert [raw.headers[name] for name in names] == ["triage@1", DIGESTS[0], "none"]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"questions": [PREDICATE] * 401}, "questions", "invalid_value"),
        ({"questions": []}, "questions", "invalid_value"),
        ({"questions": [many(256)]}, "questions[0].choices", "invalid_value"),
        (
            {"questions": [CHOICE | {"choices": [{"value": "a"}] * 2}]},
            "questions[0].choices",
            "invalid_value",
        ),
        (
            {"questions": [PREDICATE, *QUESTIONS[:2], PREDICATE | {"model": "theirs"}]},
            "questions[3].model",
            "model_not_found",
        ),
        ({"model": "nope"}, "model", "model_not_found"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content[0]",
            "unsupported_parameter",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
            "input[0].call_id",
            "invalid_value",
        ),
        ({"files": []}, "files", "unknown_parameter"),
    ],
)
async def test_bad_input_names_its_field(
    start_gateway: Any, body: dict[str, Any], param: str, code: str
) -> None:
    gateway = await start_gateway(FakeScript())
    await gateway.tenant("others")
    await gateway.adapter("others", "theirs", DIGESTS[0])
    sent = {"model": MODEL, "input": "Help!", "questions": QUESTIONS} | body
    response = await gateway.post("/v1/decisions", sent)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404 if code == "model_not_found" else 400, param)
    assert error["code"] == code
    assert gateway.engine.requests == [] and gateway.admissions.settled == []


async def test_an_input_above_the_context_names_the_question(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript())
    long = PREDICATE | {"instructions": "word " * 20_000}
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.client().decisions.create(model=MODEL, input="Help!", questions=[PREDICATE, long])
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "questions[1]"


async def test_a_quarantined_adapter_is_named(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(faults=(QUARANTINED,)))
    await gateway.adapter("acme", "triage", DIGESTS[0])
    with pytest.raises(openai.InternalServerError) as refused:
        await gateway.client().decisions.create(model="triage", input="Help!", questions=QUESTIONS)
    assert refused.value.status_code == 503 and refused.value.code == "adapter_quarantined"
    assert "`triage`" in refused.value.message
