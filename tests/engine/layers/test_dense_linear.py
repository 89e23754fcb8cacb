"""Batch invariance: a row's product does not depend on the other rows, bitwise, in the type of the model."""

import pytest
import torch

from loraplex.engine.layers.linear import Linear

ROWS = 64


@pytest.mark.parametrize("inputs", [64, 576, 1024, 1088, 1536, 3072])
def test_a_row_is_bitwise_the_same_alone_and_in_a_batch(inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(576, inputs, generator=generator) * inputs**-0.5
    linear = Linear(weight.bfloat16())
    x = torch.randn(ROWS, inputs, generator=generator).bfloat16()
    with torch.inference_mode():
        together = linear(x)
        for count in (1, 2, 3, 17):
            for begin in range(0, ROWS - count, count):
                rows = slice(begin, begin + count)
                assert torch.equal(linear(x[rows]), together[rows]), (count, begin)


def test_bias_is_added_and_shapes_hold() -> None:
    weight, bias = torch.randn(6, 4), torch.randn(6)
    x = torch.randn(3, 4)
    linear = Linear(weight, bias)
    assert (linear.inputs, linear.outputs) == (4, 6)
    torch.testing.assert_close(linear(x), x @ weight.T + bias)
