"""`Checkpoint`: the tensors of a model by their Hugging Face names, read one at a time from memory-mapped files.

Invariant: only safetensors and GGUF are read; nothing here can execute what a file holds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from loraplex.engine.checkpoints.gguf_header import ROPE_FACTORS, gguf_architecture, open_gguf
from loraplex.engine.checkpoints.model_files import (
    INDEX_FILE,
    SINGLE_FILE,
    locate_model,
    shard_index,
    weight_files,
)
from loraplex.engine.errors import ModelError
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.parameters import checkpoint_modules

_EXACT_TYPES = frozenset({"F32", "F16", "BF16"})


class Checkpoint(Protocol):
    """The tensors of a model. `get` raises `ModelError` for a tensor that cannot be read; its result may share memory with
    the file.
    """

    def names(self) -> frozenset[str]: ...

    def is_exact(self, name: str) -> bool:
        """Whether `get` returns what is stored, not values made of a block-quantized tensor."""
        ...

    def get(self, name: str) -> Tensor: ...


def open_checkpoint(path: str, config: ModelConfig) -> Checkpoint:
    """Open a directory, a `.gguf` file or a hub id. Raises `ModelError`, and `UnsafeCheckpoint` for pickle."""
    model = locate_model(path)
    if model.is_file():
        return GgufCheckpoint(model, config)
    return SafetensorsCheckpoint(model)


class SafetensorsCheckpoint:
    """A directory with model.safetensors, or with shards and their index. Files stay mapped for the object's lifetime."""

    def __init__(self, folder: Path) -> None:
        self._files = {path.name: _open_safetensors(path) for path in weight_files(folder)}
        names_by_file = {file: frozenset(opened.keys()) for file, opened in self._files.items()}
        self._locations: Mapping[str, str] = (
            dict.fromkeys(names_by_file[SINGLE_FILE], SINGLE_FILE)
            if SINGLE_FILE in names_by_file
            else shard_index(folder)
        )
        for name, file in self._locations.items():
            if name not in names_by_file[file]:
                raise ModelError(f"{folder / INDEX_FILE}: tensor {name!r} is not in shard {file!r}")

    def names(self) -> frozenset[str]:
        return frozenset(self._locations)

    def is_exact(self, name: str) -> bool:
        return True

    def get(self, name: str) -> Tensor:
        from safetensors import SafetensorError

        file = self._locations[name]
        try:
            tensor: Tensor = self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{file}: tensor {name!r} cannot be read: {error}") from error
        return tensor


class GgufCheckpoint:
    """A GGUF file; block-quantized tensors are dequantized to fp32 one at a time."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        reader = open_gguf(path)
        architecture = gguf_architecture(reader)
        renamed = _hugging_face_names(architecture, config)
        self._path = path
        self._tensors: dict[str, Any] = {
            renamed.get(tensor.name, tensor.name): tensor
            for tensor in reader.tensors
            if tensor.name != ROPE_FACTORS
        }
        # llama.cpp stores q and k of this architecture with the two halves of each head interleaved.
        self._interleaved_heads = (
            {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if architecture == "llama" else {}
        )

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def is_exact(self, name: str) -> bool:
        return self._tensors[name].tensor_type.name in _EXACT_TYPES

    def get(self, name: str) -> Tensor:
        from gguf import dequantize

        stored = self._tensors[name]
        try:
            values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        except (NotImplementedError, ValueError) as error:
            kind = stored.tensor_type.name
            raise ModelError(f"{self._path}: tensor {stored.name!r} of type {kind}: {error}") from error
        heads = self._interleaved_heads.get(name.split(".")[-2])
        return values if heads is None else _split_halves(values, heads)


def _open_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from error


def _hugging_face_names(architecture: str, config: ModelConfig) -> dict[str, str]:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, config.num_layers)
    return {
        f"{table.get_name(module)}.{suffix}": f"{module}.{suffix}"
        for module in checkpoint_modules(config)
        for suffix in ("weight", "bias")
    }


def _split_halves(values: Tensor, heads: int) -> Tensor:
    """Rows (head, pair, half) -> (head, half, pair)."""
    pairs = values.shape[0] // heads // 2
    return values.reshape(heads, pairs, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
