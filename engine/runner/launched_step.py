"""`LaunchedStep`: one launched step, from its forward pass over sampling to results, while the host may prepare the next.

Invariant: only `collect` waits for the device.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import UnknownTokens
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import NOT_SAMPLED, PlannedRow, SampledToken, StepPlan
from loraplex.engine.sampling.sampler import PendingTokens, Sampler
from loraplex.engine.sampling.scorer import PendingScores
from loraplex.engine.sampling.step_logits import StepLogits
from loraplex.engine.structured_output.bitmask_filling import BitmaskFiller, Masks

WAIT_FACTOR = 0.25
"""A step waits for masks at most a quarter as long as its forward pass took, so that other tenants do not feel a slow
grammar. A mask is started before the pass, unless it needs a token that is still being sampled. A mask that is not ready
after the pass is not a fast one."""
MIN_WAIT_S = 0.005
MAX_WAIT_S = 0.01


class LaunchedStep:
    """Made by `ModelRunner.launch`. Call `sample` first and `collect` then, once each."""

    def __init__(
        self, plan: StepPlan, sampler: Sampler, masks: BitmaskFiller | None, transfers: HostTransfers
    ) -> None:
        self.plan = plan
        self._rows: dict[Sequence, int] = {}
        self._sampler = sampler
        self._masks = masks
        self._transfers = transfers
        self._began = time.monotonic()
        self._begun: list[Sequence] | None = None
        self._logits: StepLogits | None = None
        self._pending: PendingTokens | None = None
        self._scores: PendingScores | None = None
        self._failed: dict[Sequence, SampledToken] = {}

    @property
    def tokens(self) -> UnknownTokens | None:
        """The sampled tokens, on the device; None before `sample`."""
        return None if self._pending is None else UnknownTokens(self._rows, self._pending.token_ids)

    @property
    def sampled_sequences(self) -> Collection[Sequence]:
        """The sequences that will get a token."""
        return self._rows

    def begin_known_masks(self, before: Collection[Sequence]) -> None:
        """Start filling the masks of rows that wait for no token of the step before, which samples `before`.

        The step thread advances the grammars of `before` meanwhile, so masks of their families are not started yet.
        """
        if self._masks is None:
            return
        advancing = {sequence.token_mask.family for sequence in before if sequence.token_mask is not None}
        self._masks.begin(
            [
                row.sequence
                for row in self.plan.rows
                if row.samples
                and not row.sequence.num_unknown
                and row.sequence.token_mask is not None
                and row.sequence.token_mask.family not in advancing
            ]
        )

    def begin_masks(self, rows: Iterable[PlannedRow]) -> None:
        """Start filling the masks of these rows, all that will be sampled."""
        self._begun = [row.sequence for row in rows if row.sequence.token_mask is not None]
        if self._begun and self._masks is not None:
            self._masks.begin(self._begun)

    def computed(self, logits: StepLogits, scores: PendingScores | None = None) -> None:
        """Record the launch of the forward pass; `logits` of the rows that sample, in the plan's order."""
        self._logits, self._scores = logits, scores

    def sample(self, rows: list[PlannedRow]) -> list[Sequence]:
        """Start sampling these rows of the plan; return the sequences whose mask is late, which get no token."""
        if self._logits is None:
            raise ValueError("the step has not been launched, or has been sampled")
        if self._begun is None:
            self.begin_masks(rows)
        late: list[Sequence] = []
        masks = self._collect_masks()
        chosen: list[Sequence] = []
        for row in rows:
            sequence = row.sequence
            if sequence in masks.errors:
                self._failed[sequence] = SampledToken(-1, finite=False, error=masks.errors[sequence])
            elif sequence.token_mask is not None and sequence not in masks.rows:
                late.append(sequence)
            else:
                chosen.append(sequence)
        self._rows = {sequence: index for index, sequence in enumerate(chosen)}
        step = self._chosen_logits()
        bitmask = self._bitmask(chosen, masks)
        self._pending = self._sampler.start(step.logits, chosen, bitmask, step.greedy)
        self._logits = None
        return late

    def collect(self) -> dict[Sequence, SampledToken]:
        """Wait for the results: those of sampled rows whose mask was not late, and of rows that score."""
        if self._pending is None:
            raise ValueError("the step has not been sampled")
        results = dict(zip(self._rows, self._pending.collect(), strict=True)) | self._failed
        scores = {} if self._scores is None else self._scores.collect()
        for sequence, found in scores.items():
            result = results.get(sequence, NOT_SAMPLED)
            if found is None:
                results[sequence] = replace(NOT_SAMPLED, finite=False)
            elif result.finite:
                results[sequence] = replace(result, scores=found)
        return results

    def _collect_masks(self) -> Masks:
        if not self._begun or self._masks is None:
            return Masks()
        wait_s = WAIT_FACTOR * (time.monotonic() - self._began)
        return self._masks.collect(self._begun, min(max(MIN_WAIT_S, wait_s), MAX_WAIT_S))

    def _chosen_logits(self) -> StepLogits:
        logits = self._logits
        if logits is None:
            raise ValueError("the step has been sampled")
        ordered = [row.sequence for row in self.plan.rows if row.samples]
        if len(ordered) == len(self._rows):
            return logits
        (index,) = self._transfers.stage(
            [torch.tensor([i for i, s in enumerate(ordered) if s in self._rows], dtype=torch.int64)]
        )
        return logits.select(index)

    def _bitmask(self, chosen: list[Sequence], masks: Masks) -> Tensor | None:
        """Return one row for each sequence with a grammar, on the device."""
        rows = [masks.rows[sequence] for sequence in chosen if sequence.token_mask is not None]
        bitmask = self._transfers.stage([torch.cat(rows)])[0] if rows else None
        if self._masks is not None:
            self._masks.give_back(masks)
        return bitmask
