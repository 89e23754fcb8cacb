"""`ModelRunner`: executes a step plan: tensors, forward pass, sampling. It has no queue and makes no decision."""

from collections.abc import Callable

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import (
    AdapterPath,
    BatchRows,
    ForwardBatch,
    UnknownTokens,
)
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.messages import EngineRequest
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.runner.cuda_graphs.step_graphs import StepGraphs
from loraplex.engine.runner.launched_step import LaunchedStep
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.sampling.scorer import Scorer, StepScores
from loraplex.engine.sampling.step_logits import StepLogits
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.structured_output.bitmask_filling import BitmaskFiller


class ModelRunner:
    """Owns the KV tensors; shares the decoder's sites with the adapter pool."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: list[Tensor],
        block_size: int,
        sampler: Sampler,
        pool: AdapterPool,
        masks: BitmaskFiller | None = None,
        adapters: AdapterPath | None = None,
    ) -> None:
        """`masks` None: no planned sequence has a `token_mask`."""
        self._adapters = adapters or AdapterPath()
        self._decoder = decoder
        self._scorer = Scorer(decoder, self._adapters)
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._sampler = sampler
        self._pool = pool
        self._masks = masks
        self._transfers = HostTransfers(decoder.device)
        self._mask_transfers = HostTransfers(decoder.device)
        self._last: LaunchedStep | None = None
        self._graphs: StepGraphs | None = None

    @property
    def kv_cache_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._kv_cache)

    def launch(self, plan: StepPlan, rows: list[PlannedRow] | None = None) -> LaunchedStep:
        """Start the forward pass of `plan`. The previously launched step samples its unknown tokens.

        `rows` are the rows to sample, if already known.
        """
        handle = LaunchedStep(plan, self._sampler, self._masks, self._mask_transfers)
        if rows is not None:
            handle.begin_masks(rows)
        elif self._last is not None:
            handle.begin_known_masks(self._last.sampled_sequences)
        unknown = None if self._last is None else self._last.tokens
        batch_rows = BatchRows(plan, self._block_size, self._pool.slots())
        scores = self._scorer.begin(batch_rows)
        logits = self._logits(batch_rows, unknown, scores)
        handle.computed(logits, None if scores is None else scores.start())
        self._last = handle
        return handle

    def _logits(
        self, rows: BatchRows, unknown: UnknownTokens | None, scores: StepScores | None
    ) -> StepLogits:
        """Return the logits of the sampled rows in the plan's order, and write K and V."""
        graphs = self._graphs
        logits = None if graphs is None else graphs.run(rows, unknown)
        if graphs is not None and logits is not None:
            if scores is not None:
                scores.take(graphs.states.hidden, graphs.states.residual)
            return logits
        batch = rows.batch(self._decoder.device, self._transfers, unknown, self._adapters)
        keep = None if scores is None else scores.take
        return StepLogits(self.forward(batch, keep))

    def forward(self, batch: ForwardBatch, keep: Callable[[Tensor, Tensor], None] | None = None) -> Tensor:
        """Return the logits of a batch. `keep`: see `Decoder.forward`."""
        return self._decoder.forward(batch, self._kv_cache, keep)

    def require_device(self) -> None:
        """Raise the error of a lost device, with which every later call fails too. Waits for the device."""
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)

    def check(self) -> None:
        """Run a step of one token that belongs to no request, and leave the KV cache as it was. Raises what is broken."""
        plan = StepPlan((_row_without_request(),))
        kept = [layer[0].clone() for layer in self._kv_cache]
        step = self.launch(plan, list(plan.rows))
        step.sample(list(plan.rows))
        step.collect()
        for layer, block in zip(self._kv_cache, kept, strict=True):
            layer[0] = block

    def replay(self, graphs: StepGraphs) -> None:
        """Replay steps from now on, if they were captured."""
        self._graphs = graphs

    def forget(self, sequence: Sequence) -> None:
        """Drop what the sampler remembers of an ended sequence."""
        self._sampler.forget(sequence)


def _row_without_request() -> PlannedRow:
    """Token 0 as the prompt of a response of one random token, in block 0."""
    request = EngineRequest(
        request_id="", namespace=b"", prompt_token_ids=[0], sampling=SamplingParams(max_tokens=1)
    )
    sequence = Sequence(request=request, choice=0, arrival=0.0, seed=0, token_ids=[0])
    return PlannedRow(sequence, 0, (0,), (0,), None, samples=True)
