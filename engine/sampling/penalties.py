"""Repetition (CTRL, Keskar et al. 2019), frequency and presence penalties (OpenAI API) on logits.

Invariant: a history is a function of `token_ids`, extended by new tokens only. A lost history costs a rebuild, never
correctness, so the number kept is bounded.
"""

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.sampling_params import SamplingParams

_FIRST_CAPACITY = 64


class TokenHistory:
    """The distinct tokens of one sequence and how often each occurs in its output.

    Tokens of the prompt count 0 and are listed only if `with_prompt`.
    """

    def __init__(self, sequence: Sequence, with_prompt: bool) -> None:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens] if with_prompt else []
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        self._ids: NDArray[np.int64] = np.zeros(len(distinct) + _FIRST_CAPACITY, dtype=np.int64)
        self._counts: NDArray[np.float32] = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: len(distinct)] = distinct
        self._slots = {token: slot for slot, token in enumerate(distinct.tolist())}
        self.consumed = sequence.num_prompt_tokens

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._slots)]

    def extend(self, token_ids: list[int]) -> None:
        """Count the tokens that were added to the sequence since the last call."""
        for position in range(self.consumed, len(token_ids)):
            slot = self._slot(token_ids[position])
            self._counts[slot] += 1.0
        self.consumed = len(token_ids)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
        return slot


class TokenHistories:
    """Histories by sequence; the least recently used is dropped above `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._histories: LRUCache[Sequence, TokenHistory] = LRUCache(capacity)

    def __len__(self) -> int:
        return len(self._histories)

    def of(self, sequence: Sequence) -> TokenHistory:
        """Return the history up to the last token of the sequence."""
        history = self._histories.get(sequence)
        if history is None or history.consumed > len(sequence.token_ids):
            history = TokenHistory(sequence, sequence.request.sampling.repetition_penalty != 1.0)
            self._histories[sequence] = history
        history.extend(sequence.token_ids)
        return history

    def forget(self, sequence: Sequence) -> None:
        self._histories.pop(sequence, None)


def has_penalty(sampling: SamplingParams) -> bool:
    """True if any of the three penalties changes logits."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def penalty_tensors(
    rows: list[int], sequences: list[Sequence], histories: TokenHistories, vocab: int
) -> tuple[Tensor, Tensor]:
    """Return the arguments of `apply_penalties`, on the host: the histories of `sequences`, whose logits are in `rows`."""
    indices: list[NDArray[np.int64]] = []
    factors: list[NDArray[np.float32]] = []
    for row, sequence in zip(rows, sequences, strict=True):
        history, sampling = histories.of(sequence), sequence.request.sampling
        indices.append(history.ids + row * vocab)
        factor = np.empty((2, len(history.ids)), dtype=np.float32)
        factor[0] = sampling.repetition_penalty
        factor[1] = history.counts * sampling.frequency_penalty + sampling.presence_penalty * (
            history.counts > 0
        )
        factors.append(factor)
    return torch.from_numpy(np.concatenate(indices)), torch.from_numpy(np.concatenate(factors, axis=1))


def apply_penalties(logits: Tensor, index: Tensor, factors: Tensor) -> None:
    """Penalise `logits` float32 [rows, vocab] in place at `index` int64 [tokens], places in the flat logits.

    `factors` float32 [2, tokens]: for tokens of prompt and output, positive logits are divided by the repetition penalty
    and others multiplied; then the sum of count x frequency and presence is subtracted for tokens of the output.
    """
    repetition, subtrahend = factors
    flat = logits.view(-1)
    values = flat[index]
    flat[index] = torch.where(values > 0, values / repetition, values * repetition) - subtrahend
