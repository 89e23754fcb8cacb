"""`decoder_state`: a checkpoint's tensors, checked against the configuration and stacked into the decoder's parameters.

Invariant: every parameter is filled, every tensor of the checkpoint is used or known to be derived, and none aliases a file.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from loraplex.engine.checkpoints.quantized_layout import (
    quantized_already,
    stored_by_module,
    stored_parts,
    tensor_names,
)
from loraplex.engine.checkpoints.quantized_reader import read_quantized
from loraplex.engine.checkpoints.reader import Checkpoint
from loraplex.engine.errors import ModelError
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder_state import DecoderState, Weight
from loraplex.engine.models.parameters import Parameter, Part, decoder_parameters
from loraplex.engine.quantization.checkpoint_format import StoredWeight
from loraplex.engine.quantization.quantized_weight import QuantizedWeight
from loraplex.engine.quantization.scheme import NONE, quantize_parameter

READABLE_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
_NAMED_IN_ERRORS = 8


def decoder_state(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    scheme: str = NONE,
) -> DecoderState:
    """Return the parameters by name, in `dtype` or quantized by `scheme` on `device`. Peak memory is the result plus one
    parameter.

    `embed_tokens` [V, H], `norm` [H], `lm_head` [V, H] (the same object when tied and not quantized), and per layer
    `layers.i.`: `input_norm` [H], `qkv` [q + 2kv, H], `q_norm` and `k_norm` [head_dim], `o` [H, q], `post_norm` [H],
    `gate_up` [2I, H], `down` [H, I], with `qkv_bias`, `o_bias`, `gate_up_bias`, `down_bias` where the model has them.
    Weights that the checkpoint stores quantized stay so. Raises `ModelError` naming missing, unexpected or misshapen
    tensors.
    """
    state = DecoderState()
    for name, weight in read_parameters(config, checkpoint, dtype, device):
        if not isinstance(weight, QuantizedWeight):
            state[name] = quantize_parameter(name, weight, scheme)
        elif scheme == NONE:
            state[name] = weight
        else:
            raise quantized_already(scheme)
    return state


def read_parameters(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[str, Weight]]:
    """Yield name and value of every parameter, as stored or in `dtype`; a tied head is the embedding itself.

    Raises `ModelError` as `decoder_state` does.
    """
    parameters = list(decoder_parameters(config))
    stored = stored_by_module(config, parameters)
    _check_names(config, checkpoint, parameters, stored)
    for parameter in parameters:
        weight: Weight
        if parts := stored_parts(parameter, stored):
            weight = read_quantized(checkpoint, parameter, parts, device)
        else:
            weight = _stack(checkpoint, parameter, dtype, device)
        yield parameter.name, weight
        if parameter.name == "embed_tokens" and config.tie_word_embeddings:
            yield "lm_head", weight


def _check_names(
    config: ModelConfig,
    checkpoint: Checkpoint,
    parameters: list[Parameter],
    stored: Mapping[str, StoredWeight],
) -> None:
    known = dict(
        named for parameter in parameters for part in parameter.parts for named in tensor_names(part, stored)
    )
    required = {name for name, needed in known.items() if needed}
    present = checkpoint.names()
    missing = required - present
    if missing:
        raise ModelError(f"the checkpoint lacks {_listing(missing)}, which {config.architecture} needs")
    unexpected = {name for name in present - known.keys() if not _is_derived(config, name)}
    if unexpected:
        raise ModelError(
            f"the checkpoint holds {_listing(unexpected)}, which {config.architecture} has no use for"
        )


def _is_derived(config: ModelConfig, name: str) -> bool:
    return name.endswith(_DERIVED_SUFFIX) or (config.tie_word_embeddings and name == "lm_head.weight")


def _listing(names: set[str]) -> str:
    named = ", ".join(sorted(names)[:_NAMED_IN_ERRORS])
    more = len(names) - _NAMED_IN_ERRORS
    return f"{named} and {more} more" if more > 0 else named


def _stack(
    checkpoint: Checkpoint, parameter: Parameter, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    stacked = torch.empty(parameter.shape, dtype=dtype, device=device)
    start = 0
    for part in parameter.parts:
        stacked[start : start + part.rows].copy_(_checked(checkpoint, part))
        start += part.rows
    return stacked


def _checked(checkpoint: Checkpoint, part: Part) -> Tensor:
    tensor = checkpoint.get(part.source)
    if tuple(tensor.shape) != part.shape:
        raise ModelError(f"tensor {part.source!r} must have shape {part.shape}, got {tuple(tensor.shape)}")
    if tensor.dtype not in READABLE_DTYPES:
        raise ModelError(f"tensor {part.source!r} must be a float of 16 bits or more, got {tensor.dtype}")
    return tensor
