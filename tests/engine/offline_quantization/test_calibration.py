"""Moments of what every projection sees, without changing what the model computes."""

import torch

from loraplex.engine.model_loading import LoadedModel
from loraplex.engine.offline_quantization.calibration import watched
from loraplex.engine.offline_quantization.quality_gate import WindowScorer

IDS = [3 * i % 96 for i in range(40)]


def test_every_projection_is_watched_and_nothing_changes(base: LoadedModel) -> None:
    scorer = WindowScorer(base)
    before = scorer.log_probabilities(IDS)
    with watched(base.decoder) as moments:
        during = scorer.log_probabilities(IDS)
    assert torch.equal(before, during)
    names = {f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "o", "gate_up", "down")}
    assert set(moments.sums) == names
    assert all(torch.equal(sums, sums.t()) for sums in moments.sums.values())
    assert moments.sums["layers.0.down"].shape == (256, 256)
    # 39 rows of RMS-normalised values, each of about its number of inputs.
    trace = float(moments.sums["layers.0.qkv"].diagonal().sum())
    assert abs(trace / (39 * 96) - 1) < 0.05


def test_it_ends_with_the_context(base: LoadedModel) -> None:
    with watched(base.decoder) as moments:
        pass
    WindowScorer(base).log_probabilities(IDS)
    assert moments.sums == {}


def test_moments_add_up(base: LoadedModel) -> None:
    scorer = WindowScorer(base)
    with watched(base.decoder) as once:
        scorer.log_probabilities(IDS)
    with watched(base.decoder) as twice:
        scorer.log_probabilities(IDS)
        scorer.log_probabilities(IDS)
    torch.testing.assert_close(twice.sums["layers.1.o"], 2 * once.sums["layers.1.o"])
