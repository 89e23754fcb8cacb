"""Writes a quantized model as a compressed-tensors checkpoint, which other engines read too, and its manifest.

Invariant: integers and scales are written unchanged, so a later load reads exactly what the quality gate measured.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loraplex.engine.checkpoints.digest import hash_file
from loraplex.engine.checkpoints.model_files import INDEX_FILE, SINGLE_FILE
from loraplex.engine.checkpoints.quality_manifest import MANIFEST_FILE, MANIFEST_VERSION
from loraplex.engine.errors import ModelError
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.parameters import Parameter, Part, decoder_parameters
from loraplex.engine.quantization.int4_packing import unpack_nibbles
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat

SHARD_BYTES = 4 << 30
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
)
"""Files that a server reads next to configuration and weights, and files that their owner wants to keep with the model."""

Weight = torch.Tensor | QuantizedWeight


def write_checkpoint(
    source: Path, folder: Path, config: ModelConfig, parameters: Iterable[tuple[str, Weight]]
) -> None:
    """Write the checkpoint. `parameters` come by the decoder's names; at most one shard of them is in memory. Raises
    `ModelError`.
    """
    known = {parameter.name: parameter for parameter in decoder_parameters(config)}
    known["lm_head"] = _head(config)
    quantized: dict[str, QuantizedWeight] = {}
    shards = _Shards(folder)
    for name, weight in parameters:
        if isinstance(weight, QuantizedWeight):
            quantized[name] = weight
        for key, tensor in _stored(known[name], weight):
            shards.add(key, tensor)
    shards.finish()
    values = dict(config.hf_config) | {"tie_word_embeddings": False}
    values["quantization_config"] = quantization_config(known, quantized)
    _write_json(folder / "config.json", values)
    for file in COPIED_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write `facts` and the SHA-256 of every file of the artefact."""
    files = {path.name: hash_file(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST_FILE}
    _write_json(folder / MANIFEST_FILE, {"version": MANIFEST_VERSION, **facts, "files": files})


def quantization_config(
    parameters: Mapping[str, Parameter], quantized: Mapping[str, QuantizedWeight]
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json: a group for all modules that are quantized alike, by their last
    names.

    Raises `ModelError` where layers differ, which none of our schemes causes.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for name, weight in quantized.items():
        kind = _scheme_of(weight)
        for part in parameters[name].parts:
            module = part.source.removesuffix(".weight").rpartition(".")[2]
            if kinds.setdefault(module, kind) != kind:
                raise ModelError(f"{module} must be quantized alike in all layers")
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for module, kind in kinds.items():
        alike = next((modules for known, modules in groups if known == kind), None)
        if alike is None:
            groups.append((kind, [module]))
        else:
            alike.append(module)
    formats = {kind["format"] for kind, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {"targets": _targets(modules, is_all=len(groups) == 1), **kind}
            for index, (kind, modules) in enumerate(groups)
        },
        "ignore": [] if "lm_head" in kinds else ["lm_head"],
    }


def _targets(modules: list[str], *, is_all: bool) -> list[str]:
    """Name modules where kinds differ: a head is a `Linear` too."""
    return ["Linear"] if is_all else [f"re:.*\\b({'|'.join(modules)})$"]


def _scheme_of(weight: QuantizedWeight) -> dict[str, Any]:
    per_channel = weight.is_per_channel
    int4 = weight.format is WeightFormat.INT4
    kind = "float" if weight.format is WeightFormat.FP8 else "int"
    weights = {
        "num_bits": 4 if int4 else 8,
        "type": kind,
        "symmetric": weight.zeros is None,
        "strategy": "channel" if per_channel else "group",
        "group_size": None if per_channel else weight.group_size,
        "dynamic": False,
        "observer": "minmax",
    }
    return {
        "format": "pack-quantized" if int4 else f"{kind}-quantized",
        "weights": weights,
        "input_activations": None if int4 else {**_ROUNDED_ROWS, "type": kind},
        "output_activations": None,
    }


_ROUNDED_ROWS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


def _head(config: ModelConfig) -> Parameter:
    return Parameter("lm_head", (Part("lm_head.weight", config.vocab_size, config.hidden_size),))


def _stored(parameter: Parameter, weight: Weight) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors of each part, by their names in a checkpoint."""
    start = 0
    for part in parameter.parts:
        rows = slice(start, start + part.rows)
        if isinstance(weight, QuantizedWeight):
            module = part.source.removesuffix(".weight")
            yield from ((f"{module}.{suffix}", tensor) for suffix, tensor in _compressed(weight, rows))
        else:
            yield part.source, weight[rows]
        start += part.rows


def _compressed(weight: QuantizedWeight, rows: slice) -> Iterator[tuple[str, torch.Tensor]]:
    scales = weight.scales.t()[rows]
    if weight.format is not WeightFormat.INT4:
        yield "weight", weight.packed[rows]
    else:
        integers = unpack_nibbles(weight.packed, weight.group_size, weight.inputs)[rows]
        yield "weight_packed", _words(integers)
        yield "weight_shape", torch.tensor(list(integers.shape), dtype=torch.int64)
        if weight.zeros is not None:
            # Zero points are packed along the outputs.
            yield "weight_zero_point", _words(weight.zeros[:, rows]).t()
    yield "weight_scale", scales


def _words(integers: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of 0..15 -> int32 [rows, ceil(columns / 8)], the first in the lowest four bits."""
    padded = torch.nn.functional.pad(integers.to(torch.int64), (0, -integers.shape[1] % 8))
    shifts = torch.arange(0, 32, 4, device=integers.device)
    words = (padded.view(padded.shape[0], -1, 8) << shifts).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


class _Shards:
    """Writes tensors into files of at most about `SHARD_BYTES`, with an index when there are several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._written: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        self._pending[name] = tensor.to("cpu").contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        self._write()
        count = len(self._written)
        if count == 1:
            self._path(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for index, shard in enumerate(self._written):
            name = f"model-{index + 1:05}-of-{count:05}.safetensors"
            self._path(index).rename(self._folder / name)
            weight_map |= dict.fromkeys(shard, name)
        index_file = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        _write_json(self._folder / INDEX_FILE, index_file)

    def _write(self) -> None:
        save_file(self._pending, self._path(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _path(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
