"""Converts the demo model's GGUF file into a model folder: bf16 safetensors, configuration and tokenizer.

It runs as a short child process (`python -m loraplex.platform.demo.convert GGUF OUT`), so that the gateway imports no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

CONTEXT_LENGTH = 8192
RMS_NORM_EPS = 1e-5


def convert(gguf_file: Path, out: Path) -> None:
    """Write `out`/{config.json, generation_config.json, model.safetensors, tokenizer files} from one GGUF file."""
    transformers_logging.disable_progress_bar()
    out.mkdir(parents=True)
    _convert_weights(gguf_file, out)
    _convert_tokenizer(gguf_file, out)
    for file in out.iterdir():
        file.chmod(0o644)


def _convert_weights(gguf_file: Path, out: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    config = _plain_config(source.config)
    # save_pretrained refuses the object the GGUF reader returns ("quantized with gguf"), so a twin is saved.
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    twin.load_state_dict(source.state_dict())
    twin.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    twin.save_pretrained(out)


def _plain_config(source: Any) -> Any:
    fields = source.to_dict()
    for gguf_only in ("quantization_config", "_model_name_or_path"):
        fields.pop(gguf_only, None)
    # GGUF stores epsilon as float32 (9.999999747378752e-06); the model was trained with the decimal value.
    fields["rms_norm_eps"] = RMS_NORM_EPS
    return type(source).from_dict(fields)


def _convert_tokenizer(gguf_file: Path, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    # GGUF names this pre-tokenizer only as "smollm"; the reader falls back to GPT-2's and loses the digit split.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.save_pretrained(out)


def main() -> None:
    """Convert the file of the first argument to the folder of the second."""
    convert(*map(Path, sys.argv[1:]))


if __name__ == "__main__":
    main()
