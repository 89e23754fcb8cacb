"""`fingerprint`: what of a server decides its answers, as one SHA-256: weights, tokenizer, chat template, generation
defaults, number formats and versions.

`model_digest` alone is what adapters are bound to: two servers of one digest may still send different prompt ids.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from loraplex.engine.checkpoints.digest import prefixed
from loraplex.engine.errors import ModelError

DOMAIN: Final = b"loraplex fingerprint v1"
TEXT_SUFFIXES: Final = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
"""Of files that transformers reads for a tokenizer of any kind, its chat templates and the generation defaults."""
TEMPLATES: Final = "additional_chat_templates"
DIGITS: Final = 16
"""Their 64 bits tell the servers of one fleet apart; adapters are bound to the whole `model_digest`."""


def fingerprint(path: str, model_digest: str, settings: Mapping[str, str]) -> str:
    """Return `fp_` and 16 hex digits, as responses name a server, for a located model: a folder, or a `.gguf` file, whose digest
    covers its tokenizer too.

    `settings` are what an engine was started with, by name. Reads no weights. Raises `ModelError`.
    """
    model = Path(path)
    files = [] if model.is_file() else [*model.glob("*"), *model.glob(f"{TEMPLATES}/*")]
    parts = {f"setting:{name}": value.encode() for name, value in settings.items()}
    try:
        for file in files:
            if file.suffix in TEXT_SUFFIXES and file.is_file():
                with file.open("rb") as content:
                    name = file.relative_to(model).as_posix()
                    parts[f"file:{name}"] = hashlib.file_digest(content, "sha256").digest()
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(prefixed(DOMAIN) + prefixed(bytes.fromhex(model_digest)))
    for name, part in sorted(parts.items()):
        digest.update(prefixed(name.encode()) + prefixed(part))
    return f"fp_{digest.hexdigest()[:DIGITS]}"
