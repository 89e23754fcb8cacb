"""A text has at least as many tokens as its bound, and only tokenizers for which that is provable have one."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from loraplex.platform.inference.prompting.length_bound import LengthBound, length_bound

UNKNOWN = b"\x04\xf1"
PIECES = (
    " ",
    "\n",
    "hello",
    " world",
    "7",
    "é",
    "\x04",
    "\U00050000",
    "漢",
    "<|end|>",
    "<|",
    "    ",
    "\ufdfa",
)


def byte_level_tokenizer(
    unknown: bytes = b"",
    before: tuple[Any, ...] = (pre_tokenizers.Digits(individual_digits=True),),
    **settings: Any,
) -> Tokenizer:
    """As the demo's tokenizer: digits and byte-level BPE; `unknown` bytes are not in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["hello world", " " * 64, "\n" * 32] * 4, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["model"].update(settings)
    characters = {chr(0x100 + byte) if byte < 0x21 else chr(byte) for byte in unknown}
    spec["model"]["vocab"] = {
        name: index for name, index in spec["model"]["vocab"].items() if not characters & set(name)
    }
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_tokens([AddedToken("<|end|>", normalized=False), AddedToken("漢" * 3, normalized=False)])
    return tokenizer


def bound_of(tokenizer: Tokenizer) -> LengthBound | None:
    return length_bound(tokenizer.to_str())


def test_a_byte_level_tokenizer_bounds_a_text_by_its_longest_token() -> None:
    tokenizer = byte_level_tokenizer()
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=False)))
    bound = bound_of(tokenizer)
    assert bound == LengthBound(longest, b"") and longest >= 32
    assert [bound.fewest_tokens("a" * size) for size in (0, 1, longest, longest + 1)] == [0, 1, 1, 2]
    assert bound.fewest_tokens("é" * longest) == 2


def test_the_longest_token_may_be_an_added_one_in_bytes() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("漢" * 100, normalized=False)])
    assert bound_of(tokenizer) == LengthBound(300, b"")


def test_bytes_that_the_tokenizer_drops_count_for_nothing() -> None:
    tokenizer = byte_level_tokenizer(UNKNOWN)
    bound = bound_of(tokenizer)
    assert bound is not None and bound.unknown == UNKNOWN
    assert bound.fewest_tokens("\x04" * 10_000) == 0 == len(tokenizer.encode("\x04" * 10_000).ids)


@pytest.mark.parametrize(
    "before",
    [
        (pre_tokenizers.Split(Regex(r"\s+"), behavior="isolated"),),
        (pre_tokenizers.Sequence([pre_tokenizers.Split("x", behavior="merged_with_next")]),),
    ],
)
def test_splits_that_keep_the_text_leave_the_bound(before: tuple[Any, ...]) -> None:
    assert bound_of(byte_level_tokenizer(before=before)) == bound_of(byte_level_tokenizer())


def normalized(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def metaspace(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()


def without_pre_tokenizer(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = None


def bytes_of_bytes(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(), pre_tokenizers.ByteLevel()]
    )


def removing(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split(" ", behavior="removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])


def whitespace(tokenizer: Tokenizer) -> None:
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def strips_left(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])


def strips_right(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<mask>", rstrip=True)])


def truncated(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(8)


def leaves_text_out(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|>", special_tokens=[("<|end|>", tokenizer.token_to_id("<|end|>"))]
    )


@pytest.mark.parametrize(
    "change",
    [
        normalized,
        metaspace,
        without_pre_tokenizer,
        bytes_of_bytes,
        removing,
        whitespace,
        strips_left,
        strips_right,
        truncated,
        leaves_text_out,
    ],
)
def test_what_may_shorten_a_text_without_bound_has_none(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = byte_level_tokenizer()
    assert bound_of(tokenizer) is not None
    change(tokenizer)
    assert bound_of(tokenizer) is None


def test_other_models_and_marked_parts_of_words_have_none() -> None:
    words = Tokenizer(models.WordLevel({"hello": 0}, unk_token="hello"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert bound_of(words) is None
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        spec = json.loads(byte_level_tokenizer().to_str())
        spec["model"][field] = "##"
        assert length_bound(json.dumps(spec)) is None


@cache
def bounded_tokenizer(unknown: bytes, fused: bool) -> tuple[Tokenizer, LengthBound]:
    settings: dict[str, Any] = {"unk_token": "h", "fuse_unk": True} if fused else {}
    tokenizer = byte_level_tokenizer(unknown, **settings)
    bound = bound_of(tokenizer)
    assert bound is not None
    return tokenizer, bound


runs = st.builds(lambda piece, times: piece * times, st.sampled_from(PIECES), st.integers(1, 200))
texts = st.lists(st.one_of(runs, st.text(max_size=20)), max_size=8).map("".join)


@given(text=texts, unknown=st.sampled_from([b"", UNKNOWN]), fused=st.booleans())
@settings(max_examples=400, deadline=None)
def test_no_text_has_fewer_tokens_than_its_bound(text: str, unknown: bytes, fused: bool) -> None:
    tokenizer, bound = bounded_tokenizer(unknown, fused)
    assert len(tokenizer.encode_batch_fast([text])[0].ids) >= bound.fewest_tokens(text)
