"""A model of random weights at a real shape, made on the device, in the engine as it serves: no weights can be had."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tests.benchmarks.kernels.shapes import LayerShape
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from loraplex.engine.capacity.memory_plan import Machine, plan_memory
from loraplex.engine.capacity.memory_rate import memory_rate
from loraplex.engine.checkpoints.config_reader import normalise_config
from loraplex.engine.config import EngineConfig
from loraplex.engine.device import machine_of
from loraplex.engine.fake_engine import DEFAULT_INFO
from loraplex.engine.model_loading import LoadedModel
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.models.decoder_state import DecoderState, Weight
from loraplex.engine.models.parameters import Parameter, decoder_parameters
from loraplex.engine.quantization.quantized_weight import QuantizedWeight
from loraplex.engine.quantization.scheme import quantize_parameter

MAX_LENGTH = 2048
MAX_POSITIONS = 16_384
"""Longer than Llama-3's 8,192: a prompt of 8,192 tokens has an answer behind it."""


@dataclass(frozen=True, slots=True)
class RandomModel:
    """`streamed_bytes`: the weights that a step reads."""

    loaded: LoadedModel
    streamed_bytes: int
    scheme: str


def model_config(shape: LayerShape) -> ModelConfig:
    """As config.json of a Llama of this shape is read."""
    return normalise_config(hugging_face_config(shape))


def hugging_face_config(shape: LayerShape) -> dict[str, Any]:
    """The fields of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }


def random_model(
    shape: LayerShape, scheme: str, device: torch.device, max_length: int = MAX_LENGTH
) -> RandomModel:
    """Weights that keep the values of a step's rows near 1, quantized as a checkpoint's would be.

    For Llama-3-8B on an H100: 16 GB drawn in 0.2 s, quantized in 1,900 blocks of 20 launches in a second.
    """
    config, dtype = model_config(shape), torch.bfloat16
    weights = (
        (parameter.name, quantize_parameter(parameter.name, weight, scheme))
        for parameter, weight in drawn_parameters(config, dtype, device)
    )
    return loaded_model(shape, scheme, weights, machine_of(device, dtype), max_length)


def loaded_model(
    shape: LayerShape,
    scheme: str,
    weights: Iterable[tuple[str, Weight]],
    machine: Machine,
    max_length: int = MAX_LENGTH,
) -> RandomModel:
    """The model of these parameters, for rows of at most `max_length` tokens."""
    config, dtype = model_config(shape), torch.bfloat16
    asked = EngineConfig(model=f"random {shape.name}", quantization=scheme, max_model_len=max_length)
    memory = plan_memory(config, asked, machine)
    state = DecoderState()
    streamed = 0
    for name, stored in weights:
        state[name] = stored
        streamed += 0 if name == "embed_tokens" else _bytes(stored)
    weights_bytes = state.num_bytes
    decoder = Decoder(config, state, max_length)
    loaded = LoadedModel(
        path=asked.model,
        digest=f"{shape.name} {scheme}",
        config=config,
        decoder=decoder,
        tokenizer=Tokenizer(WordLevel({"a": 0}, unk_token="a")),
        dtype=dtype,
        kv_dtype=dtype,
        device=decoder.device,
        max_model_len=max_length,
        num_blocks=1,
        memory=memory,
        weights_bytes=weights_bytes,
        memory_rate=memory_rate(decoder.device, weights_bytes),
        info=DEFAULT_INFO,
    )
    return RandomModel(loaded, streamed, scheme)


def drawn_parameters(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Parameter, torch.Tensor]]:
    """The same values whenever it is called for a device."""
    generator = torch.Generator(device).manual_seed(0)
    for parameter in decoder_parameters(config):
        yield parameter, _drawn(parameter, dtype, device, generator)


def _drawn(
    parameter: Parameter, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    if len(parameter.shape) == 1:
        return torch.ones(parameter.shape, dtype=dtype, device=device)
    values = torch.randn(parameter.shape, dtype=dtype, device=device, generator=generator)
    return values.mul_(parameter.shape[1] ** -0.5)


def _bytes(weight: Weight) -> int:
    return weight.num_bytes if isinstance(weight, QuantizedWeight) else weight.numel() * weight.element_size()
