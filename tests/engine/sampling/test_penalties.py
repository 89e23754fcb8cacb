"""Penalties against a dense computation from the token lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling.penalties import TokenHistories, apply_penalties, has_penalty, penalty_tensors
from loraplex.engine.sampling_params import SamplingParams

VOCAB = 300
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=100)


def sequence(
    prompt: list[int], repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0
) -> Sequence:
    sampling = SamplingParams(
        max_tokens=500,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    request = EngineRequest(request_id="r", namespace=b"", prompt_token_ids=prompt, sampling=sampling)
    return Sequence(request, 0, 0.0, 0, list(prompt))


def dense(logits: torch.Tensor, seq: Sequence) -> torch.Tensor:
    sampling, result = seq.request.sampling, logits.clone()
    for token in set(seq.token_ids):
        value = result[token]
        repetition = sampling.repetition_penalty
        result[token] = value / repetition if value > 0 else value * repetition
    output = seq.token_ids[seq.num_prompt_tokens :]
    for token in set(output):
        result[token] -= output.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    return result


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            TOKENS,
            TOKENS,
            st.sampled_from([0.5, 1.0, 1.3]),
            st.sampled_from([-1.0, 0.0, 0.5]),
            st.sampled_from([-2.0, 0.0, 1.5]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_equals_the_dense_computation_at_every_step(
    specifications: list[tuple[list[int], list[int], float, float, float]],
) -> None:
    histories = TokenHistories(capacity=8)
    sequences = [sequence(prompt, r, f, p) for prompt, _, r, f, p in specifications]
    rows = [2 * row for row in range(len(sequences))]
    for step in range(0, 101, 20):
        for seq, (_, output, *_) in zip(sequences, specifications, strict=True):
            seq.token_ids.extend(output[len(seq.token_ids) - seq.num_prompt_tokens : step])
        logits = torch.randn(2 * len(sequences), VOCAB, generator=torch.Generator().manual_seed(step))
        expected = logits.clone()
        for row, seq in zip(rows, sequences, strict=True):
            expected[row] = dense(logits[row], seq)
        apply_penalties(logits, *penalty_tensors(rows, sequences, histories, VOCAB))
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_a_history_grows_with_the_distinct_tokens() -> None:
    seq = sequence([1], frequency=1.0)
    seq.token_ids += [*range(1000), *range(0, 1000, 2)]
    history = TokenHistories(capacity=2).of(seq)
    assert history.ids.tolist() == list(range(1000))
    assert history.counts.tolist() == [2.0, 1.0] * 500


def test_histories_are_bounded_and_an_evicted_one_is_rebuilt() -> None:
    histories = TokenHistories(capacity=2)
    sequences = [sequence([1], frequency=1.0) for _ in range(3)]
    for seq in sequences:
        seq.token_ids += [4, 4, 5]
        histories.of(seq)
    assert len(histories) == 2
    history = histories.of(sequences[0])
    assert (history.ids.tolist(), history.counts.tolist()) == ([4, 5], [2.0, 1.0])


def test_forgetting_drops_the_history_and_is_idempotent() -> None:
    histories = TokenHistories(capacity=2)
    seq = sequence([1], frequency=1.0)
    histories.of(seq)
    histories.forget(seq)
    histories.forget(seq)
    assert len(histories) == 0


def test_a_history_follows_tokens_taken_back() -> None:
    histories = TokenHistories(capacity=2)
    seq = sequence([1], repetition=2.0)
    seq.token_ids += [4, 5]
    histories.of(seq)
    del seq.token_ids[-1]
    assert histories.of(seq).ids.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("seq", "penalised"),
    [
        (sequence([]), False),
        (sequence([], repetition=1.1), True),
        (sequence([], frequency=-0.1), True),
        (sequence([], presence=0.1), True),
    ],
)
def test_has_penalty(seq: Sequence, penalised: bool) -> None:
    assert has_penalty(seq.request.sampling) is penalised
