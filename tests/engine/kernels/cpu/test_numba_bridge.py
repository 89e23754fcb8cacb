"""Compiled regions with fewer threads than requested, and machine code that is older than its sources or made again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.kernels.cpu import bfloat16_linear, integer_linear, integer_tile, numba_bridge
from loraplex.engine.kernels.cpu.numba_bridge import enclosed_constants

pytestmark = pytest.mark.skipif(not numba_bridge.is_available(), reason="this CPU has no compiled body")

PRODUCT = """
import torch
from loraplex.engine.kernels.cpu.integer_linear import integer_linear
from loraplex.engine.kernels.cpu.integer_weight import lay_out
from loraplex.engine.kernels.cpu.silu_mul import silu_mul
from loraplex.engine.quantization.quantized_weight import quantize_int8

torch.use_deterministic_algorithms(True)  # what is allocated is NaN until it is written
assert torch.get_num_threads() == 2
weight = lay_out(quantize_int8(torch.ones(256, 1024)), None)
assert not integer_linear(torch.ones(3, 1024).bfloat16(), weight).isnan().any()
assert not silu_mul(torch.ones(64, 4096)).isnan().any()
"""


@pytest.mark.parametrize("bound", ["OMP_THREAD_LIMIT=1", "OMP_DYNAMIC=true"])
def test_fewer_threads_do_all_of_the_work(bound: str) -> None:
    name, _, value = bound.partition("=")
    environment = {**os.environ, "OMP_NUM_THREADS": "2", name: value}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_machine_code_is_as_new_as_every_module_it_is_made_of(tmp_path: Path) -> None:
    """A kernel keeps its own module when only code that it calls is changed, as an upgrade does."""
    package = tmp_path / "loraplex"
    root = Path(integer_tile.__file__).parents[3]
    for path in root.iterdir():
        if path.name != "engine" and path.suffix != ".pyc":
            (package / path.name).parent.mkdir(exist_ok=True)
            (package / path.name).symlink_to(path.resolve())
    shutil.copytree(
        root / "engine", package / "engine", ignore=shutil.ignore_patterns("*.nb?", "__pycache__")
    )
    tile = package / "engine" / "kernels" / "cpu" / "integer_tile.py"
    assert product(tmp_path) == 64
    bias = "bias = code.load(builder, weights, FLOATS, LINE_BYTES)"
    assert bias in tile.read_text()
    tile.write_text(tile.read_text().replace(bias, "bias = code.constant(FLOATS, 1000.0)"))
    assert product(tmp_path) == 1064


@pytest.mark.parametrize(
    ("kernel", "variant", "other"),
    [
        (bfloat16_linear._kernel, (0,), (1,)),
        (integer_linear._kernel, (1, 0, 0, 0), (1, 0, 1, 0)),
    ],
    ids=["bfloat16", "integer"],
)
def test_a_kernel_is_compiled_once_for_all_processes(
    kernel: Any, variant: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """Functions are made again, as in another process, so only what they enclose can find their machine code."""
    make = kernel.__wrapped__
    made = make(*variant)._compiled
    assert make(*variant)._compiled.cache_hits == 1
    assert enclosed_constants(made._pyfunc) != enclosed_constants(make(*other)._compiled._pyfunc)


def product(path: Path) -> float:
    code = """
import torch
from loraplex.engine.kernels.cpu.integer_linear import integer_linear
from loraplex.engine.kernels.cpu.integer_weight import lay_out
from loraplex.engine.quantization.quantized_weight import quantize_int8

weight = lay_out(quantize_int8(torch.ones(16, 64)), None)
print(float(integer_linear(torch.ones(1, 64).bfloat16(), weight)[0, 0]))
"""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True, timeout=120
    )
    return float(done.stdout)
