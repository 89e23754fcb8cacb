"""`StepLogits`: the logits of a step, with the likeliest token of each row if that is computed already."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.sampling.categorical import row_maxima

NOT_FINITE = -1
"""Instead of a token: the row holds NaN or +inf, or only -inf."""


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return int64 [rows]: the lowest id of the largest logit of each row, or `NOT_FINITE`."""
    maxima, tokens = row_maxima(logits)
    return torch.where(maxima.isfinite(), tokens, NOT_FINITE)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """`logits` [rows, vocab]; `greedy` int64 [rows] as from `greedy_tokens`, None: not computed."""

    logits: Tensor
    greedy: Tensor | None = None

    def first(self, rows: int) -> "StepLogits":
        """Return a view of the first rows."""
        return StepLogits(self.logits[:rows], None if self.greedy is None else self.greedy[:rows])

    def select(self, index: Tensor) -> "StepLogits":
        """Return a copy of the rows in `index`, int64 on the device."""
        greedy = None if self.greedy is None else self.greedy.index_select(0, index)
        return StepLogits(self.logits.index_select(0, index), greedy)

    def write(self, logits: Tensor) -> None:
        """Copy `logits` of as many rows, and compute their `greedy` tokens, where there is a buffer for them."""
        self.logits.copy_(logits)
        if self.greedy is not None:
            self.greedy.copy_(greedy_tokens(self.logits))
