"""Finds the files of a model: where it lies and which files hold its weights.

Invariant: only files named by a plain file name inside the folder are returned, and pickle never is.
"""

import json
import re
from pathlib import Path

from loraplex.engine.errors import ModelError, UnsafeCheckpoint

GGUF_SUFFIX = ".gguf"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
"""What is fetched from the hub: weights as safetensors only, never pickle, never code."""
HUB_REPEATS = ["*/*", "consolidated*"]
"""Sub-folders and `consolidated*` repeat the weights in other layouts."""

_PICKLE_REASON = "pickle can run code while it is read; convert the checkpoint to safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
SHARD_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors")


def locate_model(path: str) -> Path:
    """A directory or `.gguf` file as it is; a hub id (`owner/name`, `owner/name@revision`) through the hub's cache.

    Raises `ModelError`.
    """
    return local_model(path) or download_model(path)


def local_model(path: str) -> Path | None:
    """A directory or `.gguf` file as it is; None for a hub id, which is not looked up. Raises `ModelError`."""
    local = Path(path)
    if local.is_dir() or (local.is_file() and local.suffix == GGUF_SUFFIX):
        return local
    if local.is_file():
        raise _unreadable_file(local)
    if _HUB_ID.fullmatch(path) is None:
        raise ModelError(f"model {path!r}: neither a directory, nor a .gguf file, nor a hub id 'owner/name'")
    return None


def download_model(model_id: str, *, cache_dir: Path | None = None, offline: bool = False) -> Path:
    """Fetch a model of the Hugging Face hub into its cache; return the folder of the snapshot of `owner/name` or `owner/name@revision`.

    With `offline` only the cache is used. Raises `ModelError` when the model is not available.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    name, _, revision = model_id.partition("@")
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            cache_dir=cache_dir,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_REPEATS,
            local_files_only=offline,
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {model_id!r}: no such folder, and not to be had from the hub: {reason}"
        ) from error
    return Path(folder)


def weight_files(model: Path) -> tuple[Path, ...]:
    """The files that hold the weights of a located model, sorted by name.

    Raises `UnsafeCheckpoint` for a folder with nothing but pickle, `ModelError` for one without weights.
    """
    if model.is_file():
        return (model,)
    if (model / SINGLE_FILE).is_file():
        return (model / SINGLE_FILE,)
    if (model / INDEX_FILE).is_file():
        return tuple(model / name for name in sorted(set(shard_index(model).values())))
    raise _no_weights(model)


def shard_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from model.safetensors.index.json. Raises `ModelError`."""
    path = folder / INDEX_FILE
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise ModelError(f"{path}: larger than {MAX_INDEX_BYTES} bytes")
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{path}: 'weight_map' must be a non-empty object")
    for tensor, name in shards.items():
        if not isinstance(name, str) or SHARD_NAME.fullmatch(name) is None:
            raise ModelError(
                f"{path}: 'weight_map' gives {name!r} for {tensor!r}: must be a plain *.safetensors file name"
            )
        if not (folder / name).is_file():
            raise ModelError(f"{path}: shard {name!r} is missing")
    return shards


def _unreadable_file(path: Path) -> ModelError:
    if path.suffix in PICKLE_SUFFIXES:
        return UnsafeCheckpoint(f"{path}: {_PICKLE_REASON}")
    return ModelError(
        f"{path}: a single file must be a .gguf file; for safetensors give the model's directory"
    )


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        return UnsafeCheckpoint(f"{folder}: holds only {', '.join(pickles[:4])}: {_PICKLE_REASON}")
    return ModelError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
