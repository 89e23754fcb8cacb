"""A weight in 8 or 4 bits, laid out as the CPU's integer product reads it: one run of bytes, from first to last.

Invariant: integers are stored unsigned, `excess` larger than they are; what is beyond the weight's shape is zero.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from loraplex.engine.kernels.cpu.integer_tile import GROUP
from loraplex.engine.kernels.cpu.llvm_vectors import LANES
from loraplex.engine.quantization.int4_packing import unpack_nibbles
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat

_EXCESS_INT8, _EXCESS_INT4, _EXCESS_ZEROS = 128, 8, 15


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight [outputs, inputs] and its bias in tiles of 16 outputs, see `integer_tile.multiply_tile`.

    tiles: uint8 [tiles, bytes of a tile]. group_size: inputs that share a scale, a multiple of 32.
    """

    tiles: torch.Tensor
    has_nibbles: bool
    has_zeros: bool
    group_size: int
    weight_groups: int
    excess: int
    shape: tuple[int, int]

    @property
    def outputs(self) -> int:
        return self.shape[0]

    @property
    def inputs(self) -> int:
        return self.shape[1]

    @property
    def padded_inputs(self) -> int:
        return self.weight_groups * self.group_size

    @property
    def padded_outputs(self) -> int:
        return self.tiles.shape[0] * LANES


def lay_out(weight: QuantizedWeight, bias: torch.Tensor | None) -> IntegerWeight:
    """Lay out an int8 or int4 `weight` on a CPU, and `bias` [outputs] of any float type or None. ValueError for other group
    sizes.
    """
    has_nibbles, has_zeros = weight.format is WeightFormat.INT4, weight.zeros is not None
    group_size = weight.group_size + -weight.group_size % GROUP
    weight_groups = weight.scales.shape[0]
    if weight_groups > 1 and group_size != weight.group_size:
        raise ValueError(f"group_size is {weight.group_size}, which is no multiple of {GROUP}")
    integers, excess = _unsigned(weight, has_zeros)
    # [outputs, inputs] -> [tiles, weight groups, lines, 16, 4], with nibbles [.., lines, 2, 16, 4]
    padding = (0, weight_groups * group_size - weight.inputs, 0, -weight.outputs % LANES)
    padded = F.pad(integers, padding, value=0 if has_zeros else excess)
    quads = padded.view(-1, LANES, weight_groups, group_size // 4, 4).permute(0, 2, 3, 1, 4)
    if has_nibbles:
        pairs = quads.reshape(*quads.shape[:2], -1, 2, LANES, 4)
        quads = torch.bitwise_or(pairs[:, :, :, 0], pairs[:, :, :, 1] << 4)
    parts = [_bytes_of(weight.scales.float()), quads.flatten(2)]
    if weight.zeros is not None:
        added = _by_tile(_EXCESS_ZEROS - weight.zeros)
        parts.insert(1, added[..., None].expand(*added.shape, 4).flatten(2))
    added_bias = torch.zeros(weight.outputs) if bias is None else bias.float()
    tiles = torch.cat((_bytes_of(added_bias[None]).flatten(1), torch.cat(parts, dim=2).flatten(1)), dim=1)
    return IntegerWeight(
        tiles, has_nibbles, has_zeros, group_size, weight_groups, excess, (weight.outputs, weight.inputs)
    )


def _unsigned(weight: QuantizedWeight, has_zeros: bool) -> tuple[torch.Tensor, int]:
    """Return uint8 [outputs, inputs], and the excess of each integer after its group's zero is subtracted."""
    if weight.format is WeightFormat.INT8:
        return (weight.packed.view(torch.uint8) ^ 0x80), _EXCESS_INT8
    return (
        unpack_nibbles(weight.packed, weight.group_size, weight.inputs),
        _EXCESS_ZEROS if has_zeros else _EXCESS_INT4,
    )


def _by_tile(parameters: torch.Tensor) -> torch.Tensor:
    """[groups, outputs] -> [tiles, groups, 16]"""
    padded = F.pad(parameters, (0, -parameters.shape[1] % LANES))
    return padded.view(len(padded), -1, LANES).transpose(0, 1)


def _bytes_of(parameters: torch.Tensor) -> torch.Tensor:
    """float [groups, outputs] -> uint8 [tiles, groups, 64]"""
    return _by_tile(parameters).contiguous().view(torch.uint8)
