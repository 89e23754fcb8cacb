"""`StepGraphs`: whole steps, captured at the start by shape and kind of adapters, and replayed.

Invariant: a replayed step reads `StaticInputs` only. Its results lie in buffers that the next step overwrites, so work
that reads them is queued before that step. The caller runs a step that no capture fits.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import BatchRows, ForwardBatch, UnknownTokens
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKind, AdapterKinds
from loraplex.engine.runner.cuda_graphs.buckets import Buckets, StepShape
from loraplex.engine.runner.cuda_graphs.replay import Replayer
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticInputs
from loraplex.engine.sampling.step_logits import StepLogits

Forward: TypeAlias = Callable[[ForwardBatch], Tensor]
Grouping: TypeAlias = Callable[[Tensor, AdapterKind, bool], LoraBatch | None]
"""(row slots int32 [rows] on the device, kind of the step, whether rows may belong to prefill chunks) -> the rows by adapter,
grouped on the device at every replay. Rows that pad the step have slot -1.
"""


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What the engine reports of its graphs at the start. `mixed`: those of steps with chunks."""

    graphs: int
    mixed: int
    nbytes: int
    seconds: float


class FinalStates:
    """Buffers of what the head takes, [tokens, hidden] each: a captured step with chunks leaves it here to be scored."""

    def __init__(self, tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden, self.residual = torch.zeros(2, tokens, hidden_size, dtype=dtype, device=device)

    def keep(self, hidden: Tensor, residual: Tensor) -> None:
        """Copy the states of a step."""
        self.hidden[: hidden.shape[0]].copy_(hidden)
        self.residual[: residual.shape[0]].copy_(residual)


class StepGraphs:
    """Captured steps. Call `capture` once, before the first step."""

    def __init__(
        self,
        forward: Forward,
        inputs: StaticInputs,
        results: StepLogits,
        buckets: Buckets,
        replayer: Replayer,
        grouping: Grouping,
        limits: AdapterKinds,
        states: FinalStates,
    ) -> None:
        """`results` of as many rows as a step may sample: every step writes there. `states`: where `forward` leaves its own."""
        self._forward = forward
        self._inputs = inputs
        self._results = results
        self._buckets = buckets
        self._replayer = replayer
        self._grouping = grouping
        self._limits = limits
        self.states = states
        self._replays: dict[tuple[StepShape, AdapterKind], Callable[[], None]] = {}
        self.num_replayed = 0

    @torch.inference_mode()
    def capture(self) -> CaptureReport:
        """Capture every shape and kind, the largest first, so that smaller ones reuse its memory."""
        began = time.monotonic()
        for shape in sorted(
            self._buckets.shapes, key=lambda shape: (shape.tokens, shape.chunks), reverse=True
        ):
            for kind in reversed(self._limits.kinds(shape.tokens)):
                self._replays[shape, kind] = self._replayer.capture(self._step(shape, kind))
        mixed = sum(shape.chunks > 0 for shape, _ in self._replays)
        seconds = time.monotonic() - began
        return CaptureReport(len(self._replays), mixed, self._replayer.nbytes, seconds)

    @torch.inference_mode()
    def run(self, rows: BatchRows, unknown: UnknownTokens | None) -> StepLogits | None:
        """Return the logits of the sampled rows, valid until the next step is queued; None for a step that is not captured."""
        tokens, sampled = len(rows.token_ids), len(rows.sampled)
        shape = self._buckets.of(tokens, len(rows.decodes), len(rows.chunks), sampled)
        kind = self._limits.of(len(set(rows.row_slots) - {-1}))
        replay = None if shape is None else self._replays.get((shape, kind))
        if shape is None or replay is None:
            return None
        index = self._inputs.fill(rows, shape, unknown)
        replay()
        self.num_replayed += 1
        if shape.samples is None and sampled < tokens:
            return self._results.select(index)
        return self._results.first(sampled)

    def _step(self, shape: StepShape, kind: AdapterKind) -> Callable[[], None]:
        results = self._results.first(shape.logits)

        def step() -> None:
            logits = self._forward(self._inputs.batch(shape, *self._groups(shape, kind)))
            results.write(logits)

        return step

    def _groups(self, shape: StepShape, kind: AdapterKind) -> tuple[LoraBatch | None, LoraBatch | None]:
        """Return the step's rows by adapter, and its sampled rows."""
        if kind is AdapterKind.BASE:
            return None, None
        row_slots = self._inputs.row_slots[: shape.tokens]
        rows = self._grouping(row_slots, kind, shape.chunks > 0)
        if shape.samples is None:
            return rows, rows
        sampled = row_slots.index_select(0, self._inputs.sampled[: shape.samples])
        return rows, self._grouping(sampled, kind, False)
