"""The gateway of `tests/platform/web`, which the recorded requests are sent to."""

from typing import Any

import pytest
from tests.platform.conftest import CHATML, build_tokenizer
from tests.platform.web.gateway import start_gateway

__all__ = ["start_gateway"]

THINKS = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """Its template reads a variable, as those of models that think do; it has the words that answer decisions."""
    tokenizer = build_tokenizer(CHATML + THINKS)
    tokenizer.add_tokens(["Yes", "No"])
    return tokenizer
