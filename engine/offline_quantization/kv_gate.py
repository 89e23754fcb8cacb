"""The quality gate of a KV type: one model with the KV cache in that type against its own type, on long windows.

Invariant: only the cache differs. The figures are counted over all positions, and once more over the late ones, which read the
most rounded keys and values.
"""

from dataclasses import dataclass
from typing import Final

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.errors import ModelError
from loraplex.engine.kv_cache.tensors import KV_DTYPES, kv_cache_dtype
from loraplex.engine.model_loading import load_model
from loraplex.engine.offline_quantization.quality_gate import (
    OnProgress,
    Quality,
    QualityBounds,
    WindowScorer,
    compare_scorers,
    window_size,
)
from loraplex.engine.offline_quantization.synthetic_text import sample_text

LONG_WINDOW: Final = 3072
LATE: Final = 2048
"""Late positions: after so many tokens, or in the last quarter of a shorter context."""
EVALUATED_TOKENS: Final = 2 * LONG_WINDOW
KV_BOUNDS: Final = QualityBounds(max_perplexity_ratio=1.03, min_top1_agreement=0.88, max_kl=0.03)


@dataclass(frozen=True, slots=True)
class KvQuality:
    """The figures over all positions, and over the late ones."""

    whole: Quality
    late: Quality

    def violations(self, bounds: QualityBounds) -> list[str]:
        """Describe every figure that is out of bounds; empty when the type passes."""
        late = [f"late positions: {each}" for each in self.late.violations(bounds)]
        return [*self.whole.violations(bounds), *late]


def check_kv(
    model: str,
    name: str,
    text: str | None,
    progress: OnProgress,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str = "none",
) -> KvQuality:
    """Measure `name` on a text, by default one that the model writes. Raises `ModelError`."""
    if name not in KV_DTYPES or name == "auto":
        raise ModelError(f"`check_kv` must be {', '.join(set(KV_DTYPES) - {'auto'})}, got {name!r}")
    progress(f"loading {model}")
    # The scorers allocate the KV themselves.
    cache = CacheConfig(num_blocks=1 << 20)
    loaded = load_model(
        EngineConfig(model=model, dtype=dtype, device=device, quantization=quantization, cache=cache)
    )
    size = min(LONG_WINDOW, loaded.max_model_len)
    if text is None:
        part = window_size(loaded)
        written = sample_text(loaded, -(-EVALUATED_TOKENS // part), part, 1, progress)
        ids = [token for each in written for token in each][:EVALUATED_TOKENS]
    else:
        ids = loaded.tokenizer.encode(text).ids[:EVALUATED_TOKENS]
    texts = [ids[start : start + size] for start in range(0, len(ids) - 1, size)]
    progress("judging")
    own, other = (WindowScorer(loaded, size, kv_cache_dtype(each, loaded.dtype)) for each in ("auto", name))
    tracked = progress.tracked("judging", texts)
    return KvQuality(*compare_scorers(own, other, tracked, min(LATE, size * 3 // 4)))
