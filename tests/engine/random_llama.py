"""A random Llama of two layers as a checkpoint, for tests that compare one engine with another."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM


def save_random_llama(folder: Path, *, std: float, vocab_size: int, **fields: int) -> None:
    """Write float32 weights of standard deviation `std`, the same ones each time, and a tokenizer of one word per token.

    `fields`: of `LlamaConfig`. Token 1 ends a response.
    """
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocab_size, num_hidden_layers=2, eos_token_id=1, **fields)
    llama = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.normal_(std=std)
    llama.save_pretrained(folder)
    words = {f"w{index}": index for index in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
