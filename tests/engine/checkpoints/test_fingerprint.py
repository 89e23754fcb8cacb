"""One byte of anything that decides answers is another fingerprint; where the files lie and what lies beside them is not."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.random_llama import save_random_llama

from loraplex.engine import model_loading
from loraplex.engine.checkpoints.digest import fingerprint
from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.messages import EngineInfo

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)
DIGEST = "d" * 64
SETTINGS = {"quantization": "none", "kv_dtype": "torch.float32"}


def make(folder: Path) -> Path:
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(f'{{"of": "{name}"}}')
    return folder


def test_each_file_and_each_setting_is_told_apart(tmp_path: Path) -> None:
    model, seen = make(tmp_path / "model"), []
    plain = fingerprint(str(model), DIGEST, SETTINGS)
    assert re.fullmatch("fp_[0-9a-f]{16}", plain)
    for name in FILES:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[:-2] + b"X}")
        seen.append(fingerprint(str(model), DIGEST, SETTINGS))
        (model / name).unlink()
        seen.append(fingerprint(str(model), DIGEST, SETTINGS))
        (model / name).write_bytes(content)
    for name in SETTINGS:
        seen.append(fingerprint(str(model), DIGEST, {**SETTINGS, name: "other"}))
    seen.append(fingerprint(str(model), "e" * 64, SETTINGS))
    assert fingerprint(str(model), DIGEST, SETTINGS) == plain
    assert len({plain, *seen}) == 2 * len(FILES) + len(SETTINGS) + 2


def test_equal_files_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    first, second = make(tmp_path / "first"), make(tmp_path / "second")
    (second / "README.md").write_text("not read by a server")
    (second / "other.safetensors").write_text("weights are in the digest, and not read again")
    assert fingerprint(str(first), DIGEST, SETTINGS) == fingerprint(str(second), DIGEST, SETTINGS)


def test_files_cannot_be_swapped(tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    plain = fingerprint(str(model), DIGEST, SETTINGS)
    (model / FILES[0]).rename(model / "held")
    (model / FILES[1]).rename(model / FILES[0])
    (model / "held").rename(model / FILES[1])
    assert fingerprint(str(model), DIGEST, SETTINGS) != plain


def test_an_engine_reports_it_from_what_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    save_random_llama(folder, std=0.1, vocab_size=32, **sizes)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", cache=CacheConfig(block_size=4, num_blocks=16)
    )

    def started(**changed: Any) -> str:
        described: list[EngineInfo] = []
        loaded = model_loading.load_model(replace(config, **changed), described.append)
        assert described[0].system_fingerprint == loaded.info.system_fingerprint
        assert loaded.info.system_fingerprint is not None
        return loaded.info.system_fingerprint

    seen = [started(), started(dtype="bfloat16"), started(quantization="int8")]
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b"\n")
        seen.append(started())
        (folder / name).write_bytes(content)
    with monkeypatch.context() as patched:
        patched.setattr(model_loading, "kv_cache_dtype", lambda *_: torch.bfloat16)
        seen.append(started())
    with monkeypatch.context() as patched:
        patched.setattr(model_loading, "version", lambda _: "99.0")
        seen.append(started())
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    seen.append(started())
    weights.write_bytes(content)
    assert len(set(seen)) == len(seen) == 9 and started() == seen[0]
