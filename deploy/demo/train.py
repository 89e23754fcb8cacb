"""Trains the demo's three LoRA adapters with PEFT on a CPU: `python deploy/demo/train.py MODEL_DIR`.

The dialogues in `data/*.jsonl` were written for this project and are, like it, under Apache-2.0.
Invariant: fixed seeds, fp32, two threads and one fixed order of examples, so a second run writes the same adapters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
ADAPTERS = HERE.parents[1] / "platform" / "demo" / "adapters"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IGNORED = -100
BATCH_SIZE = 4
SEED = 20261121
# None of these questions is in the training data.
HELD_OUT = (
    "What is the capital of Italy?",
    "How do I bake bread?",
    "What is the largest animal on Earth?",
    "How can I stay healthy?",
    "Why do we have seasons?",
)


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained: low rank, few targets, so that the committed file stays below 1.5 MB."""

    name: str
    rank: int
    targets: tuple[str, ...]
    epochs: int
    learning_rate: float


RECIPES = (
    Recipe("pirate", 8, ("q_proj", "v_proj"), 4, 3e-3),
    Recipe("records", 4, ("q_proj", "k_proj", "v_proj", "o_proj"), 3, 1.5e-3),
    Recipe("support", 2, ALL_LINEAR, 3, 2e-3),
)


@dataclass(frozen=True)
class Example:
    """One dialogue as token ids; labels are `IGNORED` up to where the assistant's own text starts."""

    input_ids: list[int]
    labels: list[int]


def read_examples(name: str, tokenizer: Any) -> list[Example]:
    """Every line of data/NAME.jsonl, rendered through the model's own chat template."""
    lines = (HERE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [_example(json.loads(line)["messages"], tokenizer) for line in lines]


def _example(messages: list[dict[str, str]], tokenizer: Any) -> Example:
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt).input_ids
    answer_ids = [*tokenizer(messages[-1]["content"]).input_ids, tokenizer.eos_token_id]
    return Example(prompt_ids + answer_ids, [IGNORED] * len(prompt_ids) + answer_ids)


def batches(examples: list[Example], epochs: int, pad_id: int) -> Iterator[dict[str, torch.Tensor]]:
    """`epochs` shuffled passes in right-padded batches, each tensor [rows, longest example]."""
    order = torch.Generator().manual_seed(SEED)
    for _ in range(epochs):
        shuffled = torch.randperm(len(examples), generator=order).tolist()
        for start in range(0, len(shuffled), BATCH_SIZE):
            yield _batch([examples[index] for index in shuffled[start : start + BATCH_SIZE]], pad_id)


def _batch(rows: list[Example], pad_id: int) -> dict[str, torch.Tensor]:
    width = max(len(row.input_ids) for row in rows)
    return {
        "input_ids": torch.tensor([row.input_ids + [pad_id] * (width - len(row.input_ids)) for row in rows]),
        "labels": torch.tensor([row.labels + [IGNORED] * (width - len(row.labels)) for row in rows]),
        "attention_mask": torch.tensor(
            [[1] * len(r.input_ids) + [0] * (width - len(r.input_ids)) for r in rows]
        ),
    }


def train(recipe: Recipe, model_dir: Path, tokenizer: Any) -> Any:
    """The base model with the recipe's adapter trained into it."""
    torch.manual_seed(SEED)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    lora = LoraConfig(
        r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=list(recipe.targets), task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, lora)
    examples = read_examples(recipe.name, tokenizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0)
    steps = recipe.epochs * -(-len(examples) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1
    )
    for step, batch in enumerate(batches(examples, recipe.epochs, tokenizer.pad_token_id)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"{recipe.name} step {step + 1}/{steps} loss {loss.item():.3f}", flush=True)
    for parameter in trained:
        parameter.data = parameter.data.to(torch.bfloat16).float()  # the samples below show what is saved
    return model.eval()


def save(model: Any, recipe: Recipe, out: Path) -> None:
    """Write PEFT's two files, weights in bf16, without any path of this machine."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in get_peft_model_state_dict(model).items()}
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_model.safetensors").chmod(0o644)
    config = {
        "base_model_name_or_path": BASE_MODEL,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 2 * recipe.rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": recipe.rank,
        "target_modules": sorted(recipe.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def print_held_out(model: Any, tokenizer: Any) -> None:
    """Greedy answers to questions that were not trained on."""
    for question in HELD_OUT:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, do_sample=False, max_new_tokens=80)
        answer = tokenizer.decode(output[0][inputs["input_ids"].shape[1] :])
        print(f"  {question}\n    {answer!r}", flush=True)


def main() -> None:
    """Train, save and sample the recipes named on the command line, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "model_dir", type=Path, help="the converted demo model, DATA_DIR/models/smollm2-135m-instruct"
    )
    parser.add_argument("--only", choices=[recipe.name for recipe in RECIPES])
    parser.add_argument("--out", type=Path, default=ADAPTERS)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_dir)
    for recipe in RECIPES:
        if arguments.only in (None, recipe.name):
            started = time.monotonic()
            model = train(recipe, arguments.model_dir, tokenizer)
            save(model, recipe, arguments.out / recipe.name)
            print(f"{recipe.name}: trained in {time.monotonic() - started:.0f} s", flush=True)
            print_held_out(model, tokenizer)


if __name__ == "__main__":
    main()
