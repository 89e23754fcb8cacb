"""`model_digest`: the content identity of a base model, a SHA-256 over its configuration and the hashes of its weight
files.

Invariant: the same bytes give the same digest, in any folder; names and hashes are length-prefixed, so no two lists
collide.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

from loraplex.engine.checkpoints.model_files import INDEX_FILE, SINGLE_FILE, locate_model, weight_files
from loraplex.engine.errors import ModelError

_DOMAIN = b"loraplex model v1"


def model_digest(path: str, cache: Path | None = None) -> str:
    """Return 64 hex digits for a directory, a `.gguf` file or a hub id.

    `cache` names a JSON file that remembers file hashes by (path, size, mtime_ns); a damaged one is replaced. Raises
    `ModelError` or `UnsafeCheckpoint`.
    """
    return digest_of(file_hashes(path, cache))


def file_hashes(path: str, cache: Path | None = None) -> dict[str, str]:
    """SHA-256 of configuration and weights by file name (`gguf` for a `.gguf` file). Arguments and errors as for
    `model_digest`.
    """
    known = _read_cache(cache)
    used: dict[str, str] = {}
    hashes = {name: _file_hash(file, known, used) for name, file in _content(locate_model(path)).items()}
    if cache is not None and used.items() - known.items():
        _write_cache(cache, known | used)
    return hashes


def digest_of(hashes: Mapping[str, str]) -> str:
    """The digest of a model whose files have these hashes."""
    digest = hashlib.sha256(prefixed(_DOMAIN))
    for name, file_hash in sorted(hashes.items()):
        digest.update(prefixed(name.encode()) + prefixed(bytes.fromhex(file_hash)))
    return digest.hexdigest()


def _content(model: Path) -> dict[str, Path]:
    """Return the files that make up the model, by names that do not depend on their folder."""
    if model.is_file():
        return {"gguf": model}
    config = model / "config.json"
    if not config.is_file():
        raise ModelError(f"{config}: is missing")
    weights = {file.name: file for file in weight_files(model)}
    index = {} if SINGLE_FILE in weights else {INDEX_FILE: model / INDEX_FILE}
    return {"config.json": config} | index | weights


def prefixed(content: bytes) -> bytes:
    """Return the bytes behind their length, so that no two lists of them are hashed as the same bytes."""
    return len(content).to_bytes(8, "big") + content


def _file_hash(file: Path, known: dict[str, str], used: dict[str, str]) -> str:
    try:
        state = file.stat()
        key = f"{file.resolve()}:{state.st_size}:{state.st_mtime_ns}"
        if key not in known:
            with file.open("rb") as content:
                used[key] = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    return known.get(key) or used[key]


def _read_cache(cache: Path | None) -> dict[str, str]:
    if cache is None or not cache.is_file():
        return {}
    try:
        entries = json.loads(cache.read_bytes())
    except ValueError:
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: value for key, value in entries.items() if _is_hash(value)}


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _write_cache(cache: Path, entries: dict[str, str]) -> None:
    """Replace the cache file atomically, so that no process reads half of it."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=cache.parent, delete=False) as file:
        json.dump(entries, file)
    os.replace(file.name, cache)
