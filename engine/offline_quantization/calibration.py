"""Records the second moments of a model's projection inputs on a text, which rounding can then take into account.

Invariant: recording does not change what the model computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loraplex.engine.layers.base_linear import BaseLinear
from loraplex.engine.models.decoder import Decoder


class InputMoments:
    """Sums of x x^T over all rows that a projection saw, float32 [inputs, inputs]."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """x [rows, inputs]."""
        rows = x.float()
        moments = rows.t() @ rows
        if name in self.sums:
            self.sums[name] += moments
        else:
            self.sums[name] = moments


class _Watched(BaseLinear):
    """A projection that reports its inputs."""

    def __init__(self, name: str, base: BaseLinear, moments: InputMoments) -> None:
        self.inputs, self.outputs = base.inputs, base.outputs
        self._name = name
        self._base = base
        self._moments = moments

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._moments.add(self._name, x)
        return self._base(x)


@contextmanager
def watched(decoder: Decoder) -> Iterator[InputMoments]:
    """Collect the inputs of every projection within the context."""
    moments = InputMoments()
    bases = {name: layer.base for name, layer in decoder.projections.items()}
    for name, layer in decoder.projections.items():
        layer.base = _Watched(name, layer.base, moments)
    try:
        yield moments
    finally:
        for name, layer in decoder.projections.items():
            layer.base = bases[name]
