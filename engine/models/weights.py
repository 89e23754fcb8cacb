"""`decoder_state`: a checkpoint's tensors, checked against the configuration and stacked into the decoder's parameters.

Invariant: every parameter is filled, every tensor of the checkpoint is used or known to be derived, and none aliases a file.
"""

import torch
from torch import Tensor

from loraplex.engine.errors import ModelError
from loraplex.engine.models.checkpoint import Checkpoint
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.parameters import Parameter, Part, decoder_parameters

READABLE_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
_NAMED_IN_ERRORS = 8


def decoder_state(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Parameters by name, in `dtype` on `device`; peak memory is the result plus one tensor of the checkpoint.

    `embed_tokens` [V, H], `norm` [H], `lm_head` [V, H] (the same object when tied), and per layer `layers.i.`:
    `input_norm` [H], `qkv` [q + 2kv, H], `q_norm` and `k_norm` [head_dim], `o` [H, q], `post_norm` [H],
    `gate_up` [2I, H], `down` [H, I], with `qkv_bias`, `o_bias`, `gate_up_bias`, `down_bias` where there are any.
    Raises `ModelError` naming missing, unexpected or misshapen tensors.
    """
    parameters = list(decoder_parameters(config))
    _check_names(config, checkpoint, parameters)
    state = {parameter.name: _stack(checkpoint, parameter, dtype, device) for parameter in parameters}
    if config.tie_word_embeddings:
        state["lm_head"] = state["embed_tokens"]
    return state


def _check_names(config: ModelConfig, checkpoint: Checkpoint, parameters: list[Parameter]) -> None:
    required = {part.source for parameter in parameters for part in parameter.parts}
    present = checkpoint.names()
    missing = required - present
    if missing:
        raise ModelError(f"the checkpoint lacks {_listing(missing)}, which {config.architecture} needs")
    unexpected = {name for name in present - required if not _is_derived(config, name)}
    if unexpected:
        raise ModelError(
            f"the checkpoint holds {_listing(unexpected)}, which {config.architecture} has no use for"
        )


def _is_derived(config: ModelConfig, name: str) -> bool:
    return name.endswith(_DERIVED_SUFFIX) or (config.tie_word_embeddings and name == "lm_head.weight")


def _listing(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED_IN_ERRORS])
    more = len(names) - _NAMED_IN_ERRORS
    return f"{shown} and {more} more" if more > 0 else shown


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
