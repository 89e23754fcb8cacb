"""`Scorer`: log-probabilities of given tokens, from the last hidden states of a step.

Invariant: logits exist for `slice_rows` positions at a time, never for a whole prompt. Scores are the raw log-softmax in
float32: no sampling parameter changes them. Only `PendingScores.collect` waits for the device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath, BatchRows
from loraplex.engine.batch.host_transfers import HostTransfers, Results
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.sampling.logprobs import best_first
from loraplex.engine.sampling_params import CPU_SCORE_SLICE_BYTES, MAX_TOP_LOGPROBS, SCORE_SLICE_BYTES
from loraplex.engine.sequence_scores import PositionScore, ScoredPosition


@dataclass(frozen=True, slots=True)
class _Slice:
    """Positions whose logits exist together. `topped`: the rows that get alternatives.

    On the device, int64: `pair_rows` and `tokens` of each token to score, `firsts` the first of them of each row.
    """

    positions: list[tuple[int, Sequence, ScoredPosition]]
    pair_rows: Tensor
    tokens: Tensor
    firsts: Tensor
    topped: Tensor


class PendingScores:
    """The scores of one step being copied to the host."""

    def __init__(self, slices: list[_Slice], results: Results) -> None:
        """`results`: log-probabilities, ranks, the best tokens and theirs, of each slice."""
        self._slices = slices
        self._results = results

    def collect(self) -> dict[Sequence, tuple[PositionScore, ...] | None]:
        """Wait for the device. None for a sequence with logits that were not finite."""
        results = [tensor.tolist() for tensor in self._results.wait()]
        found: dict[Sequence, list[PositionScore]] = {}
        broken: set[Sequence] = set()
        for index, part in enumerate(self._slices):
            chosen, ranks, best_ids, best_values = results[4 * index : 4 * index + 4]
            values, best = iter(chosen), zip(best_ids, best_values, strict=True)
            for (_, sequence, target), rank in zip(part.positions, ranks, strict=True):
                logprobs = [next(values) for _ in target.token_ids]
                # One NaN or +inf among the logits makes all of their log-softmax NaN.
                if any(map(math.isnan, logprobs)):
                    broken.add(sequence)
                top = best_first(*next(best), target.top) if target.top else []
                found.setdefault(sequence, []).append(PositionScore(target, logprobs, rank, top))
        return {s: None if s in broken else tuple(scores) for s, scores in found.items()}


class StepScores:
    """The scores of one step. Call `take` once its hidden states are there, and then `start`."""

    def __init__(self, scorer: "Scorer", row_slots: list[int], index: Tensor, slices: list[_Slice]) -> None:
        """`index`: the places of all positions among the tokens of the step, which have `row_slots`."""
        self._scorer = scorer
        self._row_slots = row_slots
        self._index = index
        self._slices = slices
        self._states: tuple[Tensor, Tensor] | None = None

    def take(self, hidden: Tensor, residual: Tensor) -> None:
        """Copy the states of the positions: later work may overwrite the given ones."""
        self._states = hidden.index_select(0, self._index), residual.index_select(0, self._index)

    @torch.inference_mode()
    def start(self) -> PendingScores:
        """Start to compute and to copy the scores."""
        if self._states is None:
            raise ValueError("the step has no hidden states")
        results: list[Tensor] = []
        hidden, residual = (torch.split(states, self._scorer.slice_rows) for states in self._states)
        for part, h, r in zip(self._slices, hidden, residual, strict=True):
            results += self._scorer.score(part, h, r, self._row_slots)
        return PendingScores(self._slices, self._scorer.transfers.fetch(results))


class Scorer:
    """Scores with the head of one decoder."""

    def __init__(self, decoder: Decoder, adapters: AdapterPath) -> None:
        self.transfers = HostTransfers(decoder.device)
        slice_bytes = CPU_SCORE_SLICE_BYTES if decoder.device.type == "cpu" else SCORE_SLICE_BYTES
        self.slice_rows = max(1, slice_bytes // (4 * decoder.config.vocab_size))
        self._decoder = decoder
        self._adapters = adapters

    def begin(self, rows: BatchRows) -> StepScores | None:
        """Copy what the scores of a step need to the device; None for a step that scores nothing."""
        if not rows.scored:
            return None
        size = self.slice_rows
        parts = [rows.scored[begin : begin + size] for begin in range(0, len(rows.scored), size)]
        lists = [[place for place, _, _ in rows.scored], *(each for part in parts for each in _lists(part))]
        index, *staged = self.transfers.stage([torch.tensor(each, dtype=torch.int64) for each in lists])
        slices = [_Slice(part, *staged[4 * number : 4 * number + 4]) for number, part in enumerate(parts)]
        return StepScores(self, rows.row_slots, index, slices)

    def score(self, part: _Slice, hidden: Tensor, residual: Tensor, row_slots: list[int]) -> Iterator[Tensor]:
        """Yield log-probabilities, ranks of each row's first token, the best tokens, and theirs."""
        slots = [row_slots[place] for place, _, _ in part.positions]
        lora = self._adapters.group(slots, self._decoder.device, len(slots), row_slots)
        distribution = self._decoder.head(hidden, residual, lora).float().log_softmax(dim=-1)
        chosen = distribution[part.pair_rows, part.tokens]
        all_are_topped = len(part.topped) == len(distribution)
        topped = distribution if all_are_topped else distribution.index_select(0, part.topped)
        best = topped.topk(min(MAX_TOP_LOGPROBS, distribution.shape[1]))
        # `gt_` keeps float32: a sum of booleans first makes 64-bit integers of them all, which on a CPU costs as much as the
        # head. A sum of ones is exact in float32 below 2**24.
        likelier = distribution.gt_(chosen[part.firsts].unsqueeze(-1)).sum(dim=-1)
        yield from (chosen, likelier.long() + 1, best.indices, best.values)

    @torch.inference_mode()
    def warm_up(self, count: int) -> None:
        """Run the head on `count` positions."""
        decoder = self._decoder
        zeros = torch.zeros(count, decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
        decoder.head(zeros, zeros.clone(), None).float().log_softmax(dim=-1).topk(1)


def _lists(part: list[tuple[int, Sequence, ScoredPosition]]) -> Iterator[list[int]]:
    """Yield the lists of a `_Slice`."""
    targets = [target for _, _, target in part]
    counts = [len(target.token_ids) for target in targets]
    yield [row for row, count in enumerate(counts) for _ in range(count)]
    yield [token for target in targets for token in target.token_ids]
    yield list(accumulate(counts, initial=0))[:-1]
    yield [row for row, target in enumerate(targets) if target.top]
