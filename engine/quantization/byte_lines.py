"""Integers of a weight in the order a CPU streams them: lines of 64 bytes, 16 outputs by four bytes each.

Invariant: line l of block b holds, for each output 16b + o, inputs 4l..4l+3 (8 bits), or 8l..8l+3 in the low and
8l+4..8l+7 in the high nibbles (4 bits). Every group begins with a line of its own.
"""

import torch
import torch.nn.functional as F

LANES = 16
"""Outputs of a block."""
_QUAD = 4


def inputs_of_line(bits: int) -> int:
    """Inputs that one line holds of each output."""
    return _QUAD * 8 // bits


def pack_lines(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """[outputs, inputs] uint8, inputs a multiple of `inputs_of_line` -> [blocks, lines, 64] uint8; padded with zeros."""
    padded = F.pad(integers, (0, 0, 0, -integers.shape[0] % LANES))
    parts = padded.view(-1, LANES, padded.shape[1] // inputs_of_line(bits), 8 // bits, _QUAD)
    line = parts[..., 0, :] if bits == 8 else parts[..., 0, :] | parts[..., 1, :] << 4
    return line.transpose(1, 2).flatten(2).contiguous()


def unpack_lines(packed: torch.Tensor, bits: int, outputs: int) -> torch.Tensor:
    """The inverse: [blocks, lines, 64] -> [outputs, inputs] uint8."""
    blocks, lines, _ = packed.shape
    line = packed.view(blocks, lines, LANES, _QUAD).transpose(1, 2)
    parts = line[..., None, :] if bits == 8 else torch.stack((line & 15, line >> 4), dim=3)
    return parts.reshape(blocks * LANES, -1)[:outputs]


def block_parameters(parameters: torch.Tensor) -> torch.Tensor:
    """Scales or zeros [groups, outputs] -> [blocks, groups, 16]; padded with zeros."""
    groups, outputs = parameters.shape
    padded = F.pad(parameters, (0, -outputs % LANES))
    return padded.view(groups, -1, LANES).transpose(0, 1).contiguous()


def unblock_parameters(parameters: torch.Tensor, outputs: int) -> torch.Tensor:
    """The inverse: [blocks, groups, 16] -> [groups, outputs]."""
    return parameters.transpose(0, 1).flatten(1)[:, :outputs]
