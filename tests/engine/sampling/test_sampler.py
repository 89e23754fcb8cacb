"""The sampler as a whole: distribution, independence of rows, constraints, broken rows."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import SampledToken
from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.sampling_params import SamplingParams

VOCAB = 320
WORDS = VOCAB // 32
EOS = 0


class _Mask:
    """Marks a sequence as having a grammar; the tests write the bitmask themselves."""

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        raise NotImplementedError

    def accept(self, token_id: int) -> bool:
        raise NotImplementedError

    def rollback(self, count: int) -> None:
        raise NotImplementedError

    def fork(self) -> "_Mask":
        raise NotImplementedError

    def is_complete(self) -> bool:
        raise NotImplementedError

    def is_final(self) -> bool:
        raise NotImplementedError

    def forced_tokens(self) -> list[int]:
        raise NotImplementedError

    def closing_tokens(self, most: int) -> list[int] | None:
        raise NotImplementedError

    @property
    def family(self) -> object:
        return self

    @property
    def closes(self) -> bool:
        return False


def sequence(
    outputs: tuple[int, ...] = (), seed: int = 7, masked: bool = False, **sampling: object
) -> Sequence:
    params = SamplingParams(**{"max_tokens": 10**6, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    prompt = [1, 2, 3]
    request = EngineRequest(request_id="r", namespace=b"", prompt_token_ids=prompt, sampling=params)
    return Sequence(request, 0, 0.0, seed, [*prompt, *outputs], token_mask=_Mask() if masked else None)


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB, [EOS])


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def bitmask_of(*rows: set[int]) -> torch.Tensor:
    """One row for each sequence with a grammar."""
    bits = torch.zeros(len(rows), VOCAB, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        bits[row, list(tokens)] = 1
    words = (bits.view(len(rows), WORDS, 32) << torch.arange(32)).sum(dim=-1)
    return words.to(torch.int32)


def tokens(sampled: list[SampledToken]) -> list[int]:
    return [token.token_id for token in sampled]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_temperature_zero_is_the_argmax(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = logits_of(5).to(dtype)
    expected = logits.float().numpy().argmax(axis=-1).tolist()
    assert tokens(sampler.sample(logits, [sequence() for _ in range(5)])) == expected
    assert tokens(sampler.sample(logits, [sequence(temperature=1e-7) for _ in range(5)])) == expected


def test_no_rows_give_no_tokens(sampler: Sampler) -> None:
    assert sampler.sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize(
    ("parameters", "transform"),
    [
        ({"temperature": 1.0}, lambda p: p),
        ({"temperature": 0.5}, lambda p: p**2),
        ({"temperature": 1.0, "top_k": 4}, lambda p: p * (p >= p.sort(descending=True).values[3])),
        ({"temperature": 1.0, "min_p": 0.2}, lambda p: p * (p >= 0.2 * p.max())),
        (
            {"temperature": 1.0, "logit_bias": {5: 3.0}},
            lambda p: p * torch.tensor([1.0] * 5 + [math.e**3] + [1.0] * 4),
        ),
    ],
)
def test_samples_follow_the_distribution(parameters: dict[str, object], transform: object) -> None:
    """Pearson's chi-square over 20000 draws; the seed is fixed, the bound is exceeded once in 1000 seeds."""
    assert callable(transform)
    logits = torch.randn(10, generator=torch.Generator().manual_seed(4))
    weights = transform(logits.double().softmax(dim=-1))
    expected = (weights / weights.sum() * 20_000).tolist()
    sampler = Sampler(10)
    counts = [0] * 10
    for seed in range(100):
        batch = [sequence((9,) * position, seed, **parameters) for position in range(200)]  # type: ignore[arg-type]
        for token in sampler.sample(logits.expand(200, 10), batch):
            counts[token.token_id] += 1
    possible = [(seen, mean) for seen, mean in zip(counts, expected, strict=True) if mean > 0]
    assert sum(seen for seen, _ in possible) == 20_000
    assert sum((seen - mean) ** 2 / mean for seen, mean in possible) < 27.9


PARAMETERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 50, 200]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "logit_bias": st.sampled_from([{}, {3: 5.0, 9: -100.0}]),
        "min_tokens": st.sampled_from([0, 4]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "seed": st.integers(0, 2**63),
        "outputs": st.lists(st.integers(0, VOCAB - 1), max_size=8).map(tuple),
        "masked": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PARAMETERS, min_size=2, max_size=8),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_alone_gives_what_it_gives_in_any_batch(
    parameters: list[dict[str, object]], seed: int, dtype: torch.dtype
) -> None:
    sequences = [sequence(**specification) for specification in parameters]  # type: ignore[arg-type]
    logits = logits_of(len(sequences), seed).to(dtype)

    def bitmask(rows: list[int]) -> torch.Tensor | None:
        masked = [row for row in rows if sequences[row].token_mask is not None]
        return bitmask_of(*(set(range(row, VOCAB, 3)) for row in masked)) if masked else None

    before = logits.clone()
    sampler = Sampler(VOCAB, [EOS])
    together = sampler.sample(logits, sequences, bitmask(list(range(len(sequences)))))
    assert torch.equal(logits, before)
    order = list(range(len(sequences)))
    random.Random(seed).shuffle(order)
    shuffled = sampler.sample(logits[order], [sequences[row] for row in order], bitmask(order))
    for place, row in enumerate(order):
        fresh = Sampler(VOCAB, [EOS])
        alone = fresh.sample(logits[row : row + 1], [sequences[row]], bitmask([row]))[0]
        for other in (together[row], shuffled[place]):
            assert (other.token_id, other.finite) == (alone.token_id, alone.finite)
            assert (other.logprob is None) == (alone.logprob is None)
            if other.logprob is not None and alone.logprob is not None:
                assert other.logprob.logprob == pytest.approx(alone.logprob.logprob, abs=1e-5)
                assert [t for t, _ in other.logprob.top] == [t for t, _ in alone.logprob.top]


def test_seed_choice_and_position_choose_the_token(sampler: Sampler) -> None:
    def drawn(row: Sequence) -> int:
        return sampler.sample(torch.zeros(1, VOCAB), [row])[0].token_id

    base = sequence(temperature=1.0)
    same = sequence(temperature=1.0)
    others = [sequence(temperature=1.0, seed=9), replace(base, choice=1), sequence((5,), temperature=1.0)]
    assert drawn(base) == drawn(same)
    assert len({drawn(base), *map(drawn, others)}) == 4


def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(sampler: Sampler) -> None:
    row = sequence((5, 5, 6), temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.2)
    logits = logits_of(1)
    first = tokens(sampler.sample(logits, [row]))
    row.num_preemptions, row.num_computed_tokens = 1, 0
    assert tokens(sampler.sample(logits, [row])) == first
    sampler.forget(row)
    assert tokens(sampler.sample(logits, [row])) == first


def test_penalties_move_a_greedy_row_on(sampler: Sampler) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5], logits[:, 6] = 2.0, 1.5
    rows = [sequence((5,)), sequence((5,), presence_penalty=1.0), sequence((9,), presence_penalty=1.0)]
    assert tokens(sampler.sample(logits, rows)) == [5, 6, 5]


def test_a_mask_holds_only_rows_with_a_grammar(sampler: Sampler) -> None:
    logits = logits_of(3)
    best = logits.argmax(dim=-1).tolist()
    rows = [sequence(), sequence(masked=True), sequence(masked=True, temperature=2.0)]
    sampled = tokens(sampler.sample(logits, rows, bitmask_of({31, 319}, {32})))
    assert sampled[0] == best[0]
    assert sampled[1] == (31 if logits[1, 31] > logits[1, 319] else 319)
    assert sampled[2] == 32


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eos_waits_for_min_tokens(sampler: Sampler, temperature: float) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, EOS], logits[:, 4], logits[:, 5] = 90.0, 60.0, 30.0
    params = {"min_tokens": 2, "stop_token_ids": (4,), "temperature": temperature}
    rows = [sequence((9,) * count, **params) for count in range(3)]  # type: ignore[arg-type]
    ignoring = sequence(ignore_eos=True, **params)  # type: ignore[arg-type]
    assert tokens(sampler.sample(logits, [*rows, ignoring])) == [5, 5, EOS, EOS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_fails_alone(sampler: Sampler, bad: float, temperature: float) -> None:
    logits = logits_of(4)
    params = {"temperature": temperature, "top_p": 0.9, "top_k": 30, "frequency_penalty": 0.5, "logprobs": 2}
    rows = [sequence((3, 4), seed, **params) for seed in range(4)]  # type: ignore[arg-type]
    healthy = sampler.sample(logits, rows)
    logits[1, 200] = bad
    logits[3] = -math.inf
    sampled = sampler.sample(logits, rows)
    broken = SampledToken(-1, finite=False)
    assert sampled == [healthy[0], broken, healthy[2], broken]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_fails_its_row_without_blaming_the_model(
    sampler: Sampler, temperature: float
) -> None:
    rows = [sequence(masked=True, temperature=temperature, logprobs=1) for _ in range(3)]
    logits = logits_of(3)
    logits[2, 7] = math.nan
    nothing, fine, broken = sampler.sample(logits, rows, bitmask_of(set(), {8}, set()))
    assert nothing == SampledToken(-1, finite=False, nothing_allowed=True)
    assert (fine.token_id, fine.finite) == (8, True)
    assert broken == SampledToken(-1, finite=False)


def test_logprobs_are_those_of_the_model(sampler: Sampler) -> None:
    """Neither temperature nor bias nor mask show in them, only in the choice."""
    logits = logits_of(2)
    rows = [sequence(masked=True, logprobs=2, logit_bias={8: 9.0}, temperature=0.5), sequence()]
    answer, silent = sampler.sample(logits, rows, bitmask_of({8}))
    expected = logits[0].log_softmax(dim=-1)
    assert answer.logprob is not None
    assert answer.logprob.token_id == answer.token_id == 8
    assert answer.logprob.logprob == pytest.approx(expected[8].item(), abs=1e-6)
    assert [token for token, _ in answer.logprob.top] == expected.topk(2).indices.tolist()
    assert silent.logprob is None


def test_wrong_shapes_are_refused(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match=r"logits are \[1, 5\], expected \[1, 320\]"):
        sampler.sample(torch.zeros(1, 5), [sequence()])
    with pytest.raises(ValueError, match=r"bitmask is \[1, 3\], expected 1 rows"):
        sampler.sample(torch.zeros(1, VOCAB), [sequence(masked=True)], torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="no bitmask"):
        sampler.sample(torch.zeros(1, VOCAB), [sequence(masked=True)])
