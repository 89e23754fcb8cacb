"""Quantized, written, loaded again, judged: what lies on disk afterwards, and what does not."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CompressedTensorsConfig, LlamaForCausalLM

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.errors import ModelError
from loraplex.engine.loading import LoadedModel, load_model
from loraplex.engine.models.checkpoint import open_checkpoint
from loraplex.engine.models.pretrained import load_model_config
from loraplex.engine.models.weights import decoder_state
from loraplex.engine.quantization.weight import QuantizedWeight, dequantize
from loraplex.engine.release.artefact import MANIFEST_FILE
from loraplex.engine.release.quality import QualityBounds, compare_models, windows
from loraplex.engine.release.quantized_release import ReleaseRequest, release_quantized

ANYTHING = QualityBounds(max_perplexity_ratio=100.0, min_top1_agreement=0.0, max_kl=100.0)
TEXT = " ".join(f"w{(i * i + 7 * i) % 96}" for i in range(301))


@pytest.fixture
def request_for(base_folder: Path, tmp_path: Path) -> ReleaseRequest:
    return ReleaseRequest(
        model=str(base_folder),
        folder=tmp_path / "out",
        scheme="int8",
        text=TEXT,
        bounds=ANYTHING,
        dtype="float32",
        device="cpu",
    )


def load(folder: Path) -> LoadedModel:
    settings = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", cache=CacheConfig(num_blocks=64)
    )
    return load_model(settings)


def silent(stage: str) -> None:
    assert stage


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_artefact_is_what_was_judged(base: LoadedModel, request_for: ReleaseRequest, scheme: str) -> None:
    release = release_quantized(replace(request_for, scheme=scheme), silent)
    assert release.violations == []
    again = compare_models(base, load(request_for.folder), windows(base, TEXT, 301))
    assert again == release.quality
    assert release.bytes_after < release.bytes_before
    held = {path.name for path in request_for.folder.iterdir()}
    assert held >= {"config.json", "model.safetensors", "tokenizer.json", "LICENSE", MANIFEST_FILE}


def test_the_manifest_names_source_figures_and_files(base: LoadedModel, request_for: ReleaseRequest) -> None:
    release = release_quantized(request_for, silent)
    manifest = json.loads((request_for.folder / MANIFEST_FILE).read_text())
    assert manifest["source_digest"] == base.digest and manifest["scheme"] == "int8"
    assert manifest["quality"]["kl"] == release.quality.kl
    assert manifest["bounds"]["max_kl"] == ANYTHING.max_kl
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((request_for.folder / name).read_bytes()).hexdigest() == digest


def test_a_model_that_loses_too_much_leaves_nothing(request_for: ReleaseRequest) -> None:
    strict = replace(ANYTHING, max_kl=0.0)
    release = release_quantized(replace(request_for, scheme="int4", bounds=strict), silent)
    assert len(release.violations) == 1 and "KL divergence" in release.violations[0]
    assert list(request_for.folder.parent.iterdir()) == []


def test_without_a_text_the_model_writes_its_own(request_for: ReleaseRequest) -> None:
    stages: list[str] = []
    release = release_quantized(replace(request_for, text=None), stages.append)
    assert "writing a text to judge by" in stages
    assert release.quality.tokens > 4000
    assert json.loads((request_for.folder / MANIFEST_FILE).read_text())["text_sha256"] is None


def test_a_quantized_model_is_not_quantized_again(request_for: ReleaseRequest) -> None:
    release_quantized(request_for, silent)
    again = replace(request_for, model=str(request_for.folder), folder=request_for.folder.parent / "again")
    with pytest.raises(ModelError, match="quantized already"):
        release_quantized(again, silent)
    assert [path.name for path in request_for.folder.parent.iterdir()] == ["out"]


def test_a_folder_that_exists_is_never_touched(request_for: ReleaseRequest) -> None:
    request_for.folder.mkdir()
    with pytest.raises(ModelError, match="exists already"):
        release_quantized(request_for, silent)
    assert list(request_for.folder.iterdir()) == []


def test_an_unknown_scheme_is_refused(request_for: ReleaseRequest) -> None:
    with pytest.raises(ModelError, match="int8, int4"):
        release_quantized(replace(request_for, scheme="int2"), silent)


@pytest.mark.parametrize(("scheme", "names"), [("int8", ("down", "lm_head")), ("int4", ("down",))])
def test_transformers_reads_the_same_weights(
    request_for: ReleaseRequest, scheme: str, names: tuple[str, ...]
) -> None:
    """All but the head of int4, which has 8 bits: `transformers` knows one format for all of a model."""
    release_quantized(replace(request_for, scheme=scheme), silent)
    model = LlamaForCausalLM.from_pretrained(
        request_for.folder,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
        dtype=torch.float32,
    )
    config = load_model_config(str(request_for.folder))
    state = decoder_state(config, open_checkpoint(str(request_for.folder), config), torch.float32)
    modules = {"down": model.model.layers[1].mlp.down_proj, "lm_head": model.lm_head}
    for name in names:
        ours = state[name if name == "lm_head" else f"layers.1.{name}"]
        assert isinstance(ours, QuantizedWeight)
        # It multiplies in bfloat16.
        torch.testing.assert_close(modules[name].weight, dequantize(ours), rtol=2**-7, atol=0.0)
