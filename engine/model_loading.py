"""Loads a model from an `EngineConfig`: configuration, type, weights, tokenizer, and the size of its KV pool."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer

from loraplex.engine.capacity.memory_advice import format_bytes, memory_advice
from loraplex.engine.capacity.memory_plan import MemoryPlan, plan_memory
from loraplex.engine.capacity.memory_rate import memory_rate
from loraplex.engine.capacity.weight_bytes import EMBEDDINGS, HEAD, has_dense_products
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.digest import digest_of, file_hashes, fingerprint
from loraplex.engine.checkpoints.model_files import locate_model
from loraplex.engine.checkpoints.quality_manifest import check_manifest
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.vocabulary_digests import vocabulary_digests
from loraplex.engine.checkpoints.weights import decoder_state
from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.device import check_products, choose_device, choose_dtype, machine_of
from loraplex.engine.errors import ModelError
from loraplex.engine.kv_cache.tensors import block_bytes, kv_cache_dtype
from loraplex.engine.messages import EngineInfo
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.quantization.scheme import check_scheme, check_stored


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run. `max_model_len` in tokens, `num_blocks` of the KV pool.

    `memory` is the plan made before loading, `weights_bytes` what the parameters took, `memory_rate` the bytes per second
    at which the device reads them, `info` what gateways get.
    """

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
    memory: MemoryPlan
    weights_bytes: int
    memory_rate: float
    info: EngineInfo

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the weights that every step reads: of the embeddings only where they are the head, too."""
        kinds = {each.kind: each.num_bytes for each in self.memory.weights}
        return self.weights_bytes - (kinds[EMBEDDINGS] if HEAD in kinds else 0)


def load_model(
    config: EngineConfig, on_described: Callable[[EngineInfo], None] = lambda info: None
) -> LoadedModel:
    """Load `config.model`: a folder, a `.gguf` file or a hub id. `on_described` is called before the weights are read.

    Raises `ModelError`, also for a quantized artefact that was changed.
    """
    device = choose_device(config.device)
    check_scheme(config.quantization, device)
    path = str(locate_model(config.model))
    model = load_model_config(path)
    check_stored(model.compression, device)
    dtype = choose_dtype(config.dtype, checkpoint_dtype(model), device)
    kv_dtype = kv_cache_dtype(config.cache.kv_dtype, dtype)
    memory = plan_memory(model, config, machine_of(device, dtype))
    if has_dense_products(memory.weights, memory.machine.dtype):
        check_products(dtype, device)
    _check_memory(model, config, memory)
    num_blocks = _num_blocks(config.cache, memory, model, kv_dtype)
    hashes = file_hashes(path)
    check_manifest(Path(path), hashes)
    digest, max_model_len = digest_of(hashes), memory.max_model_len
    checkpoint = open_checkpoint(path, model)
    info = EngineInfo(
        model_digest=digest,
        system_fingerprint=fingerprint(path, digest, _settings(config, dtype, kv_dtype, device)),
        model_path=path,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=sorted(model.eos_token_ids),
        prefix_caching=config.cache.prefix_caching,
        vocabulary_sha256=dict(vocabulary_digests(path, model, checkpoint)),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    )
    on_described(info)
    state = decoder_state(model, checkpoint, dtype, device, config.quantization)
    weights_bytes = state.num_bytes
    return LoadedModel(
        path=path,
        digest=digest,
        config=model,
        decoder=Decoder(model, state, max_model_len, deterministic=config.deterministic),
        tokenizer=load_tokenizer(path),
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        memory=memory,
        weights_bytes=weights_bytes,
        memory_rate=memory_rate(device, weights_bytes),
        info=info,
    )


def _settings(
    config: EngineConfig, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """What of an engine's start changes the numbers that it computes."""
    return {
        "quantization": config.quantization,
        "dtype": str(dtype),
        "kv_dtype": str(kv_dtype),
        "device": device.type,
        "deterministic": str(config.deterministic),
        "loraplex": version("loraplex"),
        "torch": torch.__version__,
    }


def load_tokenizer(path: str) -> Tokenizer:
    """Load the model's fast tokenizer. Raises `ModelError` when it has none."""
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


def checkpoint_dtype(model: ModelConfig) -> str | None:
    """Return the type that the model's configuration names."""
    name = model.hf_config.get("dtype") or model.hf_config.get("torch_dtype")
    return str(name).removeprefix("torch.") if name else None


def _num_blocks(cache: CacheConfig, memory: MemoryPlan, model: ModelConfig, kv_dtype: torch.dtype) -> int:
    if cache.num_blocks is not None:
        return cache.num_blocks
    return memory.kv_bytes // block_bytes(model, cache.block_size, kv_dtype)


def _check_memory(model: ModelConfig, config: EngineConfig, memory: MemoryPlan) -> None:
    """Check the plan. A KV pool of a requested size may be smaller than the longest row: such rows are refused on arrival."""
    sized = config.cache.num_blocks is not None or config.cache.kv_bytes is not None
    is_short = memory.rows < 1 and memory.machine.is_cuda and not sized
    if memory.is_over_budget or is_short or not memory.kv_tokens:
        raise ModelError(_does_not_fit(model, config, memory))


def _does_not_fit(model: ModelConfig, config: EngineConfig, memory: MemoryPlan) -> str:
    of = "" if memory.budget is None else f" of {format_bytes(memory.budget)} that may be used"
    lower = " or ".join(advice.text for advice in memory_advice(model, config, memory))
    return (
        f"the model does not fit: {format_bytes(memory.total)}{of}, with a KV cache for {memory.kv_tokens} tokens where a row "
        f"may have {memory.context}; it takes {lower}"
    )
