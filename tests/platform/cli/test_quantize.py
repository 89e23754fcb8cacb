"""`loraplex quantize` on a small model: its report, its exit code, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from loraplex.platform.cli.main import main

TEXT = " ".join(f"w{(i * i + 7 * i) % 64}" for i in range(400))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    folder = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "text").write_text(TEXT)
    return folder


def quantize(model: Path, *options: str) -> Result:
    arguments = ["quantize", str(model), str(model.parent / "out"), "--dtype", "float32", "--device", "cpu"]
    text = ["--text", str(model.parent / "text")]
    return CliRunner().invoke(main, [*arguments, *text, *options])


def test_prints_the_gates_report(model_folder: Path) -> None:
    result = quantize(model_folder, "--scheme", "int8", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["violations"] == [] and report["artefact"] == str(model_folder.parent / "out")
    assert report["tokens"] == 396 and 0.9 < report["perplexity_ratio"] < 1.02
    assert report["bounds"]["max_perplexity_ratio"] == 1.02
    assert (model_folder.parent / "out" / "config.json").is_file()


def test_refuses_over_the_bound_with_exit_code_1(model_folder: Path) -> None:
    result = quantize(model_folder, "--scheme", "int8", "--max-kl", "0")
    assert result.exit_code == 1
    assert "KL divergence is" in result.stderr and "allowed is at most 0" in result.stderr
    assert not (model_folder.parent / "out").exists()


def check_kv(model: Path, *options: str) -> Result:
    text = ["--text", str(model.parent / "text"), "--dtype", "float32", "--device", "cpu"]
    return CliRunner().invoke(main, ["quantize", str(model), *text, *options])


def test_a_kv_type_has_the_same_figures_and_those_of_late_positions(model_folder: Path) -> None:
    (model_folder.parent / "text").write_text(" ".join([TEXT] * 3))
    result = check_kv(model_folder, "--check-kv", "fp8", "--json", "--max-kl", "1")
    report = json.loads(result.stdout)
    assert report["tokens"] == 9 * 127 + 47 and 0 < report["kl"] < 1
    assert report["late_tokens"] == 9 * (127 - 96) and 0 < report["late_kl"] < 1
    refused = check_kv(model_folder, "--check-kv", "fp8", "--max-kl", "0")
    assert refused.exit_code == 1 and "late positions: KL divergence is" in refused.stderr


@pytest.mark.parametrize("options", [(), ("--scheme", "int8"), ("--check-kv", "fp8", "--scheme", "int8")])
def test_a_scheme_needs_a_folder_and_a_kv_type_none(model_folder: Path, options: tuple[str, ...]) -> None:
    assert check_kv(model_folder, *options).exit_code == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--scheme", "int3"), "`scheme` must be one of int8, fp8, int4"),
        (("--scheme", "int8", "--text", "/nowhere"), "/nowhere: No such file"),
    ],
)
def test_errors_are_one_line(model_folder: Path, options: tuple[str, ...], named: str) -> None:
    result = quantize(model_folder, *options)
    assert result.exit_code == 1
    assert named in result.stderr and "Traceback" not in result.stderr
