"""A small byte-level BPE tokenizer made in memory, padded as models are, and both backends over it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.replayed_mask import AnswerMask
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tree import Node

CORPUS = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "exact": true}}',
    '{"title":"A long walk","tags":["a","b"],"score":0.5,"next":null,"items":[{"id":1},{"id":2}]}',
    "<tool_call>\n</tool_call> The quick brown fox jumps over the lazy dog, 2024-01-31T12:00:00Z a@b.com",
]
SPECIAL = ["<|end|>", "<|stop|>", "<|im_start|>", "[TOOL_CALLS]"]
PADDING = 13


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Two end tokens, two other control tokens, one added token that is ordinary text, padded ids at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    ids = tokenizer.get_vocab(with_added_tokens=True)
    ends = frozenset(ids[text] for text in SPECIAL[:2])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return Vocabulary(tokenizer.to_str(), size + PADDING, ends)


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary) -> MaskCompiler:
    return MaskCompiler(vocabulary)


@dataclass(frozen=True)
class Backends:
    """Masks of trees and what they allow. `tokenizer` reads control tokens in a text as such."""

    vocabulary: Vocabulary
    compiler: MaskCompiler
    tokenizer: Tokenizer

    def from_source(self, backend: Backend, source: str, *, close: bool = False) -> AnswerMask:
        spec = GrammarSpec(backend=backend, source=source, close=close)
        return self.compiler.compile(b"tenant", encode_spec(spec))

    def mask(self, backend: Backend, node: Node, *, close: bool = False) -> AnswerMask:
        emit: Callable[[Node], str] = (emit_llguidance if backend == "llguidance" else emit_xgrammar).emit
        return self.from_source(backend, emit(node), close=close)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def accepts(self, mask: AnswerMask, text: str) -> bool:
        """Whether `text` is a whole document; `mask` does not advance."""
        walker = mask.fork()
        return all(walker.accept(token_id) for token_id in self.tokens(text)) and walker.is_complete()

    def allowed(self, mask: AnswerMask) -> set[int]:
        """The ids whose bit is set, padding and the unused end of the last word among them."""
        bitmask = torch.full((3, self.vocabulary.bitmask_words), 0x5A5A5A5A, dtype=torch.int32)
        mask.fill(bitmask, 1)
        assert set(bitmask[0].tolist()) == set(bitmask[2].tolist()) == {0x5A5A5A5A}
        return {
            32 * word + bit
            for word, value in enumerate(bitmask[1].tolist())
            for bit in range(32)
            if (value >> bit) & 1
        }


@pytest.fixture(scope="session")
def backends(vocabulary: Vocabulary, compiler: MaskCompiler) -> Backends:
    return Backends(vocabulary, compiler, Tokenizer.from_str(vocabulary.tokenizer_json))
