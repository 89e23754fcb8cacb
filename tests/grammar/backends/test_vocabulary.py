"""What a vocabulary knows of a tokenizer."""

from pathlib import Path

import pytest

from loraplex.grammar.backends.vocabulary import END_TEXT, Vocabulary, byte_vocabulary, load_vocabulary
from loraplex.grammar.errors import GrammarInvalid


def test_one_token_for_each_byte() -> None:
    vocabulary = byte_vocabulary()
    assert vocabulary.vocab_size == 257
    assert vocabulary.end_token_ids == {256}
    assert vocabulary.special_tokens == {END_TEXT: 256}
    text = 'a"\n€😀\x00'
    ids = vocabulary.tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert vocabulary.tokenizer.decode(ids) == text


def test_padding_has_no_text(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.encoded_tokens) == vocabulary.vocab_size - 13
    assert vocabulary.bitmask_words * 32 >= vocabulary.vocab_size > (vocabulary.bitmask_words - 1) * 32


def test_a_text_token_is_not_special(vocabulary: Vocabulary) -> None:
    assert "<tool_call>" not in vocabulary.special_tokens
    assert vocabulary.special_tokens.keys() == {"<|end|>", "<|stop|>", "<|im_start|>", "[TOOL_CALLS]"}


def test_a_folder_is_read(tmp_path: Path, vocabulary: Vocabulary) -> None:
    (tmp_path / "tokenizer.json").write_text(vocabulary.tokenizer_json, "utf-8")
    assert load_vocabulary(tmp_path, vocabulary.vocab_size, vocabulary.end_token_ids) == vocabulary
    with pytest.raises(OSError):
        load_vocabulary(tmp_path / "elsewhere", 1, frozenset({0}))


@pytest.mark.parametrize("ends", [frozenset[int](), frozenset({257}), frozenset({-1})])
def test_end_tokens_are_checked(ends: frozenset[int]) -> None:
    with pytest.raises(ValueError, match="end_token_ids"):
        Vocabulary(byte_vocabulary().tokenizer_json, 257, ends)


def test_tokens_by_text_or_id(vocabulary: Vocabulary) -> None:
    token_id = vocabulary.special_tokens["[TOOL_CALLS]"]
    assert vocabulary.token_id("[TOOL_CALLS]") == vocabulary.token_id(token_id) == token_id
    for unknown in ("[NO_SUCH]", vocabulary.vocab_size - 1, -1):
        with pytest.raises(GrammarInvalid, match="no token"):
            vocabulary.token_id(unknown)


@pytest.mark.parametrize(
    ("decoder", "spelling"),
    [
        ('{"type": "ByteLevel"}', "BYTE_LEVEL"),
        (
            '{"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}',
            "BYTE_FALLBACK",
        ),
        ("null", "RAW"),
    ],
)
def test_spelling_is_read_from_the_decoder(decoder: str, spelling: str) -> None:
    assert Vocabulary(f'{{"decoder": {decoder}}}', 1, frozenset({0})).spelling == spelling
