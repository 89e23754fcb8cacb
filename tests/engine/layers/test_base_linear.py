"""Products of a fixed number of rows: the same values, and the same bits whatever the other rows."""

import pytest
import torch

from loraplex.engine.layers.base_linear import ROWS, FixedRowsLinear
from loraplex.engine.layers.linear import Linear


@pytest.fixture
def linear() -> FixedRowsLinear:
    torch.manual_seed(0)
    return FixedRowsLinear(Linear(torch.randn(24, 1500), torch.randn(24)))


@pytest.mark.parametrize("rows", [0, 1, 7, ROWS, ROWS + 1, 3 * ROWS])
def test_equals_the_layer_it_wraps(linear: FixedRowsLinear, rows: int) -> None:
    x = torch.randn(rows, 1500)
    y = linear(x)
    assert y.shape == (rows, 24) and (linear.inputs, linear.outputs) == (1500, 24)
    torch.testing.assert_close(y, linear._base(x), rtol=1e-4, atol=1e-4)


def test_a_row_has_the_same_bits_in_any_batch(linear: FixedRowsLinear) -> None:
    x = torch.randn(130, 1500)
    together = linear(x)
    for row in (0, 1, 63, 64, 129):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
        assert torch.equal(linear(x[row:].contiguous())[0], together[row])
