"""Compiled regions where OpenMP gives fewer threads than were asked for: nothing stays unwritten."""

import os
import subprocess
import sys

import pytest

from loraplex.engine.kernels.compiled import machine

pytestmark = pytest.mark.skipif(not machine.is_available(), reason="this CPU has no compiled body")

PRODUCT = """
import torch
from loraplex.engine.kernels.compiled.integer_linear import integer_linear
from loraplex.engine.kernels.compiled.integer_weight import lay_out
from loraplex.engine.kernels.compiled.silu_mul import silu_mul
from loraplex.engine.quantization.weight import quantize_int8

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
