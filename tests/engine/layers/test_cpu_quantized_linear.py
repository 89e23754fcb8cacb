"""Which layer a quantized weight gets on a CPU, and that the integer layer keeps no second form of it."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from loraplex.engine.kernels.cpu import numba_bridge
from loraplex.engine.layers.cpu_linear import IntegerLinear
from loraplex.engine.layers.linear import Linear, make_linear
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, quantize_int4, quantize_int8

pytestmark = pytest.mark.skipif(not numba_bridge.is_available(), reason="this CPU has no compiled body")


def test_a_type_of_16_bits_multiplies_integers_and_float32_does_not() -> None:
    weight = quantize_int8(torch.randn(48, 64))
    assert isinstance(make_linear(weight, None, torch.bfloat16), IntegerLinear)
    assert isinstance(make_linear(weight, None, torch.float16), IntegerLinear)
    assert isinstance(make_linear(weight, None, torch.float32), Linear)


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_the_loaded_form_is_freed_and_the_layers_is_hardly_larger(
    quantize: Callable[[torch.Tensor], QuantizedWeight],
) -> None:
    weight = quantize(torch.randn(96, 1024, generator=torch.Generator().manual_seed(2)))
    size, loaded = weight.num_bytes, weakref.ref(weight.packed)
    layer = make_linear(weight, None, torch.bfloat16)
    del weight
    gc.collect()
    assert loaded() is None
    assert isinstance(layer, IntegerLinear)
    # Scales as float32 and a bias, where there were bfloat16 scales alone.
    assert size < layer.num_bytes < 1.06 * size


def test_rows_that_are_not_contiguous_and_a_bias() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = quantize_int8(torch.randn(48, 64, generator=generator) / 8)
    bias = torch.randn(48, generator=generator).bfloat16()
    layer = make_linear(weight, bias, torch.bfloat16)
    x = torch.randn(7, 128, generator=generator).bfloat16()[:, ::2]
    assert (layer.inputs, layer.outputs) == (64, 48)
    expected = make_linear(weight, bias.float(), torch.float32)(x.float())
    torch.testing.assert_close(layer(x).float(), expected, atol=0.05, rtol=0.02)
