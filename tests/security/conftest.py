"""What the tests of attacks attack: the tokenizer and the gateway of the platform's own tests."""

from tests.platform.conftest import chat_tokenizer, tokenizer_with_template
from tests.platform.web.gateway import start_gateway

__all__ = ["chat_tokenizer", "start_gateway", "tokenizer_with_template"]
