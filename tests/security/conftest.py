"""What the tests of attacks attack: the tokenizer and the gateway of the platform's own tests."""

from tests.platform.api.conftest import start_gateway
from tests.platform.conftest import chat_tokenizer, tokenizer_with_template

__all__ = ["chat_tokenizer", "start_gateway", "tokenizer_with_template"]
