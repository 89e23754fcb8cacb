"""Plans lead to the kernels that Triton would choose; what they need of a caller is checked at its first launch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engine.interpreter_runs import INTERPRETING

pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
def test_a_plan_is_what_the_binder_chooses(tmp_path: Path) -> None:
    """For sizes of 1, multiples of 16 and neither, dtypes, addresses, and absent operands."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.planned_launches"],
        check=False,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ".src"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    calls, kernels = map(int, done.stdout.split())
    assert calls == 16
    assert 11 <= kernels < calls


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("operands", "constants"),
    [((1, 2), {"block": 4}), ((1, 2, 3), {}), ((1,), {"size": 2, "block": 4}), ((1, 2), {})],
    ids=["right", "constant by position", "operand by name", "constant missing"],
)
def test_operands_come_by_position_and_constants_by_name(
    operands: tuple[int, ...], constants: dict[str, int], request: pytest.FixtureRequest
) -> None:
    import triton
    import triton.language as tl

    from loraplex.engine.kernels.triton import launch_plans

    def kernel(x, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    jit: Any = triton.jit(kernel)
    if request.node.callspec.id == "right":
        assert launch_plans._tail(jit, len(operands), constants) == (4,)
    else:
        with pytest.raises(TypeError, match="by position"):
            launch_plans._tail(jit, len(operands), constants)
