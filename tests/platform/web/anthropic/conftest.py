"""A template that reads how much to think, and clients of Anthropic."""

from typing import Any

import pytest
from tests.platform.conftest import CHATML, build_tokenizer


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """Its template knows the effort, so that none is accepted."""
    return build_tokenizer(CHATML + "{# reasoning_effort #}")
