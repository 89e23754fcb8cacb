"""Loads the base model's tokenizer from local files, without running code of the model.

Invariant: a folder with tokenizer.json is read without importing torch, which the gateway process does not need.
"""

from pathlib import Path
from typing import Any

from loraplex.platform.startup_errors import StartError


def load_tokenizer(model_path: str) -> Any:
    """Load a fast tokenizer of transformers from a folder or a `.gguf` file. Raises `StartError`."""
    path = Path(model_path)
    try:
        tokenizer = _read(path)
    except (OSError, ValueError, KeyError) as error:
        raise StartError(f"{path} holds no usable tokenizer: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise StartError(f"{path} holds no fast tokenizer (tokenizer.json)")
    return tokenizer


def _read(path: Path) -> Any:
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    if path.is_file():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
