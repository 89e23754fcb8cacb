"""`loraplex release check` from end to end on a tiny model, and what its arguments may be."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.platform.bench.fixtures import write_random_adapter
from loraplex.platform.cli.main import main
from loraplex.platform.release_check import checks
from loraplex.platform.release_check.releases import parse_spec
from loraplex.platform.startup_errors import SettingsError


def check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["release", "check", *arguments])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "allowed is a model's folder"),
        ("demo,bits=4", "'bits': allowed is"),
        ("demo,quantization", "'quantization': allowed is"),
        ("demo,template=/nowhere", "/nowhere is no file"),
        ("demo,adapters=/nowhere", "/nowhere is no folder"),
        ("https://a.example", "allowed is a model's folder"),
        ("https://a.example,quantization=int4", "allowed is key-file=FILE"),
    ],
)
def test_a_wrong_spec_is_named(text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        parse_spec(text)
    assert check("demo", text).exit_code == 2


def test_short_names_are_settings() -> None:
    assert parse_spec("demo,kv=fp8,quantization=int4").settings == {
        "kv_cache_dtype": "fp8",
        "quantization": "int4",
    }


def test_a_kv_type_passes_its_quality_gate(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = parse_spec(f"{tiny_model},kv=fp8,dtype=float32")
    [found] = checks.kv_check(spec, "fp8")
    assert capsys.readouterr().err.splitlines()[-1] == "judging"
    assert found.outcome == "pass" and "late positions: perplexity 1.0" in found.detail


@pytest.mark.long
def test_a_slower_engine_is_named(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ROUNDS", 2)
    specs = []
    for interval in (0.01, 0.04):
        script = tmp_path / f"{interval}.json"
        info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=400, max_model_len=8192)
        script.write_bytes(msgspec.json.encode(FakeScript(info=info, token_interval_s=interval)))
        specs.append(f"{tiny_model},fake_engine={script}")
    result = check(*specs, "--quick")
    assert result.exit_code == 1
    assert "FAIL load chat: " in result.output and "FAIL load batch: " in result.output
    assert "pass template" in result.output


@pytest.mark.long
def test_a_template_a_vocabulary_and_an_adapter_are_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load shapes are those of larger models: a tiny one refuses their prompts, and that is said, too."""
    monkeypatch.setattr(checks, "ROUNDS", 1)
    own, other = tmp_path / "own", tmp_path / "other"
    write_random_adapter(own / "style", load_model_config(str(tiny_model)), 4, seed=1)
    write_random_adapter(other / "style", load_model_config(str(tiny_model)), 4, seed=2)
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    result = check(
        f"{tiny_model},adapters={own}",
        f"{tiny_model},adapters={other},template={template}",
        "--quick",
        "--json",
    )
    assert result.exit_code == 1
    found = {each["name"]: each["outcome"] for each in json.loads(result.stdout)}
    passes = ("adapters", "tokenization", "answers base", "log-probabilities base", "memory plan")
    assert {name: found[name] for name in passes} == dict.fromkeys(passes, "pass")
    assert [found[name] for name in ("template", "answers style")] == ["FAIL", "FAIL"]

    swapped = tmp_path / "swapped"
    shutil.copytree(tiny_model, swapped)
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, [*vocabulary.values()][::-1], strict=True))
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    lines = check(str(tiny_model), str(swapped), "--quick").output
    assert "FAIL tokenization: 1 (at most 0) the vocabularies differ" in lines
    assert "skip answers base: the vocabularies differ" in lines
    assert "pass memory plan" in lines
