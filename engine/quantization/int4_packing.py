"""Packs two 4-bit integers per byte, in tiles that a kernel reads whole and unpacks without moving values between lanes.

Invariant: byte i of tile t, output n holds inputs t*span + i (low nibble) and t*span + span/2 + i (high nibble).
"""

import torch
import torch.nn.functional as F

from loraplex.engine.quantization.groups import span_of


def pack_nibbles(integers: torch.Tensor, group_size: int) -> torch.Tensor:
    """[outputs, inputs] uint8 of 0..15 -> [tiles, outputs, span/2] uint8; zeros beyond the inputs."""
    span = span_of(group_size)
    padded = F.pad(integers, (0, -integers.shape[1] % span))
    low, high = padded.view(padded.shape[0], -1, 2, span // 2).unbind(2)
    return torch.bitwise_or(low, high << 4).transpose(0, 1).contiguous()


def unpack_nibbles(packed: torch.Tensor, group_size: int, inputs: int) -> torch.Tensor:
    """The inverse of `pack_nibbles`: [tiles, outputs, span/2] -> [outputs, inputs] uint8."""
    halves = torch.stack((packed & 15, packed >> 4), dim=2).transpose(0, 1)
    return halves.flatten(1)[:, :inputs].contiguous()
