"""The manifest of a quantized artefact: hashes of the files that the quality gate measured, and its result. Free of torch.

Invariant: a folder with a manifest serves exactly the files that were measured; a changed file is refused by name.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from loraplex.engine.checkpoints.digest import hash_file
from loraplex.engine.errors import ModelError

MANIFEST_FILE = "loraplex_quantization.json"
MANIFEST_VERSION = 1
MAX_MANIFEST_BYTES = 4 << 20

_REMEDY = f"quantize it again, or delete {MANIFEST_FILE} to serve it as a checkpoint that was never measured"


class _Manifest(msgspec.Struct):
    version: int
    files: dict[str, str]
    violations: list[str] = []
    vocabulary_sha256: dict[str, str] = {}


def recorded_vocabulary(folder: Path) -> Mapping[str, str] | None:
    """Return the digests of the unquantized embedding and head (`vocabulary_digests.py`), or None without a manifest.

    A manifest of an older version holds none. Raises `ModelError`.
    """
    path = folder / MANIFEST_FILE
    return _read(path).vocabulary_sha256 if path.is_file() else None


def check_manifest(folder: Path, hashes: Mapping[str, str]) -> None:
    """Compare a folder's files with its manifest, if it has one.

    `hashes`: SHA-256 of configuration and weights by file name, see `file_hashes`; other files are hashed here. Raises
    `ModelError`.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return
    manifest = _read(path)
    if manifest.version != MANIFEST_VERSION:
        raise ModelError(f"{path}: 'version' must be {MANIFEST_VERSION}, got {manifest.version}")
    if manifest.violations:
        raise ModelError(f"{path}: the model did not pass: {'; '.join(manifest.violations)}")
    for name in sorted(manifest.files.keys() | hashes.keys()):
        found = hashes[name] if name in hashes else _sha256(path, name)
        if manifest.files.get(name) != found:
            raise ModelError(f"{folder}: {name!r} is not the file that the quality gate measured; {_REMEDY}")


def _read(path: Path) -> _Manifest:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
        if len(content) > MAX_MANIFEST_BYTES:
            raise ModelError(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes")
        return msgspec.json.decode(content, type=_Manifest)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not a manifest: {error}") from error


def _sha256(manifest: Path, name: str) -> str | None:
    """Hash a file; None if it does not exist. Raises `ModelError` for a name that is no plain file name."""
    if Path(name).name != name:
        raise ModelError(f"{manifest}: 'files' names {name!r}: must be a plain file name")
    path = manifest.parent / name
    return hash_file(path) if path.is_file() else None
