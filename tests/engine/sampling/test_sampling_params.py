"""Each bound of the sampling parameters refuses by its field's name and says the bound, which the check formats only then."""

from typing import Any

import pytest

from loraplex.engine.errors import InvalidRequest
from loraplex.engine.sampling_params import SamplingParams

VOCABULARY = 400


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "must be at least 1"),
        ("n", 129, "must lie in 1..128"),
        ("temperature", 2.5, "must lie in 0.0..2.0"),
        ("temperature", float("nan"), "must lie in 0.0..2.0"),
        ("temperature", float("inf"), "must lie in 0.0..2.0"),
        ("frequency_penalty", float("-inf"), "must lie in -2.0..2.0"),
        ("top_p", 0.0, "must be above 0"),
        ("top_k", -1, "must lie in 0..2147483647; 0 turns it off"),
        ("min_tokens", 6, "must lie in 0..max_tokens"),
        ("stop", ("x",) * 17, "holds at most 16 strings"),
        ("stop", ("",), "must not hold an empty string"),
        ("stop_token_ids", (3, VOCABULARY), "must hold token ids in 0..399"),
        ("stop_token_ids", (-1, 3), "must hold token ids in 0..399"),
        ("logit_bias", {VOCABULARY: 1.0}, "must hold token ids in 0..399"),
        ("logit_bias", {3: float("nan")}, "must lie in -100.0..100.0"),
        ("logprobs", 21, "must lie in 0..20"),
    ],
)
def test_a_value_out_of_its_bounds_is_named(field: str, value: Any, message: str) -> None:
    sampling = SamplingParams(**{"max_tokens": 5, field: value})
    with pytest.raises(InvalidRequest) as caught:
        sampling.validate(VOCABULARY)
    assert caught.value.field == field
    assert str(caught.value) == f"`{field}` {message}"


def test_the_bounds_themselves_pass() -> None:
    SamplingParams(
        max_tokens=5,
        n=16,
        temperature=2.0,
        top_p=1.0,
        min_tokens=5,
        stop_token_ids=(0, VOCABULARY - 1),
        logit_bias={VOCABULARY - 1: -100.0},
        logprobs=20,
    ).validate(VOCABULARY)
