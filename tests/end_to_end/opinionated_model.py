"""A tiny random base model with opinions, adapters of it, and engines that serve them in the process of the test.

Invariant: the same call writes the same files.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tests.end_to_end.thinking_model import CONTROL, TEMPLATE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from loraplex.adapters.loader import PeftAdapterSource
from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.model_loading import load_model

StartEngine = Callable[[Path], Awaitable[LocalEngine]]
VOCABULARY = 512
RATE, STEPS, ENOUGH = 5e-3, 300, 0.02
LABELS = ("Yes", "No", *"ABCDE")
SPREAD = 0.25
"""Of all weights: answers depend on what was asked."""
HEAD = 0.5
"""Scales the head: the logits of two labels differ by about 1."""


def save_opinionated_model(folder: Path, template: str = TEMPLATE, *, ends: bool = True) -> Any:
    """Write a checkpoint whose labels are one token each; return its tokenizer of transformers. `ends`: it names its end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(Path(__file__).parent / "decision_inputs.json")], trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in LABELS[:2]])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    ids = tokenizer.get_vocab(with_added_tokens=True)
    config = Qwen3Config(
        vocab_size=len(ids),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"] if ends else None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.lm_head.weight.data *= HEAD
    model.save_pretrained(folder)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
    whole.save_pretrained(folder)
    return whole


def save_random_adapter(model: Path, folder: Path, seed: int) -> None:
    """Write an adapter of all layers that changes every answer."""
    torch.manual_seed(seed)
    base: Any = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(folder)


def save_trained_adapter(
    model: Path, folder: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> None:
    """Write an adapter that has learned what to write behind each prompt (token ids)."""
    torch.manual_seed(0)
    base: Any = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.full_like(ids, -100)
    for row, prompt, whole in zip(labels, prompts, rows, strict=True):
        row[len(prompt) : len(whole)] = torch.tensor(whole[len(prompt) :])
    optimizer = torch.optim.AdamW((each for each in adapted.parameters() if each.requires_grad), lr=RATE)
    for _ in range(STEPS):
        loss = adapted(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < ENOUGH:
            break
    adapted.save_pretrained(folder)


def save_surer_adapter(model: Path, folder: Path, factor: float) -> None:
    """Write an adapter that multiplies the logits of the labels by `factor` and changes no other: nothing where that is 1.

    LoRA of the head: A has the labels' own rows, B so much of each for its own label.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    head = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).lm_head.weight.data
    ids = tokenizer.convert_tokens_to_ids([*LABELS])
    b = torch.zeros(len(head), len(ids))
    b[ids, range(len(ids))] = factor - 1
    folder.mkdir()
    prefix = "base_model.model.lm_head"
    tensors = {f"{prefix}.lora_A.weight": head[ids].clone(), f"{prefix}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": len(ids),
        "lora_alpha": len(ids),
        "target_modules": ["lm_head"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def paths_in(folder: Path) -> Callable[[UUID, str], Awaitable[str]]:
    """Where a gateway finds adapters by their digests."""

    async def path_of(tenant_id: UUID, digest: str) -> str:
        return str(folder / digest)

    return path_of


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Engines of checkpoints in float32 on the CPU, closed at the end of the test. Digests of adapters are not verified."""
    started: list[LocalEngine] = []
    # Threads for so small matrices wait for each other most of the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    async def start(folder: Path) -> LocalEngine:
        settings = EngineConfig(
            model=str(folder), dtype="float32", device="cpu", cache=CacheConfig(num_blocks=512)
        )
        loaded = load_model(settings)
        source = PeftAdapterSource(loaded.config, loaded.dtype)
        started.append(LocalEngine(Engine(loaded, settings, source)))
        return started[-1]

    yield start
    for each in started:
        await each.close()
    torch.set_num_threads(threads)
