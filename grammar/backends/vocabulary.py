"""`Vocabulary`: the facts about a model's tokens that both backends build on.

Invariant: an id at or above the tokenizer's own size is padding of the model's output layer and is never allowed.
"""

import json
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loraplex.grammar.errors import GrammarInvalid

if TYPE_CHECKING:
    from torch import Tensor

END_TEXT = "<|end|>"
_NOT_IN_WORDS = "\x02"
"""A character that is a part of no word, so that no token joins it to what follows."""


@dataclass(frozen=True)
class Vocabulary:
    """`tokenizer_json` is the text of a `tokenizer.json`, `vocab_size` the width of the model's logits.

    `end_token_ids` are the tokens that end an output; a model may have several.
    """

    tokenizer_json: str
    vocab_size: int
    end_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if not self.end_token_ids:
            raise ValueError("end_token_ids is empty: an answer could never end")
        if not all(0 <= token_id < self.vocab_size for token_id in self.end_token_ids):
            raise ValueError(f"end_token_ids must be in 0 to {self.vocab_size - 1}")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self.tokenizer_json)

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        """The same tokenizer, but text that looks like a control token is spelled in ordinary tokens."""
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def encoded_tokens(self) -> tuple[str, ...]:
        """The tokens by id as the tokenizer spells them, an empty text where an id has none."""
        by_id = {
            token_id: text for text, token_id in self.tokenizer.get_vocab(with_added_tokens=True).items()
        }
        return tuple(by_id.get(token_id, "") for token_id in range(min(self.vocab_size, max(by_id) + 1)))

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of the tokens by id, none where an id has no text. Takes about a second for 50k tokens."""
        # Imported by the processes that compile: a gateway has no backend.
        from llguidance import LLTokenizer

        own_reading = LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size)
        texts = enumerate(self.encoded_tokens)
        known = [own_reading.decode_bytes([token_id]) if text else b"" for token_id, text in texts]
        return (*known, *[b""] * (self.vocab_size - len(known)))

    @cached_property
    def _by_text(self) -> list[tuple[bytes, int]]:
        return sorted((text, token) for token, text in enumerate(self.token_bytes) if text)

    def beginning_with(self, text: bytes) -> list[int]:
        """Return the tokens whose text begins with this one."""
        low, end = bisect_left(self._by_text, (text,)), bisect_left(self._by_text, (text + b"\xff" * 4,))
        return [token for _, token in self._by_text[low:end]]

    def spelling_of(self, text: bytes) -> list[int]:
        """Return the tokens whose text is this one."""
        low, end = bisect_left(self._by_text, (text,)), bisect_left(self._by_text, (text + b"\0",))
        return [token for _, token in self._by_text[low:end]]

    @cached_property
    def text_bits(self) -> "Tensor":
        """The tokens that are text: neither control tokens nor ends of an output. int32 [words]."""
        # Imported by the processes that compile: a gateway has no torch.
        from loraplex.grammar.backends.bitmask import bits_of

        controls = {*self.special_tokens.values(), *self.end_token_ids}
        texts = enumerate(self.token_bytes)
        return bits_of((token for token, text in texts if text and token not in controls), self.bitmask_words)

    def spelled(self, text: str) -> list[int]:
        """Return the ordinary tokens that spell a text, and nothing before it: some tokenizers begin every text with a blank."""
        ids = self._encoded(text)
        if self._bytes_of(ids) != text.encode():
            ids = self._encoded(f"{_NOT_IN_WORDS}{text}")
            while ids and len(self._bytes_of(ids)) > len(text.encode()):
                del ids[0]
        return ids

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.text_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _bytes_of(self, ids: list[int]) -> bytes:
        return b"".join(self.token_bytes[token_id] for token_id in ids)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Control tokens by their text, including those that end an output."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def token_id(self, token: str | int) -> int:
        """Return the id of a token given by text or id. Raises `GrammarInvalid` when the tokenizer has no such token."""
        found = self.tokenizer.token_to_id(token) if isinstance(token, str) else token
        if found is None or not 0 <= found < len(self.encoded_tokens):
            raise GrammarInvalid(f"the model has no token {token!r}")
        return int(found)

    @cached_property
    def spelling(self) -> Literal["RAW", "BYTE_FALLBACK", "BYTE_LEVEL"]:
        """How the tokenizer spells bytes in its tokens, read from its decoder."""
        decoder = json.loads(self.tokenizer_json).get("decoder") or {}
        kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
        return "BYTE_LEVEL" if "ByteLevel" in kinds else "BYTE_FALLBACK" if "ByteFallback" in kinds else "RAW"

    @property
    def bitmask_words(self) -> int:
        """int32 words in one row of a bitmask."""
        return (self.vocab_size + 31) // 32


def load_vocabulary(folder: Path, vocab_size: int, end_token_ids: frozenset[int]) -> Vocabulary:
    """Load the vocabulary of a model folder. Raises `OSError` when it has no `tokenizer.json`."""
    return Vocabulary((folder / "tokenizer.json").read_text("utf-8"), vocab_size, end_token_ids)


def byte_vocabulary() -> Vocabulary:
    """Return a vocabulary of one token per byte and an end token, for checks without a model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token_id for token_id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TEXT])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return Vocabulary(tokenizer.to_str(), size, frozenset({size - 1}))
