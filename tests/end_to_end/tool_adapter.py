"""Trains small adapters of the demo model to call a tool, each in one tool syntax, as a tenant would with PEFT."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loraplex.engine.model_loading import load_tokenizer
from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of

STEPS = 80
RATE = 1e-3
ENOUGH = 0.005
FIRST_LAYER = 18
"""Of the demo model's 30 the first that is adapted."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WEIGHTS = "adapter_model.safetensors"
LAYER = re.compile(r"layers\.(\d+)\.")
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
    """Train an adapter that answers each prompt (token ids) with its text, and save PEFT's two files.

    Only the top layers are run in each step: what enters them never changes.
    """
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(model))
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    [end] = tokenizer.encode("<|im_end|>").ids
    rows = [
        ([*prompt], [*tokenizer.encode(text).ids, end]) for prompt, text in zip(prompts, answers, strict=True)
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.full((len(rows), width), end), torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt + answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt + answer)] = torch.tensor(answer)
    with torch.no_grad():
        entering = base(input_ids=ids, output_hidden_states=True).hidden_states[FIRST_LAYER].clone()
    base.model.layers = base.model.layers[FIRST_LAYER:]
    base.config.num_hidden_layers = len(base.model.layers)
    adapted: Any = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS))
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=RATE)
    for _ in range(STEPS):
        loss = adapted(inputs_embeds=entering, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < ENOUGH:
            break
    print(f"loss {loss.item():.4f}")
    adapted.save_pretrained(into)
    tensors = load_file(into / WEIGHTS)
    save_file({LAYER.sub(_moved, name): each for name, each in tensors.items()}, into / WEIGHTS)


def _moved(layer: re.Match[str]) -> str:
    return f"layers.{int(layer[1]) + FIRST_LAYER}."


def negated(folder: Path, into: Path) -> None:
    """Copy an adapter with every B negated: the same shapes and norms, and the opposite effect."""
    into.mkdir()
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {name: -each if "lora_B" in name else each for name, each in tensors.items()},
        into / WEIGHTS,
    )
    (into / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
