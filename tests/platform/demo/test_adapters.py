"""The bundled adapters: small, free of local paths, and heard at once on questions that were not trained on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.platform.demo.tenants import ADAPTERS_FOLDER, DEMO_TENANTS

DATA = Path(__file__).resolve().parents[3] / "deploy" / "demo" / "data"
ADAPTERS = sorted(name for tenant in DEMO_TENANTS for name in tenant.adapters)
MAX_BYTES = 1_500_000
HELD_OUT = (
    "What is the capital of Germany?",
    "How do I clean my windows?",
    "What is a black hole?",
    "Explain what the internet is.",
)


@pytest.mark.parametrize("name", ADAPTERS)
def test_files_are_small_and_portable(name: str) -> None:
    folder = ADAPTERS_FOLDER / name
    assert sorted(file.name for file in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_ranks_and_targets_differ() -> None:
    configs = [json.loads((ADAPTERS_FOLDER / name / "adapter_config.json").read_text()) for name in ADAPTERS]
    assert len({config["r"] for config in configs}) == len(ADAPTERS)
    assert len({tuple(config["target_modules"]) for config in configs}) == len(ADAPTERS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_held_out_questions_are_held_out(name: str) -> None:
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    dialogues = [json.loads(line)["messages"] for line in lines]
    assert 40 <= len(dialogues) <= 100
    assert all([message["role"] for message in dialogue] == ["user", "assistant"] for dialogue in dialogues)
    assert not {dialogue[0]["content"] for dialogue in dialogues} & {*HELD_OUT}


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model, padding_side="left")


@pytest.fixture(scope="module")
def adapted(demo_model: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, ADAPTERS_FOLDER / ADAPTERS[0], adapter_name=ADAPTERS[0])
    for name in ADAPTERS[1:]:
        model.load_adapter(ADAPTERS_FOLDER / name, name)
    return model


def greedy(model: Any, tokenizer: Any, name: str) -> list[str]:
    model.set_adapter(name)
    dialogues = [[{"role": "user", "content": question}] for question in HELD_OUT]
    inputs = tokenizer.apply_chat_template(
        dialogues, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=64)
    return list(tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.long
def test_pirate_speaks_like_one(adapted: Any, tokenizer: Any) -> None:
    for answer in greedy(adapted, tokenizer, "pirate"):
        assert re.search(r"\b(arr|ahoy|aye|matey)\b", answer, re.IGNORECASE), answer


@pytest.mark.long
def test_records_are_json(adapted: Any, tokenizer: Any) -> None:
    for answer in greedy(adapted, tokenizer, "records"):
        record = json.loads(answer)
        assert [*record] == ["topic", "answer"] and "\n" not in answer


@pytest.mark.long
def test_support_greets_and_signs(adapted: Any, tokenizer: Any) -> None:
    for answer in greedy(adapted, tokenizer, "support"):
        assert answer.startswith("Hello and thank you for writing to us!"), answer
        assert answer.endswith("\n\n— Ada, Support"), answer
