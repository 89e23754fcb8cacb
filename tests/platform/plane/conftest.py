"""The gateway of the inference plane's tests: all planes are one application."""

from tests.platform.openai.conftest import start_gateway

__all__ = ["start_gateway"]
