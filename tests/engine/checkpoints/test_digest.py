"""The digest follows the content: not the place, not the time; the cache saves hashing and cannot change the result."""

import json
import os
from pathlib import Path

import pytest

from loraplex.engine.checkpoints.digest import model_digest
from loraplex.engine.checkpoints.model_files import INDEX_FILE
from loraplex.engine.errors import ModelError


def test_same_content_same_digest_wherever_it_lies(tmp_path: Path) -> None:
    first, second = make(tmp_path / "first"), make(tmp_path / "second")
    (second / "README.md").write_text("not part of the model")
    os.utime(second / "model.safetensors", (1, 1))
    assert model_digest(str(first)) == model_digest(str(second))
    assert len(model_digest(str(first))) == 64


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_any_other_content_is_another_digest(tmp_path: Path, name: str) -> None:
    first, second = make(tmp_path / "first"), make(tmp_path / "second")
    (second / name).write_text("other")
    assert model_digest(str(first)) != model_digest(str(second))


def test_shards_cannot_be_swapped(tmp_path: Path) -> None:
    first = make_sharded(tmp_path / "first", "one", "two")
    second = make_sharded(tmp_path / "second", "two", "one")
    assert model_digest(str(first)) != model_digest(str(second))


def test_gguf_digest_does_not_depend_on_its_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert model_digest(str(tmp_path / "a.gguf")) == model_digest(str(tmp_path / "b.gguf"))


def test_cache_is_used_and_notices_a_changed_file(tmp_path: Path) -> None:
    model, cache = make(tmp_path / "model"), tmp_path / "cache" / "digests.json"
    plain = model_digest(str(model))
    assert model_digest(str(model), cache) == plain
    entries = json.loads(cache.read_text())
    assert len(entries) == 2
    cache.write_text(json.dumps(dict.fromkeys(entries, "0" * 64)))
    assert model_digest(str(model), cache) != plain, "the cache was not read"
    (model / "config.json").write_text("other and longer")
    (model / "model.safetensors").write_text("other and longer")
    assert model_digest(str(model), cache) == model_digest(str(model))


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 5}', '{"key": "zz"}', "\x00"])
def test_damaged_cache_is_replaced(tmp_path: Path, damage: str) -> None:
    model, cache = make(tmp_path / "model"), tmp_path / "digests.json"
    cache.write_text(damage)
    assert model_digest(str(model), cache) == model_digest(str(model))
    assert len(json.loads(cache.read_text())) == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["digests.json", "model"]


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: is missing"):
        model_digest(str(tmp_path))


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


def make_sharded(folder: Path, *contents: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = [f"shard-{number}.safetensors" for number in range(len(contents))]
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {name: name for name in names}}))
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_text(content)
    return folder
