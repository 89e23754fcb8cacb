"""Rotary position tables (Su et al. 2021) with the frequencies of `transformers`' own initialisers.

Invariant: the frequencies depend on the longest sequence served, never on a request, because cached keys contain the
rotation. Plain rope, which most models have, is computed without loading `transformers`: that takes seconds of a start.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loraplex.engine.errors import ModelError
from loraplex.engine.models.config import ModelConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def rope_tables(config: ModelConfig, max_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each fp32 [max_len, rotary_dim / 2], with the attention scaling applied.

    Row p rotates position p: pair j is (x[j], x[j + rotary_dim / 2]); with a partial rotary factor the components from
    `rotary_dim` on pass unrotated. `longrope` takes its long factors for all positions as soon as `max_len`
    exceeds the original length, and its short ones otherwise. `dynamic` is exact only up to `max_position_embeddings`,
    beyond which its frequencies would change with every token: a longer `max_len` raises `ModelError`.
    """
    frequencies, scaling = _frequencies(config, max_len)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    return angles.cos() * scaling, angles.sin() * scaling


def _frequencies(config: ModelConfig, max_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies fp32 [rotary_dim / 2] and the factor on cosine and sine."""
    configuration, rope = None, _plain_rope(config.hf_config)
    if rope is None:
        configuration, rope = _transformers_configuration(config)
    rope_type = rope.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"config.json: rope type must be one of {', '.join(ROPE_TYPES)}, got {rope_type!r}")
    if rope_type == "dynamic" and max_len > config.max_position_embeddings:
        raise ModelError(
            f"max_model_len must be at most {config.max_position_embeddings} with dynamic rope, got {max_len}"
        )
    try:
        if rope_type == "default":
            frequencies, scaling = _default_frequencies(rope["rope_theta"], _rotary_dim(config, rope)), 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](configuration, "cpu", seq_len=max_len)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise ModelError(
            f"config.json: 'rope_parameters' of type {rope_type!r} are not valid: {error}"
        ) from error
    if 2 * frequencies.shape[0] != _rotary_dim(config, rope) or not bool(torch.isfinite(frequencies).all()):
        raise ModelError(
            f"config.json: 'rope_parameters' of type {rope_type!r} do not fit head_dim {config.head_dim}"
        )
    return frequencies.float(), float(scaling)


def _plain_rope(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters of a config.json that states plain rope in full, in the newer or the older spelling; else None."""
    rope = values.get("rope_parameters")
    if rope is None and values.get("rope_scaling") is None:
        rope = {"rope_type": "default", "rope_theta": values.get("rope_theta")}
    is_plain = (
        isinstance(rope, dict)
        and rope.keys() == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
        and type(rope["rope_theta"]) in (int, float)
        and "partial_rotary_factor" not in values
    )
    return rope if is_plain else None


def _transformers_configuration(config: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """Return the `transformers` configuration object, which reads every older spelling, and its flat rope parameters."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # A copy, since the configuration object completes the nested rope parameters in place.
    values = copy.deepcopy({**config.hf_config, "head_dim": config.head_dim})
    try:
        configuration = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise ModelError(f"config.json: refused by transformers: {error}") from error
    rope = configuration.rope_parameters
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        raise ModelError("config.json: 'rope_parameters' must be one set of parameters for all layers")
    return configuration, rope


def _rotary_dim(config: ModelConfig, rope: dict[str, Any]) -> int:
    rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= config.head_dim:
        raise ModelError(
            f"config.json: 'partial_rotary_factor' must rotate an even part of head_dim {config.head_dim}, "
            f"got {rope.get('partial_rotary_factor')!r}"
        )
    return rotary_dim


def _default_frequencies(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return 1.0 / (theta**exponents)
