"""Token sets as bitmasks. Invariant: a token is bit `id % 32` of word `id // 32`, as the engine and both libraries
read it.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def bits_of(token_ids: Iterable[int], words: int) -> Tensor:
    """Return int32 [words] with the bits of `token_ids` set."""
    flags = torch.zeros(words * 32, dtype=torch.int64)
    flags[torch.tensor(sorted(token_ids), dtype=torch.int64)] = 1
    values = (flags.view(words, 32) << torch.arange(32)).sum(1)
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def with_bits(bits: Tensor, added: Iterable[int], removed: Iterable[int] = ()) -> Tensor:
    """Return a copy of int32 [words] in which a few bits differ."""
    words = bits.clone().numpy().view(np.uint32)
    for token_id in added:
        words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    for token_id in removed:
        words[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << (token_id % 32)))
    return torch.from_numpy(words.view(np.int32))
