"""The demo model fetched once, and one live `loraplex serve --demo` for the whole run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.live_server import LiveServer, serving

from loraplex.platform.demo.model import ensure_demo_model

CACHE = Path(__file__).resolve().parents[2] / ".loraplex-test"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-parity", action="store_true", help="24 requests of 64 tokens instead of 10 requests of 24"
    )
    parser.addoption(
        "--quantization", choices=("none", "int8", "int4"), default="none", help="bits of the base model"
    )
    parser.addoption("--full-grammar", action="store_true", help="1,000 answers of 50 forms instead of 60")
    parser.addoption(
        "--full-admission", action="store_true", help="1,000 answers beside disturbances instead of 120"
    )
    parser.addoption("--soak-minutes", type=float, default=30.0, help="how long the soak of --long runs")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ensure_demo_model(CACHE)


@pytest.fixture(scope="session")
def quantization(request: pytest.FixtureRequest) -> str:
    """The quantization of the base model in this run."""
    return str(request.config.getoption("--quantization"))


@pytest.fixture(scope="session")
def demo(
    demo_model: Path, quantization: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """The demo as a user starts it, but in fp32, where a row's answer can be compared exactly.

    A quantized base computes in bfloat16, since float32 on a CPU turns the integers back.

    Its end is checked too: status 0 and no process left.
    """
    folder = tmp_path_factory.mktemp("demo")
    dtype = "float32" if quantization == "none" else "bfloat16"
    options = ("--port", "0", "--dtype", dtype, "--quantization", quantization)
    with serving(folder, demo_model, *options) as server:
        yield server
        server.stop()
