"""The demo model, fetched once into the checkout's test cache."""

from pathlib import Path

import pytest

from loraplex.platform.demo.model import ensure_demo_model

CACHE = Path(__file__).resolve().parents[3] / ".loraplex-test"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ensure_demo_model(CACHE)
