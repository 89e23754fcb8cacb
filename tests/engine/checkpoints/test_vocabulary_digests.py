"""The digests of embedding and head: of the values as bfloat16, and of nothing that was made of a quantized tensor."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.random_llama import save_random_llama

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.quality_manifest import MANIFEST_FILE
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.vocabulary_digests import vocabulary_digests

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def digests(path: Path) -> dict[str, str]:
    config = load_model_config(str(path))
    return dict(vocabulary_digests(str(path), config, open_checkpoint(str(path), config)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """More rows than are hashed at once."""
    save_random_llama(
        tmp_path, std=0.1, vocab_size=9000, hidden_size=8, intermediate_size=8, num_attention_heads=2
    )
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_values_as_bfloat16_are_hashed(folder: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert digests(folder) == {
        module: hashlib.sha256(
            tensors[f"{module}.weight"].to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for module in (EMBEDDING, HEAD)
    }


def test_tied_ones_are_equal(tmp_path: Path) -> None:
    save_random_llama(
        tmp_path,
        std=0.1,
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    found = digests(tmp_path)
    assert found[EMBEDDING] == found[HEAD]


def test_an_artefact_has_those_of_its_manifest(folder: Path) -> None:
    """One of an older version has none, so that copies cannot be compared with it."""
    (folder / MANIFEST_FILE).write_text('{"version": 1, "files": {}, "vocabulary_sha256": {"lm_head": "ab"}}')
    assert digests(folder) == {HEAD: "ab"}
    (folder / MANIFEST_FILE).write_text('{"version": 1, "files": {}}')
    assert digests(folder) == {}
