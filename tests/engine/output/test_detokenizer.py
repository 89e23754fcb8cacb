"""Incremental text against decoding at once, over tokenizers trained here."""

import random
from collections.abc import Iterator

import pytest
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


@pytest.fixture(scope="module")
def byte_level_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def fallback_tokenizer() -> Tokenizer:
    return byte_fallback(metaspace=False)


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


@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_equals_decoding_at_once_for_any_tokens(
    byte_level_tokenizer: Tokenizer, skip: bool
) -> None:
    rng = random.Random(1)
    size = byte_level_tokenizer.get_vocab_size()
    high_bytes = [
        token for token in range(size) if "\ufffd" in byte_level_tokenizer.decode([token], False)
    ]  # fragments of characters
    for _ in range(600):
        length = rng.randrange(1, 60)
        source = high_bytes if rng.random() < 0.5 else range(size + 3)
        ids = [rng.choice(source) if rng.random() < 0.8 else rng.randrange(size) for _ in range(length)]
        assert "".join(pieces(byte_level_tokenizer, ids, skip)) == byte_level_tokenizer.decode(ids, skip)


@pytest.mark.parametrize("metaspace", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_byte_fallback_equals_decoding_at_once_when_bytes_are_utf8(metaspace: bool, skip: bool) -> None:
    tokenizer = byte_fallback(metaspace)
    rng = random.Random(2)
    words = [token for token in range(tokenizer.get_vocab_size()) if not 4 <= token < 4 + 256]
    for _ in range(600):
        ids: list[int] = []
        for _ in range(rng.randrange(1, 25)):
            if rng.random() < 0.4:
                character = rng.choice("\n aé東😀")
                ids += [byte_id(tokenizer, byte) for byte in character.encode()]
            else:
                ids.append(rng.choice([*words, 10_000]))
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip), ids


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


def test_byte_fallback_reads_any_tokens_as_one_stream_of_bytes(fallback_tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(3, fallback_tokenizer.get_vocab_size()) for _ in range(40)]
        stream = b"".join(
            bytes([token - 4]) if 4 <= token < 260 else _piece(fallback_tokenizer, token).encode()
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
