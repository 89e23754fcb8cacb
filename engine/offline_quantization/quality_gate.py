"""The quality gate: compares a quantized model with the unquantized one on the same text, token by token.

Invariant: both see identical windows from their first token on; figures are means over all predicted tokens. Measures:
perplexity (Jelinek et al. 1977), agreement of the likeliest token, KL divergence of the two distributions.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from loraplex.engine.batch.forward_batch import ForwardBatch
from loraplex.engine.errors import ModelError
from loraplex.engine.kernels.prefill_chunks import one_chunk
from loraplex.engine.kv_cache.tensors import allocate_kv_cache
from loraplex.engine.model_loading import LoadedModel

WINDOW_TOKENS = 512
MIN_TOKENS = 256
BLOCK_SIZE = 16
Item = TypeVar("Item")


class OnProgress(Protocol):
    """Gets each stage as it begins, and in a long one the share that is done, from 0 to 1, or the items of its loop."""

    def __call__(self, stage: str, share: float | None = None) -> None: ...

    def tracked(self, stage: str, items: Collection[Item]) -> Iterator[Item]: ...


@dataclass(frozen=True, slots=True)
class QualityBounds:
    """How much a quantized model may lose. KL in nats per token."""

    max_perplexity_ratio: float
    min_top1_agreement: float
    max_kl: float


BOUNDS = {
    "int8": QualityBounds(max_perplexity_ratio=1.02, min_top1_agreement=0.90, max_kl=0.02),
    "fp8": QualityBounds(max_perplexity_ratio=1.03, min_top1_agreement=0.90, max_kl=0.03),
    "int4": QualityBounds(max_perplexity_ratio=1.15, min_top1_agreement=0.80, max_kl=0.15),
}
"""Defaults by scheme."""


def bounds_of(scheme: str) -> QualityBounds:
    """Return the default bounds of a scheme. Raises `ModelError` for a scheme without bounds."""
    if scheme not in BOUNDS:
        raise ModelError(f"`scheme` must be one of {', '.join(BOUNDS)}, got {scheme!r}")
    return BOUNDS[scheme]


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of one comparison over `tokens` predictions."""

    tokens: int
    base_perplexity: float
    perplexity: float
    top1_agreement: float
    kl: float

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity / self.base_perplexity

    def violations(self, bounds: QualityBounds) -> list[str]:
        """Describe every figure that is out of bounds; empty when the model passes."""
        checks = (
            ("perplexity ratio", self.perplexity_ratio, "at most", bounds.max_perplexity_ratio),
            ("top-1 agreement", self.top1_agreement, "at least", bounds.min_top1_agreement),
            ("KL divergence", self.kl, "at most", bounds.max_kl),
        )
        # Written so that NaN is out of bounds.
        return [
            f"{name} is {value:.4g}; allowed is {word} {bound:g}"
            for name, value, word, bound in checks
            if not (value <= bound if word == "at most" else value >= bound)
        ]


def compare_models(base: LoadedModel, quantized: LoadedModel, texts: Iterable[list[int]]) -> Quality:
    """Compare on `texts` of at most `window_size` tokens each. Raises `ModelError` if they are too few or the models do not
    match.
    """
    if base.config.vocab_size != quantized.config.vocab_size:
        raise ModelError("the two models have different vocabularies")
    return compare_scorers(WindowScorer(base), WindowScorer(quantized), texts)[0]


def compare_scorers(
    base: "WindowScorer", other: "WindowScorer", texts: Iterable[list[int]], later: int = 0
) -> tuple[Quality, Quality]:
    """Compare over all predictions, and over those after at least `later` tokens. Raises `ModelError` if they are too few."""
    totals = torch.zeros(2, 5, dtype=torch.float64)
    for ids in texts:
        expected, actual = (each.log_probabilities(ids) for each in (base, other))
        targets = torch.tensor(ids[1:], device=expected.device).unsqueeze(1)
        actual = actual.to(expected.device)
        figures = torch.stack(
            (
                torch.ones(len(ids) - 1, device=expected.device),
                -expected.gather(1, targets).squeeze(1),
                -actual.gather(1, targets).squeeze(1),
                (expected.argmax(1) == actual.argmax(1)).float(),
                F.kl_div(actual, expected, reduction="none", log_target=True).sum(1),
            )
        ).to("cpu", torch.float64)
        totals += torch.stack([figures[:, start:].sum(1) for start in (0, later)])
    return _quality(totals[0]), _quality(totals[1])


def _quality(totals: torch.Tensor) -> Quality:
    count, *sums = totals.tolist()
    if count < MIN_TOKENS:
        raise ModelError(f"the text has {count:.0f} tokens to predict; at least {MIN_TOKENS} are needed")
    base_loss, loss, agreed, divergence = (each / count for each in sums)
    return Quality(int(count), _perplexity(base_loss), _perplexity(loss), agreed, divergence)


def _perplexity(loss: float) -> float:
    """Perplexity of a mean loss in nats; infinite for the loss of a broken model that exceeds a float's range."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class WindowScorer:
    """One model with the KV of one window of `size` tokens, in `kv_dtype`; by default those of the weights' gate."""

    def __init__(
        self, model: LoadedModel, size: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> None:
        self._model = model
        self._blocks = -(-(size or window_size(model)) // BLOCK_SIZE)
        self._kv_cache = allocate_kv_cache(
            model.config, self._blocks, BLOCK_SIZE, kv_dtype or model.dtype, model.device
        )

    def log_probabilities(self, ids: list[int]) -> torch.Tensor:
        """Return [len(ids) - 1, vocabulary] float32: log-probabilities after each token but the last."""
        logits = self._model.decoder.forward(self._batch(ids[:-1]), self._kv_cache)
        return F.log_softmax(logits.float(), dim=1)

    def _batch(self, ids: list[int]) -> ForwardBatch:
        device, count = self._model.device, len(ids)
        places = torch.arange(count, device=device)
        table = torch.arange(self._blocks, dtype=torch.int32, device=device)
        return ForwardBatch(
            token_ids=torch.tensor(ids, device=device),
            positions=places,
            slots=places,
            num_decodes=0,
            decode_tables=torch.zeros(0, 1, dtype=torch.int32, device=device),
            decode_lengths=torch.zeros(0, dtype=torch.int32, device=device),
            chunks=one_chunk(count, count, table),
            sampled_tokens=None,
            num_sampled=count,
            lora=None,
            sampled_lora=None,
        )


def window_size(model: LoadedModel) -> int:
    """Return the number of tokens that are scored together."""
    return min(WINDOW_TOKENS, model.max_model_len)


def windows(model: LoadedModel, text: str, most: int) -> list[list[int]]:
    """Divide the first `most` tokens of a text into windows of `window_size`; a single last token predicts nothing."""
    ids: list[int] = model.tokenizer.encode(text).ids[:most]
    size = window_size(model)
    return [ids[start : start + size] for start in range(0, len(ids) - 1, size)]
