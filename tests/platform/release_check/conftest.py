"""The tiny model of the benchmarks' tests."""

from tests.platform.bench.conftest import tiny_model

__all__ = ["tiny_model"]
