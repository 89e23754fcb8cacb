"""Finding a model's files: pickle and paths that lead out of the folder are refused, in words that say why."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.checkpoints.model_files import INDEX_FILE, SHARD_NAME, locate_model, weight_files
from loraplex.engine.errors import ModelError, UnsafeCheckpoint


def test_single_file_wins_over_everything_else(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert weight_files(tmp_path) == (tmp_path / "model.safetensors",)


def test_shards_come_from_the_index(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "stray.safetensors"):
        (tmp_path / name).write_bytes(b"")
    write_index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    assert weight_files(tmp_path) == (tmp_path / "a.safetensors", tmp_path / "b.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickle_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsafeCheckpoint, match="pickle can run code"):
            weight_files(locate_model(str(path)))


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", ".safetensors", "a.bin", 5]
)
def test_shards_outside_the_folder_are_refused(tmp_path: Path, name: object) -> None:
    write_index(tmp_path, {"x": name})
    with pytest.raises(ModelError, match="must be a plain"):
        weight_files(tmp_path)


@given(st.text(max_size=40))
def test_accepted_shard_names_stay_inside(name: str) -> None:
    if SHARD_NAME.fullmatch(name + ".safetensors"):
        assert (Path("/folder") / f"{name}.safetensors").resolve().parent == Path("/folder")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_index(tmp_path, {"x": "a.safetensors"})
    with pytest.raises(ModelError, match=r"shard 'a\.safetensors' is missing"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: "):
        weight_files(tmp_path)


def test_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        weight_files(tmp_path)


@pytest.mark.parametrize("path", ["no such folder", "a/b/c", "../x/y", "https://host/a/b", "./x"])
def test_what_is_no_path_and_no_hub_id_is_refused(path: str) -> None:
    with pytest.raises(ModelError, match=r"neither a directory, nor a \.gguf file, nor a hub id"):
        locate_model(path)


def test_other_single_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"must be a \.gguf file"):
        locate_model(str(tmp_path / "model.safetensors"))


def write_index(folder: Path, weight_map: dict[str, object]) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
