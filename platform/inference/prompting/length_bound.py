"""Bounds the number of tokens of a text from below, without tokenizing it, where the tokenizer is byte-level BPE.

Byte-level BPE only joins: each token stands for as many bytes of the text as its name has characters.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from loraplex.platform.inference.prompting.token_text import byte_alphabet

# Those with ids of their own add them; a template may also leave the text out.
_POST_PROCESSORS: Final = {"ByteLevel", "RobertaProcessing", "BertProcessing", "TemplateProcessing"}


@dataclass(frozen=True, slots=True)
class LengthBound:
    """`longest`: the most bytes of one token. `unknown`: the bytes that the tokenizer drops, alone or several as one token."""

    longest: int
    unknown: bytes

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` certainly has."""
        return -(-len(text.encode().translate(None, self.unknown)) // self.longest)


def length_bound(serialized: str) -> LengthBound | None:
    """Return the bound of a serialized tokenizer of the `tokenizers` library; None where a token may stand for any length."""
    spec = json.loads(serialized)
    model, added = spec["model"], spec["added_tokens"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None
    if spec["normalizer"] is not None or spec["truncation"] is not None:
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if not (_splits_bytes(spec["pre_tokenizer"]) and _keeps_ids(spec["post_processor"])):
        return None
    vocabulary: Mapping[str, int] = model["vocab"]
    unknown = bytes(
        sorted(byte for character, byte in byte_alphabet().items() if character not in vocabulary)
    )
    longest = max(
        max(map(len, vocabulary), default=0), *(len(token["content"].encode()) for token in added), 1
    )
    return LengthBound(longest, unknown)


def _splits_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether all of a text is turned into characters of the byte alphabet, once."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    levels = sum(step["type"] == "ByteLevel" for step in steps)
    return levels == 1 and all(
        step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    )


def _keeps_ids(post_processor: dict[str, Any] | None) -> bool:
    return all(
        step["type"] in _POST_PROCESSORS
        and (step["type"] != "TemplateProcessing" or any("Sequence" in piece for piece in step["single"]))
        for step in _steps(post_processor, "processors")
    )


def _steps(component: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a component that may be a sequence, also of sequences; `inner`: the field that holds them."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [step for each in component[inner] for step in _steps(each, inner)]
