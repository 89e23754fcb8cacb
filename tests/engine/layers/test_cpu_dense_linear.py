"""Which layer an unquantized weight gets on a CPU, and that it keeps no second form of it."""

import gc
import weakref

import pytest
import torch

from loraplex.engine.kernels.cpu import numba_bridge
from loraplex.engine.layers import cpu_linear
from loraplex.engine.layers.cpu_linear import BFloat16Linear
from loraplex.engine.layers.linear import Linear, make_linear

pytestmark = pytest.mark.skipif(not numba_bridge.is_available(), reason="this CPU has no compiled body")


@pytest.mark.parametrize("has_matrix_products", [False, True])
def test_bfloat16_is_compiled_unless_torch_has_matrix_instructions(
    has_matrix_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "has_matrix_products", lambda: has_matrix_products)
    layer = make_linear(torch.randn(48, 64).bfloat16(), None, torch.bfloat16)
    assert isinstance(layer, Linear if has_matrix_products else BFloat16Linear)
    assert isinstance(make_linear(torch.randn(48, 64), None, torch.float32), Linear)


def test_the_loaded_form_is_freed() -> None:
    weight = torch.randn(96, 1024).bfloat16()
    loaded = weakref.ref(weight)
    layer = BFloat16Linear(weight)
    del weight
    gc.collect()
    assert loaded() is None
    assert (layer.inputs, layer.outputs) == (1024, 96)


def test_rows_that_are_not_contiguous_and_a_bias() -> None:
    generator = torch.Generator().manual_seed(4)
    weight, bias = torch.randn(48, 64, generator=generator) / 8, torch.randn(48, generator=generator)
    weight, bias = weight.bfloat16(), bias.bfloat16()
    x = torch.randn(7, 128, generator=generator).bfloat16()[:, ::2]
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(BFloat16Linear(weight, bias)(x).double(), expected, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("inputs", [64, 576, 1088, 3072])
def test_it_computes_what_torch_does_to_the_rounding(inputs: int) -> None:
    """A model's figures and its adapters' probes compare with other CPUs, which may use torch's products."""
    generator = torch.Generator().manual_seed(inputs)
    weight = (torch.randn(576, inputs, generator=generator) * inputs**-0.5).bfloat16()
    x = torch.randn(17, inputs, generator=generator).bfloat16()
    torch.testing.assert_close(BFloat16Linear(weight)(x), Linear(weight)(x), atol=2e-3, rtol=2.0**-7)
