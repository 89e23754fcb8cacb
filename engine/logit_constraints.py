"""What a request allows or favours besides its grammar: logit bias, minimum length. All in place on float32 logits.

Invariant: a forbidden token is -inf and nothing later makes it finite again.
"""

import math

import torch
from torch import Tensor

from loraplex.engine.sequence import Sequence


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
