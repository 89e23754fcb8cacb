"""`DecodeGraphs`: decode-only steps, captured at the start by bucket of rows and kind of adapters, and replayed.

Invariant: a replayed step reads `StaticInputs` only. Its logits lie in one buffer that the next step overwrites, so work
that reads them is queued before that step. The caller runs a step that no capture fits.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import BatchRows, ForwardBatch, UnknownTokens
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.runner.cuda_graphs.buckets import Buckets
from loraplex.engine.runner.cuda_graphs.replay import Replayer
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticInputs


class AdapterKind(Enum):
    """What the LoRA kernels of a step are specialised for: no adapter, few adapters shared by many rows, or many adapters."""

    BASE = auto()
    FEW = auto()
    MANY = auto()


Forward: TypeAlias = Callable[[ForwardBatch], Tensor]
Grouping: TypeAlias = Callable[[Tensor, AdapterKind, bool], LoraBatch | None]
"""(row slots int32 [rows] on the device, kind of the step, whether rows may belong to prefill chunks) -> the rows by adapter,
grouped on the device at every replay. Rows that pad the step have slot -1.
"""


@dataclass(frozen=True, slots=True)
class AdapterKinds:
    """`few`: the most adapters of a step of that kind; 0: there are no adapters. With `is_one` every step with any adapter
    is of one kind, whatever its rows.
    """

    few: int
    is_one: bool = False

    def kinds(self, rows: int) -> tuple[AdapterKind, ...]:
        """Return the kinds of steps of at most so many rows."""
        if not self.few:
            return (AdapterKind.BASE,)
        if self.is_one:
            return (AdapterKind.BASE, AdapterKind.MANY)
        return tuple(AdapterKind) if rows > self.few else (AdapterKind.BASE, AdapterKind.FEW)

    def of(self, adapters: int) -> AdapterKind:
        """Return the kind of a step with so many distinct adapters."""
        if not adapters:
            return AdapterKind.BASE
        return AdapterKind.FEW if adapters <= self.few and not self.is_one else AdapterKind.MANY


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What the engine reports of its graphs at the start."""

    graphs: int
    nbytes: int
    seconds: float


class DecodeGraphs:
    """Captured steps. Call `capture` once, before the first step."""

    def __init__(
        self,
        forward: Forward,
        inputs: StaticInputs,
        logits: Tensor,
        buckets: Buckets,
        replayer: Replayer,
        grouping: Grouping,
        limits: AdapterKinds,
    ) -> None:
        """`logits` [rows of the largest bucket, vocab]: every step writes its logits there."""
        self._forward = forward
        self._inputs = inputs
        self._logits = logits
        self._buckets = buckets
        self._replayer = replayer
        self._grouping = grouping
        self._limits = limits
        self._replays: dict[tuple[int, AdapterKind], Callable[[], None]] = {}
        self.num_replayed = 0

    @torch.inference_mode()
    def capture(self) -> CaptureReport:
        """Capture every bucket and kind, the largest first, so that smaller ones reuse its memory."""
        began = time.monotonic()
        for bucket in reversed(self._buckets.sizes):
            for kind in reversed(self._limits.kinds(bucket)):
                self._replays[bucket, kind] = self._replayer.capture(self._step(bucket, kind))
        return CaptureReport(len(self._replays), self._replayer.nbytes, time.monotonic() - began)

    @torch.inference_mode()
    def run(self, rows: BatchRows, unknown: UnknownTokens | None) -> Tensor | None:
        """Return logits [rows, vocab], valid until the next step is queued; None for a step that is not captured."""
        if not rows.is_decode_only:
            return None
        bucket = self._buckets.of(len(rows.token_ids))
        kind = self._limits.of(len(set(rows.row_slots) - {-1}))
        replay = None if bucket is None else self._replays.get((bucket, kind))
        if bucket is None or replay is None:
            return None
        self._inputs.fill(rows, bucket, unknown)
        replay()
        self.num_replayed += 1
        return self._logits[: len(rows.token_ids)]

    def _step(self, bucket: int, kind: AdapterKind) -> Callable[[], None]:
        inputs, target = self._inputs, self._logits[:bucket]

        def step() -> None:
            groups = None
            if kind is not AdapterKind.BASE:
                groups = self._grouping(inputs.row_slots[:bucket], kind, False)
            target.copy_(self._forward(inputs.batch(bucket, groups)))

        return step
