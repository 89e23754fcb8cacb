"""The bitmask of a grammar in torch."""

import math

import torch

WORD_BITS = 32


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set to -inf in place, in row `rows[i]` of `logits`, the tokens whose bit is 0 in row i of `bitmask`.

    logits [any, vocab], any float type, contiguous; rows int64 [masked]; bitmask int32 [masked, ceil(vocab / 32)], all
    on one device. Bit b of word w is token 32 w + b; bits beyond the vocabulary are not read.
    """
    positions = torch.arange(WORD_BITS, dtype=torch.int32, device=bitmask.device)
    forbidden = ((bitmask.unsqueeze(-1) >> positions) & 1) == 0
    forbidden = forbidden.view(len(rows), -1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)
