"""`model_digest`: the content identity of a base model, a SHA-256 over its configuration and the hashes of its weight files.
`fingerprint`: what of a server decides its answers: weights, tokenizer, chat template, generation defaults, number formats.

Invariant: the same bytes give the same digest, in any folder; names and hashes are length-prefixed, so no two lists collide.
Adapters are bound to the digest alone: two servers of one digest may still send different prompt ids.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from loraplex.engine.checkpoints.model_files import INDEX_FILE, SINGLE_FILE, locate_model, weight_files
from loraplex.engine.errors import ModelError

_DOMAIN = b"loraplex model v1"
_FINGERPRINT_DOMAIN: Final = b"loraplex fingerprint v1"
TEXT_SUFFIXES: Final = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
"""Of files that transformers reads for a tokenizer of any kind, its chat templates and the generation defaults."""
TEMPLATES: Final = "additional_chat_templates"
DIGITS: Final = 16
"""Their 64 bits tell the servers of one fleet apart; adapters are bound to the whole `model_digest`."""


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
    return _hashed((_DOMAIN,), {name: bytes.fromhex(file_hash) for name, file_hash in hashes.items()})


def fingerprint(path: str, model_digest: str, settings: Mapping[str, str]) -> str:
    """Return `fp_` and 16 hex digits, as responses name a server, for a located model: a folder, or a `.gguf` file, whose digest
    covers its tokenizer too.

    `settings` are what an engine was started with, by name. Reads no weights. Raises `ModelError`.
    """
    model = Path(path)
    files = [] if model.is_file() else [*model.glob("*"), *model.glob(f"{TEMPLATES}/*")]
    parts = {f"setting:{name}": value.encode() for name, value in settings.items()}
    try:
        texts = [file for file in files if file.suffix in TEXT_SUFFIXES and file.is_file()]
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error
    parts |= {f"file:{file.relative_to(model).as_posix()}": bytes.fromhex(hash_file(file)) for file in texts}
    return f"fp_{_hashed((_FINGERPRINT_DOMAIN, bytes.fromhex(model_digest)), parts)[:DIGITS]}"


def hash_file(file: Path) -> str:
    """The SHA-256 of a file in 64 hex digits. Raises `ModelError`."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error


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


def _hashed(beginning: tuple[bytes, ...], parts: Mapping[str, bytes]) -> str:
    """Hash each piece behind its length, so that no two lists of them are hashed as the same bytes."""
    pieces = (*beginning, *(each for name, part in sorted(parts.items()) for each in (name.encode(), part)))
    return hashlib.sha256(b"".join(len(each).to_bytes(8, "big") + each for each in pieces)).hexdigest()


def _file_hash(file: Path, known: dict[str, str], used: dict[str, str]) -> str:
    try:
        state = file.stat()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    key = f"{file.resolve()}:{state.st_size}:{state.st_mtime_ns}"
    if key not in known:
        used[key] = hash_file(file)
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
