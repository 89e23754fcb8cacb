"""Constraints of a request besides its grammar: logit bias, minimum length. All change float32 logits in place.

Invariant: a forbidden token is -inf and nothing later makes it finite again.
"""

import math

import torch
from torch import Tensor

from loraplex.engine.batch.sequence import Sequence


def bias_tensors(rows: list[int], biases: list[dict[int, float]], vocab: int) -> tuple[Tensor, Tensor]:
    """Return the arguments of `apply_bias`, on the host: each row's bias, token id -> number."""
    index = [row * vocab + token for row, bias in zip(rows, biases, strict=True) for token in bias]
    values = [value for bias in biases for value in bias.values()]
    return torch.tensor(index, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)


def apply_bias(logits: Tensor, index: Tensor, values: Tensor) -> None:
    """Add `values` to the flat logits at `index`."""
    logits.view(-1)[index] += values


def is_below_minimum(sequence: Sequence) -> bool:
    """True while the next token may not end the sequence."""
    return sequence.num_output_tokens < sequence.request.sampling.min_tokens


def ending_tensors(
    rows: list[int], sequences: list[Sequence], eos_token_ids: frozenset[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of `apply_minimum_length`, on the host, for the tokens that would end `sequences`.

    These are their stop tokens, and end-of-sequence unless ignored.
    """
    endings = [_ending_tokens(sequence, eos_token_ids) for sequence in sequences]
    where = [position for position, ending in enumerate(endings) for _ in ending]
    tokens = [token for ending in endings for token in ending]
    return (
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(where, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int64),
    )


def apply_minimum_length(logits: Tensor, rows: Tensor, where: Tensor, tokens: Tensor) -> None:
    """Forbid `tokens[i]` in row `rows[where[i]]` of `logits`.

    A row without any other token keeps them: a finished grammar allows nothing else, and it wins over `min_tokens`.
    """
    before = logits[rows]
    after = before.clone()
    # On CUDA a number of the host would be copied, and waited for.
    after[where, tokens] = after.new_full((), -math.inf)
    nothing_left = after.amax(dim=-1, keepdim=True) == -math.inf
    logits[rows] = torch.where(nothing_left, before, after)


def _ending_tokens(sequence: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    sampling = sequence.request.sampling
    stops = frozenset(sampling.stop_token_ids)
    return stops if sampling.ignore_eos else stops | eos_token_ids
