"""Incremental text against decoding at once, over tokenizers trained here: one of each decoder that served models have."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from loraplex.engine.output.detokenizer import Detokenizer, TokenTexts

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and naïve café owners cheer.",
    "Größe, façade, 東京 and 大阪 are words; emoji 😀👍🏽 are not.",
    "def f(x):\n    return  x + 1\n\n\tprint(f(2))",
]
SPECIALS = ["<s>", "</s>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("two words", special=False)])
    return tokenizer


def _byte_fallback_vocabulary() -> dict[str, int]:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, limit_alphabet=40)
    trained.train_from_iterator(CORPUS[:1], trainer)
    pieces = [
        *SPECIALS,
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "▁▁▁▁",
        "▁fox",
        "\ufffd",
    ]
    pieces += [piece for piece in sorted(trained.get_vocab()) if piece not in pieces]
    return {piece: index for index, piece in enumerate(pieces)}


def byte_fallback(metaspace: bool) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(_byte_fallback_vocabulary(), [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.add_special_tokens(SPECIALS)
    if metaspace:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    return tokenizer


FALLBACK_BYTES = range(len(SPECIALS) + 1, len(SPECIALS) + 257)
"""Token ids of `<0x00>` to `<0xFF>`."""
FALLBACK = {metaspace: byte_fallback(metaspace) for metaspace in (True, False)}


@pytest.fixture(scope="module")
def byte_level_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def fallback_tokenizer() -> Tokenizer:
    return FALLBACK[False]


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> Iterator[str]:
    detokenizer = Detokenizer(TokenTexts(tokenizer), skip)
    for token in ids:
        yield detokenizer.push(token)
    yield detokenizer.flush()


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    token = tokenizer.token_to_id(piece)
    assert token is not None
    return token


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return id_of(tokenizer, f"<0x{byte:02X}>")


@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_equals_decoding_at_once_for_any_tokens(
    byte_level_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    """Whole words, fragments of characters, special and unknown tokens."""
    size = byte_level_tokenizer.get_vocab_size()
    fragments = [token for token in range(size) if "\ufffd" in byte_level_tokenizer.decode([token], False)]
    ids = data.draw(st.lists(st.integers(0, size + 2) | st.sampled_from(fragments), max_size=60))
    assert "".join(pieces(byte_level_tokenizer, ids, skip)) == byte_level_tokenizer.decode(ids, skip)


@pytest.mark.parametrize("metaspace", [True, False])
@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_byte_fallback_equals_decoding_at_once_when_bytes_are_utf8(
    metaspace: bool, data: st.DataObject, skip: bool
) -> None:
    tokenizer = FALLBACK[metaspace]
    words = [[token] for token in range(tokenizer.get_vocab_size() + 3) if token not in FALLBACK_BYTES]
    characters = [[byte_id(tokenizer, byte) for byte in each.encode()] for each in "\n aé東😀"]
    parts = data.draw(st.lists(st.sampled_from(words) | st.sampled_from(characters), max_size=25))
    ids = [token for part in parts for token in part]
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def test_byte_fallback_keeps_valid_characters_of_a_broken_run(fallback_tokenizer: Tokenizer) -> None:
    word = id_of(fallback_tokenizer, "▁")
    run = [byte_id(fallback_tokenizer, byte) for byte in (*b"a\n", *"é".encode(), 0xFF, 0xF0, 0x9F)]
    assert list(pieces(fallback_tokenizer, [*run, word])) == [
        "a",
        "\n",
        "",
        "é",
        "\ufffd",
        "",
        "",
        "\ufffd ",
        "",
    ]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_byte_fallback_reads_any_tokens_as_one_stream_of_bytes(
    fallback_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokens = st.integers(len(SPECIALS), fallback_tokenizer.get_vocab_size() - 1) | st.sampled_from(
        FALLBACK_BYTES
    )
    ids = data.draw(st.lists(tokens, max_size=40))
    stream = b"".join(
        bytes([token - FALLBACK_BYTES.start])
        if token in FALLBACK_BYTES
        else _piece(fallback_tokenizer, token).encode()
        for token in ids
    )
    expected = stream.decode("utf-8", "replace").removeprefix(" ")
    assert "".join(pieces(fallback_tokenizer, ids)) == expected


def _piece(tokenizer: Tokenizer, token: int) -> str:
    piece = tokenizer.id_to_token(token)
    assert piece is not None
    return piece.replace("▁", " ")


def test_no_replacement_character_for_an_incomplete_one(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("🦜 ok 🦜").ids
    seen = list(pieces(byte_level_tokenizer, ids))
    assert "".join(seen) == "🦜 ok 🦜"
    assert not any("\ufffd" in piece for piece in seen)


def test_an_incomplete_character_comes_out_at_the_end(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("a🦜").ids[:-1]
    *before, last = pieces(byte_level_tokenizer, ids)
    assert "".join(before) == "a"
    assert last == "\ufffd"


def test_leading_space_depends_on_the_prompt(fallback_tokenizer: Tokenizer) -> None:
    texts = TokenTexts(fallback_tokenizer)
    word = id_of(fallback_tokenizer, "▁fox")
    special = id_of(fallback_tokenizer, "<s>")
    emoji = [byte_id(fallback_tokenizer, byte) for byte in "😀".encode()]
    assert not Detokenizer(texts).push(word).startswith(" ")
    assert not Detokenizer(texts, prompt_token_ids=[special]).push(word).startswith(" ")
    continued = Detokenizer(texts, prompt_token_ids=[special, word, *emoji, special])
    assert continued.push(word).startswith(" f")


class _CountingDecoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.longest = 0
        self.decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def id_to_token(self, id: int) -> str | None:
        return self._tokenizer.id_to_token(id)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


@pytest.mark.parametrize("text", ["The quick brown fox ", "\xff\xfe"])
def test_the_cost_of_a_token_does_not_grow(byte_level_tokenizer: Tokenizer, text: str) -> None:
    """Neither for ordinary text nor for an endless stream of invalid bytes."""
    alphabet = byte_level_tokenizer.encode(text).ids
    invalid = id_of(byte_level_tokenizer, "ÿ")
    ids = (alphabet if text.isascii() else [invalid]) * 2000
    decoder = _CountingDecoder(byte_level_tokenizer)
    detokenizer = Detokenizer(TokenTexts(decoder))
    joined = "".join([detokenizer.push(token) for token in ids]) + detokenizer.flush()
    assert joined == byte_level_tokenizer.decode(ids)
    assert decoder.longest <= 16
    assert decoder.decoded < 16 * len(ids)
