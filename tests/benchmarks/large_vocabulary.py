"""A byte-level BPE tokenizer (Sennrich et al. 2016) of a given size, trained on source texts of the installed packages.

Its pre-tokenizer, decoder and control tokens are those of another tokenizer.
"""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers, trainers

from loraplex.platform.bench.report import BenchFailed

TEXT_BYTES = 64 << 20
MAX_FILE_BYTES = 1 << 19
MAX_TOKEN_CHARACTERS = 24
SUFFIXES = (".py", ".md", ".txt", ".pyi")


def larger_tokenizer(tokenizer_json: str, size: int, text_bytes: int = TEXT_BYTES) -> str:
    """The text of a `tokenizer.json` of exactly `size` tokens. Raises `BenchFailed` if the texts are too short for that."""
    tokenizer = Tokenizer.from_str(json.dumps(json.loads(tokenizer_json) | {"post_processor": None}))
    added = tokenizer.get_added_tokens_decoder()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        special_tokens=[added[token_id] for token_id in sorted(added)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_TOKEN_CHARACTERS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(installed_texts(text_bytes), trainer)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != size:
        raise BenchFailed(f"the texts at hand make {found} tokens, {size} are needed")
    return tokenizer.to_str()


def installed_texts(max_bytes: int) -> Iterator[str]:
    """Texts of the standard library and the installed packages, in alphabetical order, `max_bytes` in all."""
    left = max_bytes
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                continue
            yield path.read_text("utf-8", errors="ignore")
            left -= path.stat().st_size
            if left <= 0:
                return
