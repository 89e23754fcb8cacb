"""Token sets as bitmasks. Invariant: a token is bit `id % 32` of word `id // 32`, as the engine and both libraries
read it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def bits_of(token_ids: Iterable[int], words: int) -> Tensor:
    """Return int32 [words] with the bits of `token_ids` set."""
    flags = torch.zeros(words * 32, dtype=torch.int64)
    flags[torch.tensor(sorted(token_ids), dtype=torch.int64)] = 1
    values = (flags.view(words, 32) << torch.arange(32)).sum(1)
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)
