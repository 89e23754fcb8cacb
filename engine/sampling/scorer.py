"""`Scorer`: log-probabilities of given tokens, from the last hidden states of a step.

Invariant: logits exist for `slice_rows` positions at a time, never for a whole prompt. Scores are the raw log-softmax in float32:
no sampling parameter changes them. Only `PendingScores.collect` waits for the device.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath, BatchRows
from loraplex.engine.batch.host_transfers import HostTransfers, Results
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.sampling.logprobs import best_first
from loraplex.engine.sampling_params import MAX_TOP_LOGPROBS, SCORE_SLICE_BYTES
from loraplex.engine.sequence_scores import PositionScore, ScoredPosition


@dataclass(frozen=True, slots=True)
class _Places:
    """Lists of one step, in the order of its positions: (position, pair or token) each.

    `pairs`: tokens to score. `ranked`: pairs that get a rank. `topped`: positions that get alternatives.
    """

    pairs: list[tuple[int, int]]
    ranked: list[tuple[int, int]]
    topped: list[tuple[int, int]]

    @classmethod
    def of(cls, targets: list[ScoredPosition]) -> "_Places":
        pairs: list[tuple[int, int]] = []
        places = cls(pairs, [], [])
        for row, target in enumerate(targets):
            if target.top is not None:
                places.ranked.append((row, len(pairs)))
                if target.top:
                    places.topped.append((row, row))
            pairs += [(row, token) for token in target.token_ids]
        return places


class PendingScores:
    """The scores of one step being copied to the host."""

    def __init__(self, scored: list[tuple[Sequence, ScoredPosition]], results: Results) -> None:
        self._scored = scored
        self._results = results

    def collect(self) -> dict[Sequence, tuple[PositionScore, ...] | None]:
        """Wait for the device. None for a sequence with logits that were not finite."""
        chosen, ranks, best_ids, best_values = (tensor.tolist() for tensor in self._results.wait())
        values, rank, top = iter(chosen), iter(ranks), zip(best_ids, best_values, strict=True)
        found: dict[Sequence, list[PositionScore]] = {}
        broken: set[Sequence] = set()
        for sequence, target in self._scored:
            logprobs = [next(values) for _ in target.token_ids]
            # One NaN or +inf among the logits makes all of their log-softmax NaN.
            if any(map(math.isnan, logprobs)):
                broken.add(sequence)
            score = PositionScore(target, logprobs)
            if target.top is not None:
                best = tuple(best_first(*next(top), target.top)) if target.top else ()
                score = PositionScore(target, logprobs, next(rank), best)
            found.setdefault(sequence, []).append(score)
        return {s: None if s in broken else tuple(scores) for s, scores in found.items()}


class StepScores:
    """The scores of one step. Call `take` once its hidden states are there, and then `start`."""

    def __init__(self, scorer: "Scorer", rows: BatchRows, index: Tensor, staged: dict[str, Tensor]) -> None:
        self._scorer = scorer
        self._rows = rows
        self._index = index
        self._staged = staged
        self._states: tuple[Tensor, Tensor] | None = None

    def take(self, hidden: Tensor, residual: Tensor) -> None:
        """Copy the states of the positions: later work may overwrite the given ones."""
        self._states = hidden.index_select(0, self._index), residual.index_select(0, self._index)

    def start(self) -> PendingScores:
        """Start to compute and to copy the scores."""
        if self._states is None:
            raise ValueError("the step has no hidden states")
        scored = [(sequence, target) for _, sequence, target in self._rows.scored]
        parts = list(self._scorer.slices(self._states, self._rows, self._staged))
        results = [torch.cat(column) for column in zip(*parts, strict=True)]
        return PendingScores(scored, self._scorer.transfers.fetch(results))


class Scorer:
    """Scores with the head of one decoder."""

    def __init__(self, decoder: Decoder, adapters: AdapterPath) -> None:
        self.transfers = HostTransfers(decoder.device)
        self.slice_rows = max(1, SCORE_SLICE_BYTES // (4 * decoder.config.vocab_size))
        self._decoder = decoder
        self._adapters = adapters

    def begin(self, rows: BatchRows) -> StepScores | None:
        """Copy what the scores of a step need to the device; None for a step that scores nothing."""
        if not rows.scored:
            return None
        places = _Places.of([target for _, _, target in rows.scored])
        lists: dict[str, list[int]] = {
            "index": [place for place, _, _ in rows.scored],
            "pair rows": [row % self.slice_rows for row, _ in places.pairs],
            "tokens": [token for _, token in places.pairs],
            "ranked rows": [row % self.slice_rows for row, _ in places.ranked],
            "topped rows": [row % self.slice_rows for row, _ in places.topped],
        }
        firsts: list[int] = []
        for begin in range(0, len(rows.scored), self.slice_rows):
            first = bisect_left(places.pairs, (begin, -1))
            inside = _between(places.ranked, begin, begin + self.slice_rows)
            firsts += [pair - first for _, pair in places.ranked[inside]]
        lists["ranked pairs"] = firsts
        tensors = [torch.tensor(values, dtype=torch.int64) for values in lists.values()]
        staged = dict(zip(lists, self.transfers.stage(tensors), strict=True))
        return StepScores(self, rows, staged["index"], staged)

    @torch.inference_mode()
    def slices(
        self, states: tuple[Tensor, Tensor], rows: BatchRows, staged: dict[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield for each slice of positions: log-probabilities, ranks, the best tokens, and theirs."""
        places = _Places.of([target for _, _, target in rows.scored])
        slots = [rows.row_slots[place] for place, _, _ in rows.scored]
        hidden, residual = states
        for begin in range(0, len(slots), self.slice_rows):
            end = begin + self.slice_rows
            pairs, ranked = _between(places.pairs, begin, end), _between(places.ranked, begin, end)
            topped, own = _between(places.topped, begin, end), slots[begin:end]
            lora = self._adapters.group(own, self._decoder.device, len(own), rows.row_slots)
            logits = self._decoder.head(hidden[begin:end], residual[begin:end], lora)
            distribution = logits.float().log_softmax(dim=-1)
            chosen = distribution[staged["pair rows"][pairs], staged["tokens"][pairs]]
            reference = chosen[staged["ranked pairs"][ranked]].unsqueeze(-1)
            likelier = distribution.index_select(0, staged["ranked rows"][ranked]) > reference
            best = distribution.index_select(0, staged["topped rows"][topped]).topk(
                min(MAX_TOP_LOGPROBS, distribution.shape[1])
            )
            yield chosen, likelier.sum(dim=-1) + 1, best.indices, best.values

    @torch.inference_mode()
    def warm_up(self, count: int) -> None:
        """Run the head on `count` positions."""
        decoder = self._decoder
        zeros = torch.zeros(count, decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
        decoder.head(zeros, zeros.clone(), None).float().log_softmax(dim=-1).topk(1)


def _between(places: list[tuple[int, int]], begin: int, end: int) -> slice:
    """Return where the places of the rows `begin ... end - 1` are."""
    return slice(bisect_left(places, (begin, -1)), bisect_left(places, (end, -1)))
