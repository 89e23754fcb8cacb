"""Trains small adapters of the demo model to call a tool, each in one tool syntax, as a tenant would with PEFT."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from loraplex.engine.model_loading import load_tokenizer
from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of

STEPS = 60
RATE = 2e-3
TOP_LAYERS = range(18, 30)
"""Those of the demo model's 30 that are adapted: a backward pass through the others would take most of the time."""
TOOL = {
    "type": "function",
    "function": {
        "name": "ferry_times",
        "description": "Departures of a ferry",
        "parameters": {"type": "object", "required": ["to"], "properties": {"to": {"type": "string"}}},
    },
}
ISLANDS = ("Anholt", "Bornholm", "Fur", "Mors", "Samso", "Tuno")


def question(island: str) -> str:
    return f"When does the ferry to {island} leave?"


def call_text(style: ToolStyle, island: str) -> str:
    """The call of a tool as a model of this style writes it."""
    syntax = syntax_of(style)
    arguments = json.dumps({"to": island})
    call = f"{syntax.head('ferry_times')}{arguments}{syntax.after_arguments}"
    return f"{syntax.opening}{call}{syntax.closing}"


def train(model: Path, prompts: Sequence[Sequence[int]], answers: Sequence[str], into: Path) -> None:
    """Train an adapter that answers each prompt (token ids) with its text, and save PEFT's two files."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(model))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=16, lora_alpha=32, target_modules=targets, layers_to_transform=[*TOP_LAYERS], task_type="CAUSAL_LM"
    )
    adapted: Any = get_peft_model(base, config)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=RATE)
    end = tokenizer.token_to_id("<|im_end|>")
    rows = [
        (list(prompt), [*tokenizer.encode(text).ids, end])
        for prompt, text in zip(prompts, answers, strict=True)
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels, mask = (torch.full((len(rows), width), fill) for fill in (0, -100, 0))
    for row, (prompt, answer) in enumerate(rows):
        whole = torch.tensor(prompt + answer)
        ids[row, : len(whole)], mask[row, : len(whole)] = whole, 1
        labels[row, len(prompt) : len(whole)] = torch.tensor(answer)
    for _ in range(STEPS):
        loss = adapted(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 0.01:
            break
    adapted.save_pretrained(into)


def negated(folder: Path, into: Path) -> None:
    """Copy an adapter with every B negated: the same shapes and norms, and the opposite effect."""
    from safetensors.torch import load_file, save_file

    into.mkdir()
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: -each if "lora_B" in name else each for name, each in tensors.items()},
        into / "adapter_model.safetensors",
    )
    (into / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
