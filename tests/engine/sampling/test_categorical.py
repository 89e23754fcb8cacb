"""Row maxima and inverse-CDF draws against plain torch and exact shares."""

import pytest
import torch

from loraplex.engine.sampling.categorical import draw, keep_from, row_maxima, total_mass


@pytest.mark.parametrize("vocab", [7, 256, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_maxima_is_the_first_maximum(vocab: int, dtype: torch.dtype) -> None:
    scores = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0)).mul(4).round().to(dtype)
    values, index = row_maxima(scores)
    assert torch.equal(values, scores.amax(dim=-1))
    assert index.tolist() == [row.tolist().index(max(row.tolist())) for row in scores]


@pytest.mark.parametrize("vocab", [7, 1024])
def test_a_nan_wins(vocab: int) -> None:
    scores = torch.zeros(2, vocab)
    scores[1, 5] = torch.nan
    assert row_maxima(scores)[0].isnan().tolist() == [False, True]


@pytest.mark.parametrize("vocab", [5, 300, 513])
def test_draw_inverts_the_distribution_function(vocab: int) -> None:
    weights = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)).exp()
    shares = (weights.double() / weights.double().sum()).flatten()
    middles = shares.cumsum(0) - shares / 2
    drawn = draw(weights.expand(vocab, vocab).contiguous(), middles)
    assert drawn.tolist() == list(range(vocab))


@pytest.mark.parametrize("vocab", [40, 600])
def test_draw_never_takes_a_token_of_weight_zero(vocab: int) -> None:
    weights = torch.zeros(4, vocab)
    weights[:, 17], weights[:, 30] = 1.0, 0.5
    uniforms = torch.tensor([0.0, 0.5, 0.9, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw(weights, uniforms).tolist() == [17, 17, 30, 30]


def test_a_broken_row_stays_in_range_and_leaves_the_others_alone() -> None:
    weights = torch.ones(3, 300)
    weights[1] = torch.nan
    uniforms = torch.full((3,), 0.5, dtype=torch.float64)
    first, broken, last = draw(weights, uniforms).tolist()
    assert first == last == 150
    assert 0 <= broken < 300


@pytest.mark.parametrize("vocab", [9, 256, 1000])
def test_total_mass_and_what_is_kept(vocab: int) -> None:
    weights = torch.rand(3, vocab, generator=torch.Generator().manual_seed(2))
    cutoff = weights[:, 4:5]
    kept = keep_from(weights, cutoff)
    assert torch.equal(kept, torch.where(weights >= cutoff, weights, 0.0))
    torch.testing.assert_close(total_mass(kept), kept.double().sum(dim=-1, keepdim=True), rtol=1e-6, atol=0)
