"""`RequestValidator`: whatever would raise in the step loop is refused before it queues, by the name of its field."""

import math
from typing import Any

import pytest

from loraplex.engine.errors import InvalidRequest, PromptTooLong
from loraplex.engine.messages import DEADLINES, EngineRequest
from loraplex.engine.sampling_params import MAX_CHOICES, SamplingParams
from loraplex.engine.scheduling.request_limits import RequestValidator

VOCAB = 100


def request(sampling: dict[str, Any], **fields: Any) -> EngineRequest:
    settings = {"max_tokens": 4} | sampling
    return EngineRequest(
        request_id="r",
        namespace=bytes(32),
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(**settings),
        **fields,
    )


@pytest.fixture
def admission() -> RequestValidator:
    return RequestValidator(max_model_len=64, max_cache_tokens=32, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("logit_bias", {"logit_bias": {1: math.nan}}),
        ("stop_token_ids", {"stop_token_ids": (VOCAB,)}),
        ("top_k", {"top_k": 2**63}),
        ("temperature", {"temperature": math.inf}),
        ("n", {"n": MAX_CHOICES + 1}),
        ("n", {"n": 0}),
        ("max_tokens", {"max_tokens": 0}),
    ],
)
def test_sampling_parameters_are_checked_against_their_bounds_again(
    admission: RequestValidator, field: str, sampling: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        admission.check(request(sampling))
    assert caught.value.field == field


@pytest.mark.parametrize("field", DEADLINES)
@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_timeout_is_a_finite_number(admission: RequestValidator, field: str, seconds: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        admission.check(request({}, **{field: seconds}))
    assert caught.value.field == field


def test_the_smaller_of_model_and_pool_bounds_the_length(admission: RequestValidator) -> None:
    admission.check(request({"max_tokens": 29}))
    with pytest.raises(PromptTooLong) as refused:
        admission.check(request({"max_tokens": 30}))
    assert str(refused.value) == (
        "This model's maximum context length is 32 tokens. However, you requested 33 tokens "
        "(3 in the prompt, 30 for the completion)."
    )
