"""Grammars whose lexers grow with every token, a vocabulary of long tokens that makes them grow fast, and what they take.

As a program: decodes under many of them in turn and prints the bytes that the process has grown by.
"""

import random
import re
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loraplex.grammar.backends import emit_llguidance
from loraplex.grammar.backends.compiler import CompilerConfig, MaskCompiler
from loraplex.grammar.backends.llguidance_mask import LlguidanceLimits
from loraplex.grammar.backends.replayed_mask import AnswerMask
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.spec import GrammarSpec, encode_spec
from loraplex.grammar.tree import Pattern

END = "<|end|>"
NUM_WORDS = 16_000
TENANT_BYTES = 16 << 20


def wordy_vocabulary() -> Vocabulary:
    """One token per byte, random words of up to nine letters, and an end token."""
    drawn = random.Random(5)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"".join(drawn.choices("aeioubcdfghlmnprst", k=drawn.randint(2, 9))) for _ in range(NUM_WORDS)}
    texts = [*letters, *sorted(words)]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return Vocabulary(tokenizer.to_str(), size, frozenset({size - 1}))


def growing_grammar(number: int) -> bytes:
    """A spec whose lexer has some hundred new states after each token. `number` distinguishes it."""
    source = emit_llguidance.emit(Pattern(f"{number}[a-z ]*[aeiou][a-z ]{{20}}"))
    return encode_spec(GrammarSpec(backend="llguidance", source=source))


def compiler_of(
    vocabulary: Vocabulary,
    tenant_bytes: int = TENANT_BYTES,
    states: int = LlguidanceLimits().max_lexer_states,
) -> MaskCompiler:
    limits = LlguidanceLimits(max_lexer_states=states)
    return MaskCompiler(vocabulary, CompilerConfig(tenant_cache_bytes=tenant_bytes, llguidance=limits))


def allowed_by(mask: AnswerMask, vocabulary: Vocabulary) -> list[int]:
    """The tokens that `mask` allows, in order, without those that end the text."""
    bitmask = torch.zeros((1, vocabulary.bitmask_words), dtype=torch.int32)
    mask.fill(bitmask, 0)
    bits = np.unpackbits(bitmask.numpy()[0].view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return [token_id for token_id in found if token_id not in vocabulary.end_token_ids]


def walk(mask: AnswerMask, vocabulary: Vocabulary, tokens: int, seed: int) -> None:
    """Decode random tokens that the mask allows."""
    drawn = random.Random(seed)
    for _ in range(tokens):
        assert mask.accept(drawn.choice(allowed_by(mask, vocabulary)))


def private_bytes() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


def main(grammars: int, tokens: int) -> None:
    vocabulary = wordy_vocabulary()
    compiler = compiler_of(vocabulary)
    walk(compiler.compile(b"tenant", growing_grammar(0)), vocabulary, tokens, 0)
    before = private_bytes()
    for number in range(1, grammars + 1):
        walk(compiler.compile(b"tenant", growing_grammar(number)), vocabulary, tokens, number)
    print(private_bytes() - before)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
