"""What a request allows or favours: grammar bitmask, logit bias, minimum length. All in place on float32 logits.

Invariant: a forbidden token is -inf and nothing later makes it finite again.
"""

import math

import torch
from torch import Tensor

from loraplex.engine.sequence import Sequence

_WORD_BITS = 32


def bit_positions(device: torch.device) -> Tensor:
    """int32 [32]: what `apply_bitmask` shifts by, made once."""
    return torch.arange(_WORD_BITS, dtype=torch.int32, device=device)


def apply_bitmask(
    logits: Tensor, rows: list[int], bitmask: Tensor, mask_rows: list[int], positions: Tensor
) -> None:
    """Forbid in `logits` [rows, vocab], at `rows`, the tokens whose bit is 0 in `bitmask` at `mask_rows`.

    `bitmask` is int32 [any, ceil(vocab / 32)]; bits beyond the vocabulary are not read.
    """
    words = bitmask[torch.tensor(mask_rows, device=bitmask.device)].to(logits.device)
    forbidden = ((words.unsqueeze(-1) >> positions) & 1) == 0
    forbidden = forbidden.view(len(rows), -1)[:, : logits.shape[1]]
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, -math.inf)


def apply_bias(logits: Tensor, rows: list[int], biases: list[dict[int, float]]) -> None:
    """Add each row's bias, token id -> number, to its logits."""
    vocab = logits.shape[1]
    index = [row * vocab + token for row, bias in zip(rows, biases, strict=True) for token in bias]
    values = [value for bias in biases for value in bias.values()]
    logits.view(-1)[torch.tensor(index, device=logits.device)] += torch.tensor(values, device=logits.device)


def is_below_minimum(sequence: Sequence) -> bool:
    """True while the next token may not end the sequence."""
    return sequence.num_output_tokens < sequence.request.sampling.min_tokens


def apply_minimum_length(
    logits: Tensor, rows: list[int], sequences: list[Sequence], eos_token_ids: frozenset[int]
) -> None:
    """Forbid the tokens that would end these sequences: their stop tokens, and end-of-sequence unless ignored.

    A row that has no other token left keeps them: a finished grammar allows nothing else, and it wins over `min_tokens`.
    """
    endings = [_ending_tokens(sequence, eos_token_ids) for sequence in sequences]
    where = torch.tensor(
        [position for position, ending in enumerate(endings) for _ in ending],
        dtype=torch.long,
        device=logits.device,
    )
    tokens = torch.tensor(
        [token for ending in endings for token in ending], dtype=torch.long, device=logits.device
    )
    index = torch.tensor(rows, device=logits.device)
    before = logits[index]
    after = before.clone()
    after[where, tokens] = -math.inf
    nothing_left = after.amax(dim=-1, keepdim=True) == -math.inf
    logits[index] = torch.where(nothing_left, before, after)


def _ending_tokens(sequence: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    sampling = sequence.request.sampling
    stops = frozenset(sampling.stop_token_ids)
    return stops if sampling.ignore_eos else stops | eos_token_ids
