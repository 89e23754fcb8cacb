"""Which folders a manifest accepts, and which it refuses."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.checkpoints.quality_manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, check_manifest
from loraplex.engine.errors import ModelError

HASHES = {"config.json": "0" * 64, "model.safetensors": "1" * 64}


def write(folder: Path, **changes: Any) -> None:
    """A manifest of a configuration, weights and a tokenizer, with other values."""
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = hashlib.sha256(b"{}").hexdigest()
    values = {"version": 1, "violations": [], "files": {**HASHES, "tokenizer.json": tokenizer}} | changes
    (folder / MANIFEST_FILE).write_text(json.dumps(values))


def test_an_unchanged_artefact_passes(tmp_path: Path) -> None:
    check_manifest(tmp_path, HASHES)
    write(tmp_path)
    (tmp_path / "README.md").write_text("not part of the model")
    check_manifest(tmp_path, HASHES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"violations": ["KL divergence is 9; allowed is at most 0.02"]}, "did not pass: KL divergence is 9"),
        ({"version": 2}, "'version' must be 1, got 2"),
        ({"files": HASHES | {"model.safetensors": "2" * 64}}, "'model.safetensors' is not the file"),
        ({"files": {"config.json": "0" * 64}}, "'model.safetensors' is not the file"),
        ({"files": HASHES | {"tokenizer.json": "2" * 64}}, "'tokenizer.json' is not the file"),
        ({"files": HASHES | {"missing.json": "2" * 64}}, "'missing.json' is not the file"),
        ({"files": HASHES | {"../secret": "2" * 64}}, "'../secret': must be a plain file name"),
        ({"files": HASHES | {"/etc/passwd": "2" * 64}}, "'/etc/passwd': must be a plain file name"),
        ({"files": HASHES | {"..": "2" * 64}}, "'..' is not the file"),
        ({"files": []}, "not a manifest: Expected `object`"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        check_manifest(tmp_path, HASHES)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b" " * (MAX_MANIFEST_BYTES + 1)])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=MANIFEST_FILE):
        check_manifest(tmp_path, HASHES)
