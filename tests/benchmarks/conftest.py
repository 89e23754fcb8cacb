"""The tiny model of `tests/platform/bench`, for this folder's tests."""

from tests.platform.bench.conftest import tiny_model
from tests.platform.conftest import chat_tokenizer

__all__ = ["chat_tokenizer", "tiny_model"]
