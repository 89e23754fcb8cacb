"""`quantize_model`: quantizes a model, writes it, loads it again and measures it; it gets its name only if the gate passes.

Invariant: the measured files are the files on disk; a model that fails leaves nothing behind.
"""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex

import torch
from safetensors import SafetensorError

from loraplex.engine.checkpoints.model_files import weight_files
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.weights import read_parameters
from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.errors import ModelError
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.offline_quantization.calibration import InputMoments, watched
from loraplex.engine.offline_quantization.checkpoint_writer import write_checkpoint, write_manifest
from loraplex.engine.offline_quantization.quality_gate import (
    OnProgress,
    Quality,
    QualityBounds,
    WindowScorer,
    compare_models,
    window_size,
    windows,
)
from loraplex.engine.offline_quantization.synthetic_text import sample_text
from loraplex.engine.quantization.quantized_weight import QuantizedWeight
from loraplex.engine.quantization.scheme import NONE, SCHEMES, quantize_parameter

CALIBRATED = frozenset({"int4"})
"""Schemes whose rounding is fitted to a text if there is one; int8 loses too little for it to matter."""
CALIBRATION_TOKENS = 8_192
EVALUATED_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """What to quantize, the text for the quality gate (None: the model writes one), and a text that int4 is fitted to, if
    any.
    """

    model: str
    folder: Path
    scheme: str
    text: str | None
    bounds: QualityBounds
    calibration: str | None = None
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """The outcome. `violations` empty: the artefact is in its folder."""

    quality: Quality
    violations: list[str]
    bytes_before: int
    bytes_after: int


def quantize_model(request: QuantizeJob, progress: OnProgress) -> QuantizedModel:
    """Quantize, write, load and measure a model. Raises `ModelError` for an unusable model, folder or text."""
    _check(request)
    progress(f"loading {request.model}")
    base = load_model(_config(request, request.model))
    source = Path(base.path)
    if not source.is_dir():
        raise ModelError(
            f"{request.model}: a GGUF file is quantized already; give the folder it was made from"
        )
    with _draft(request.folder) as draft:
        texts = _evaluation_texts(base, request, progress)
        moments = _moments(base, request, progress)
        progress(f"rounding to {request.scheme}")
        write_checkpoint(source, draft, base.config, _rounded(base, request.scheme, moments))
        progress("judging")
        rounded = load_model(_config(request, str(draft)))
        quality = compare_models(base, rounded, progress.tracked("judging", texts))
        violations = quality.violations(request.bounds)
        before, after = (_weight_bytes(folder) for folder in (source, draft))
        if not violations:
            write_manifest(draft, _facts(base, request, quality, violations))
            _check_is_free(request.folder)
            draft.rename(request.folder)
        return QuantizedModel(quality, violations, before, after)


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """Yield a draft folder next to `folder`; it is deleted afterwards unless it was renamed. Raises `ModelError` if not
    writable.
    """
    draft = folder.parent / f".{folder.name}-{token_hex(8)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        yield draft
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check(request: QuantizeJob) -> None:
    if request.scheme not in SCHEMES or request.scheme == NONE:
        allowed = ", ".join(scheme for scheme in SCHEMES if scheme != NONE)
        raise ModelError(f"`scheme` must be one of {allowed}, got {request.scheme!r}")
    _check_is_free(request.folder)


def _check_is_free(folder: Path) -> None:
    # A link that leads nowhere counts too: no folder can take its name.
    if os.path.lexists(folder):
        raise ModelError(f"{folder} exists already")


def _config(request: QuantizeJob, model: str) -> EngineConfig:
    return EngineConfig(
        model=model, dtype=request.dtype, device=request.device, cache=CacheConfig(num_blocks=1 << 20)
    )


def _stored(base: LoadedModel) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    checkpoint = open_checkpoint(base.path, base.config)
    return read_parameters(base.config, checkpoint, base.dtype, base.device)


def _rounded(
    base: LoadedModel, scheme: str, moments: InputMoments
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    for name, weight in _stored(base):
        if isinstance(weight, QuantizedWeight):
            raise ModelError(f"parameter {name!r} is quantized already")
        yield name, quantize_parameter(name, weight, scheme, moments.sums.pop(name, None))


def _moments(base: LoadedModel, request: QuantizeJob, progress: OnProgress) -> InputMoments:
    if request.scheme not in CALIBRATED or request.calibration is None:
        return InputMoments()
    texts = windows(base, request.calibration, CALIBRATION_TOKENS)
    scorer = WindowScorer(base)
    with watched(base.decoder) as moments:
        for ids in progress.tracked("calibrating", texts):
            scorer.log_probabilities(ids)
    return moments


def _evaluation_texts(base: LoadedModel, request: QuantizeJob, progress: OnProgress) -> list[list[int]]:
    if request.text is not None:
        return windows(base, request.text, EVALUATED_TOKENS)
    size = window_size(base)
    return sample_text(base, -(-EVALUATED_TOKENS // size), size, 1, progress)


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def _facts(
    base: LoadedModel, request: QuantizeJob, quality: Quality, violations: list[str]
) -> dict[str, object]:
    return {
        "loraplex": version("loraplex"),
        "scheme": request.scheme,
        "source_digest": base.digest,
        "dtype": str(base.dtype).removeprefix("torch."),
        "vocabulary_sha256": base.info.vocabulary_sha256,
        "text_sha256": _text_digest(request.text),
        "calibration_sha256": _text_digest(request.calibration),
        "quality": dataclasses.asdict(quality),
        "bounds": dataclasses.asdict(request.bounds),
        "violations": violations,
    }


def _text_digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()
