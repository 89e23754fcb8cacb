"""Quantize, write, load, measure: which files are on disk afterwards, and which are not."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from rich.console import Console
from safetensors.torch import load_file
from transformers import CompressedTensorsConfig, LlamaForCausalLM

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.quality_manifest import MANIFEST_FILE
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.weights import decoder_state
from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.errors import ModelError
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.models.decoder_state import DecoderState, Weight
from loraplex.engine.offline_quantization.quality_gate import QualityBounds, compare_models, windows
from loraplex.engine.offline_quantization.quantize_model import QuantizeJob, quantize_model
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, dequantize
from loraplex.platform.processes.progress import SILENT, Progress

ANYTHING = QualityBounds(max_perplexity_ratio=100.0, min_top1_agreement=0.0, max_kl=100.0)
TEXT = " ".join(f"w{(i * i + 7 * i) % 96}" for i in range(301))


@pytest.fixture
def request_for(base_folder: Path, tmp_path: Path) -> QuantizeJob:
    return QuantizeJob(
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


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_the_artefact_is_what_was_measured(base: LoadedModel, request_for: QuantizeJob, scheme: str) -> None:
    release = quantize_model(replace(request_for, scheme=scheme), SILENT)
    assert release.violations == []
    again = compare_models(base, load(request_for.folder), windows(base, TEXT, 301))
    assert again == release.quality
    assert release.bytes_after < release.bytes_before
    held = {path.name for path in request_for.folder.iterdir()}
    assert held >= {"config.json", "model.safetensors", "tokenizer.json", "LICENSE", MANIFEST_FILE}


def test_the_manifest_names_source_figures_and_files(base: LoadedModel, request_for: QuantizeJob) -> None:
    release = quantize_model(request_for, SILENT)
    manifest = json.loads((request_for.folder / MANIFEST_FILE).read_text())
    assert manifest["source_digest"] == base.digest and manifest["scheme"] == "int8"
    assert manifest["quality"]["kl"] == release.quality.kl
    assert manifest["bounds"]["max_kl"] == ANYTHING.max_kl
    assert (
        manifest["vocabulary_sha256"]
        == base.info.vocabulary_sha256
        == load(request_for.folder).info.vocabulary_sha256
    )
    assert base.info.vocabulary_sha256.keys() == {"model.embed_tokens", "lm_head"}
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((request_for.folder / name).read_bytes()).hexdigest() == digest


def test_an_artefact_is_served_as_it_was_measured_or_not_at_all(request_for: QuantizeJob) -> None:
    quantize_model(request_for, SILENT)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "LICENSE"):
        file = request_for.folder / name
        measured = file.read_bytes()
        # A line's end becomes a tab, which is as good in JSON.
        file.write_bytes(measured[:-1] + bytes([measured[-1] ^ 3]))
        with pytest.raises(ModelError, match=f"'{name}' is not the file that the quality gate measured"):
            load(request_for.folder)
        file.write_bytes(measured)
    load(request_for.folder)


def test_weights_that_are_not_the_models_do_not_count(
    base_folder: Path, request_for: QuantizeJob, tmp_path: Path
) -> None:
    """Some owners put the same weights beside the model's, in a layout of their own."""
    twice = tmp_path / "twice"
    shutil.copytree(base_folder, twice)
    shutil.copyfile(twice / "model.safetensors", twice / "consolidated.safetensors")
    release = quantize_model(replace(request_for, model=str(twice)), SILENT)
    assert release.bytes_before == (base_folder / "model.safetensors").stat().st_size


def test_a_model_that_loses_too_much_leaves_nothing(request_for: QuantizeJob) -> None:
    strict = replace(ANYTHING, max_kl=0.0)
    release = quantize_model(replace(request_for, scheme="int4", bounds=strict), SILENT)
    assert len(release.violations) == 1 and "KL divergence" in release.violations[0]
    assert list(request_for.folder.parent.iterdir()) == []


def test_int4_is_fitted_to_a_text_where_there_is_one(request_for: QuantizeJob) -> None:
    plain = quantize_model(replace(request_for, scheme="int4"), SILENT)
    words = " ".join(f"w{(i * i + 3 * i) % 96}" for i in range(2000))
    fitted_folder = request_for.folder.parent / "fitted"
    fitted = quantize_model(
        replace(request_for, scheme="int4", folder=fitted_folder, calibration=words), SILENT
    )
    assert fitted.quality != plain.quality and fitted.bytes_after == plain.bytes_after
    manifest = json.loads((fitted_folder / MANIFEST_FILE).read_text())
    assert manifest["calibration_sha256"] == hashlib.sha256(words.encode()).hexdigest()


def test_without_a_text_the_model_writes_its_own(request_for: QuantizeJob) -> None:
    stages: dict[str, float | None] = {}

    class Recorded(Progress):
        def __call__(self, stage: str, share: float | None = None) -> None:
            stages[stage] = share

    release = quantize_model(replace(request_for, text=None), Recorded(Console(quiet=True)))
    assert stages["writing a text for the quality gate"] == 1.0 and 0 < (stages["judging"] or 0) < 1
    assert release.quality.tokens > 4000
    assert json.loads((request_for.folder / MANIFEST_FILE).read_text())["text_sha256"] is None


def test_a_quantized_model_is_not_quantized_again(request_for: QuantizeJob) -> None:
    quantize_model(request_for, SILENT)
    again = replace(request_for, model=str(request_for.folder), folder=request_for.folder.parent / "again")
    with pytest.raises(ModelError, match="quantized already"):
        quantize_model(again, SILENT)
    assert [path.name for path in request_for.folder.parent.iterdir()] == ["out"]


def test_a_folder_that_exists_is_never_touched(request_for: QuantizeJob) -> None:
    request_for.folder.mkdir()
    with pytest.raises(ModelError, match="exists already"):
        quantize_model(request_for, SILENT)
    assert list(request_for.folder.iterdir()) == []


def test_a_link_that_leads_nowhere_is_never_touched(request_for: QuantizeJob, tmp_path: Path) -> None:
    request_for.folder.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="exists already"):
        quantize_model(request_for, SILENT)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_created_meanwhile_is_never_touched(request_for: QuantizeJob) -> None:
    class Meddling(Progress):
        def __call__(self, stage: str, share: float | None = None) -> None:
            if stage == "judging" and share is None:
                request_for.folder.mkdir()

    with pytest.raises(ModelError, match="exists already"):
        quantize_model(request_for, Meddling(Console(quiet=True)))
    assert list(request_for.folder.parent.iterdir()) == [request_for.folder]
    assert list(request_for.folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_reported(request_for: QuantizeJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"file/out: cannot be written"):
        quantize_model(replace(request_for, folder=tmp_path / "file" / "out"), SILENT)


def test_who_may_read_it_is_the_owners_choice(request_for: QuantizeJob) -> None:
    before = os.umask(0o077)
    try:
        quantize_model(request_for, SILENT)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o077 for path in (request_for.folder, *request_for.folder.iterdir())} == {
        0
    }


def test_an_unknown_scheme_is_refused(request_for: QuantizeJob) -> None:
    with pytest.raises(ModelError, match="int8, int4"):
        quantize_model(replace(request_for, scheme="int2"), SILENT)


def test_transformers_reads_the_same_weights(request_for: QuantizeJob) -> None:
    quantize_model(request_for, SILENT)
    model = LlamaForCausalLM.from_pretrained(
        request_for.folder,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
        dtype=torch.float32,
    )
    state = state_of(request_for.folder)
    for module, name in ((model.model.layers[1].mlp.down_proj, "layers.1.down"), (model.lm_head, "lm_head")):
        check_same(module.weight, state[name])


def test_compressed_tensors_reads_the_same_int4_weights(request_for: QuantizeJob) -> None:
    """The package itself: `transformers` knows one format for all of a model, and this head has 8 bits."""
    quantize_model(replace(request_for, scheme="int4"), SILENT)
    config = json.loads((request_for.folder / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(config).config_groups.values()
    # Groups of 32 for most, of 128 for this one, and the head by channel.
    assert len(groups) == 3
    scheme = next(group for group in groups if "down_proj" in group.targets[0])
    module = "model.layers.1.mlp.down_proj."
    stored = load_file(request_for.folder / "model.safetensors")
    parts = {name.removeprefix(module): stored[name] for name in stored if name.startswith(module)}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    weight = compressor.decompress(parts, scheme)["weight"]
    check_same(weight, state_of(request_for.folder)["layers.1.down"])


def state_of(folder: Path) -> DecoderState:
    config = load_model_config(str(folder))
    return decoder_state(config, open_checkpoint(str(folder), config), torch.float32)


def check_same(theirs: torch.Tensor, ours: Weight) -> None:
    assert isinstance(ours, QuantizedWeight)
    # Others multiply in the type of the scales.
    torch.testing.assert_close(theirs.float(), dequantize(ours), rtol=2**-7, atol=0.0)
