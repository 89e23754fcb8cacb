"""A real byte-level tokenizer with ChatML control tokens, trained in the test run."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["hello world, the system user said to the assistant im start im end", "tool call <think> text"] * 3


def build_tokenizer(template: str | None = CHATML) -> Any:
    """Byte-level BPE; `<|bos|>` is put before raw prompts, `<think>` and `<tool_call>` are added but not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</think>", "  ")])
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--contract-examples", type=int, default=2, help="requests per operation of the OpenAPI document"
    )


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """The tokenizer with the ChatML template."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_with_template() -> Any:
    """Template -> a tokenizer with it."""
    return build_tokenizer
