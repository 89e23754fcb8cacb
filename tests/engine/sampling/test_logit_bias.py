"""Bias and minimum length on plain logits."""

import math

import torch

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling.logit_bias import (
    apply_bias,
    apply_minimum_length,
    bias_tensors,
    ending_tensors,
    is_below_minimum,
)
from loraplex.engine.sampling_params import SamplingParams


def sequence(outputs: int = 0, **sampling: object) -> Sequence:
    params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    request = EngineRequest(request_id="r", namespace=b"", prompt_token_ids=[1, 2], sampling=params)
    return Sequence(request, 0, 0.0, 0, [1, 2] + [3] * outputs)


def allowed(logits: torch.Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


def test_bias_is_added_where_requested() -> None:
    logits = torch.zeros(3, 5)
    logits[2, 4] = -math.inf
    apply_bias(logits, *bias_tensors([0, 2], [{1: 2.5}, {0: -100.0, 4: 100.0}], logits.shape[1]))
    assert logits.tolist() == [[0.0, 2.5, 0.0, 0.0, 0.0], [0.0] * 5, [-100.0, 0.0, 0.0, 0.0, -math.inf]]


def test_the_minimum_counts_output_tokens() -> None:
    below = [is_below_minimum(sequence(outputs, min_tokens=2)) for outputs in range(4)]
    assert below == [True, True, False, False]
    assert not is_below_minimum(sequence())


def test_minimum_length_forbids_stop_tokens_and_an_eos_that_would_stop() -> None:
    logits = torch.zeros(4, 5)
    sequences = [
        sequence(stop_token_ids=(2,)),
        sequence(stop_token_ids=(2,), ignore_eos=True),
        sequence(ignore_eos=True),
    ]
    apply_minimum_length(logits, *ending_tensors([0, 1, 3], sequences, frozenset({0})))
    assert allowed(logits) == [{1, 3, 4}, {0, 1, 3, 4}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}]


def test_a_grammar_that_allows_only_the_end_wins_over_the_minimum() -> None:
    logits = torch.full((2, 5), -math.inf)
    logits[:, 0] = 1.0
    logits[1, 3] = 1.0
    apply_minimum_length(logits, *ending_tensors([0, 1], [sequence(), sequence()], frozenset({0})))
    assert allowed(logits) == [{0}, {3}]
