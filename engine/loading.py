"""From an `EngineConfig` to a model in memory: configuration, type, weights, tokenizer, and the size of its KV pool."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.device import choose_device, choose_dtype
from loraplex.engine.errors import ModelError
from loraplex.engine.kv_cache import block_bytes, kv_cache_dtype
from loraplex.engine.models.checkpoint import open_checkpoint
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.models.digest import model_digest
from loraplex.engine.models.model_files import locate_model
from loraplex.engine.models.pretrained import load_model_config
from loraplex.engine.models.weights import decoder_state
from loraplex.engine.quantization.scheme import check_scheme


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run. `max_model_len` in tokens, `num_blocks` of the KV pool."""

    path: str
    digest: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    max_model_len: int
    num_blocks: int


def load_model(config: EngineConfig) -> LoadedModel:
    """Load `config.model`: a folder, a `.gguf` file or a hub id. Raises `ModelError`."""
    device = choose_device(config.device)
    check_scheme(config.quantization, device)
    path = str(locate_model(config.model))
    model = load_model_config(path)
    dtype = choose_dtype(config.dtype, _checkpoint_dtype(model), device)
    kv_dtype = kv_cache_dtype(config.cache.kv_dtype, dtype)
    num_blocks = _num_blocks(config.cache, model, kv_dtype)
    max_model_len = _max_model_len(config, model, num_blocks)
    state = decoder_state(model, open_checkpoint(path, model), dtype, device, config.quantization)
    return LoadedModel(
        path=path,
        digest=model_digest(path),
        config=model,
        decoder=Decoder(model, state, max_model_len),
        tokenizer=load_tokenizer(path),
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
    )


def load_tokenizer(path: str) -> Tokenizer:
    """The model's fast tokenizer. Raises `ModelError` when it has none."""
    file = Path(path) / "tokenizer.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer

    options = {"gguf_file": Path(path).name} if path.endswith(".gguf") else {}
    folder = str(Path(path).parent) if options else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: no tokenizer can be read: {error}") from error
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{path}: only fast tokenizers (tokenizer.json) are supported")
    return backend


def _checkpoint_dtype(model: ModelConfig) -> str | None:
    name = model.hf_config.get("dtype") or model.hf_config.get("torch_dtype")
    return str(name).removeprefix("torch.") if name else None


def _num_blocks(cache: CacheConfig, model: ModelConfig, kv_dtype: torch.dtype) -> int:
    if cache.num_blocks is not None:
        return cache.num_blocks
    count = cache.kv_bytes // block_bytes(model, cache.block_size, kv_dtype)
    if count < 1:
        raise ModelError(f"`kv_bytes` {cache.kv_bytes} holds not even one block of {cache.block_size} tokens")
    return count


def _max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """What was asked for, else what the model was made for and the KV pool can hold of one sequence."""
    if config.max_model_len is None:
        return min(model.max_position_embeddings, num_blocks * config.cache.block_size)
    if not 1 <= config.max_model_len <= model.max_position_embeddings:
        raise ModelError(
            f"`max_model_len` must lie in 1..{model.max_position_embeddings}, got {config.max_model_len}"
        )
    return config.max_model_len
