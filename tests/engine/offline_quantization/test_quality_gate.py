"""The gate's figures against `transformers`, and what it refuses."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.errors import ModelError
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.offline_quantization.quality_gate import (
    Quality,
    QualityBounds,
    WindowScorer,
    bounds_of,
    compare_models,
    windows,
)

TEXT = " ".join(f"w{(i * i + 7 * i) % 96}" for i in range(301))


def quantized(base: LoadedModel, scheme: str) -> LoadedModel:
    cache = CacheConfig(num_blocks=64)
    return load_model(
        EngineConfig(model=base.path, dtype="float32", device="cpu", quantization=scheme, cache=cache)
    )


def test_perplexity_is_that_of_transformers(base: LoadedModel, base_folder: Path) -> None:
    texts = windows(base, TEXT, 301)
    reference = LlamaForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    total = 0.0
    for ids in texts:
        with torch.no_grad():
            loss = reference(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
        total += float(loss) * (len(ids) - 1)
    quality = compare_models(base, base, texts)
    assert quality.tokens == sum(len(ids) - 1 for ids in texts)
    assert quality.base_perplexity == pytest.approx(math.exp(total / quality.tokens), rel=1e-4)
    assert (quality.perplexity_ratio, quality.top1_agreement) == (1.0, 1.0)
    assert quality.kl == pytest.approx(0.0, abs=1e-9)


def test_fewer_bits_lose_more(base: LoadedModel) -> None:
    texts = windows(base, TEXT, 301)
    eight, four = (compare_models(base, quantized(base, scheme), texts) for scheme in ("int8", "int4"))
    assert 0 < eight.kl < four.kl
    assert four.top1_agreement < eight.top1_agreement <= 1


def test_divergence_is_of_the_base_from_the_quantized(base: LoadedModel) -> None:
    rounded = quantized(base, "int4")
    texts = windows(base, TEXT, 301)
    total = sum(
        float((log_p.exp() * (log_p - log_q)).sum())
        for log_p, log_q in (
            (WindowScorer(base).log_probabilities(ids), WindowScorer(rounded).log_probabilities(ids))
            for ids in texts
        )
    )
    quality = compare_models(base, rounded, texts)
    assert quality.kl == pytest.approx(total / quality.tokens, rel=1e-4)


def test_bounds_name_what_was_lost_and_what_is_allowed() -> None:
    bounds = QualityBounds(max_perplexity_ratio=1.1, min_top1_agreement=0.9, max_kl=0.1)
    good = Quality(tokens=500, base_perplexity=10.0, perplexity=10.5, top1_agreement=0.95, kl=0.05)
    assert good.violations(bounds) == []
    assert "perplexity ratio is 1.2; allowed is at most 1.1" in dataclasses.replace(
        good, perplexity=12.0
    ).violations(bounds)
    assert len(dataclasses.replace(good, top1_agreement=0.5, kl=0.2).violations(bounds)) == 2


def test_a_figure_that_is_no_number_is_out_of_bounds() -> None:
    bounds = QualityBounds(max_perplexity_ratio=1.1, min_top1_agreement=0.9, max_kl=0.1)
    broken = Quality(
        tokens=500, base_perplexity=10.0, perplexity=math.nan, top1_agreement=math.nan, kl=math.nan
    )
    assert len(broken.violations(bounds)) == 3


def test_a_loss_beyond_all_floats_is_out_of_bounds(
    base: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = quantized(base, "int8")
    log_probabilities_of = WindowScorer.log_probabilities

    def broken(scorer: WindowScorer, ids: list[int]) -> torch.Tensor:
        return log_probabilities_of(scorer, ids) * (1e4 if scorer._model is rounded else 1.0)

    monkeypatch.setattr(WindowScorer, "log_probabilities", broken)
    quality = compare_models(base, rounded, windows(base, TEXT, 301))
    assert quality.perplexity == math.inf
    assert "perplexity ratio is inf; allowed is at most 1.02" in quality.violations(bounds_of("int8"))


def test_a_short_text_is_refused(base: LoadedModel) -> None:
    with pytest.raises(ModelError, match="100 tokens to predict; at least 256"):
        compare_models(base, base, [list(range(51)), list(range(51))])


def test_unknown_schemes_have_no_bounds() -> None:
    with pytest.raises(ModelError, match=r"`scheme` must be one of int8, fp8, int4, got 'int3'"):
        bounds_of("int3")
