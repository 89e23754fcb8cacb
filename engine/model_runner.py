"""`ModelRunner`: executes a step plan: tensors, forward pass, sampling. Knows no queue and decides nothing."""

import time

import torch
from torch import Tensor

from loraplex.engine.forward_batch import ForwardBatch, PrefillChunk, make_forward_batch
from loraplex.engine.kernels.sgmv import sgmv
from loraplex.engine.lora.batch import group_rows
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.mask_filling import MaskFiller, Masks
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.plan import SampledToken, StepPlan
from loraplex.engine.sampler import Sampler
from loraplex.engine.sequence import Sequence

PATIENCE = 0.25
"""A step waits for masks at most a quarter as long again as its forward pass took, so that neighbours feel no slow grammar.
A mask is begun before the pass: one that is not there after it is no quick one."""
LEAST_PATIENCE_S = 0.005
MOST_PATIENCE_S = 0.01


class ModelRunner:
    """Owns the KV tensors; shares the decoder's sites with the adapter pool."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: list[Tensor],
        block_size: int,
        sampler: Sampler,
        pool: AdapterPool,
        masks: MaskFiller | None = None,
    ) -> None:
        """`masks` None: no planned sequence has a `token_mask`."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._sampler = sampler
        self._pool = pool
        self._masks = masks

    def execute(self, plan: StepPlan) -> dict[Sequence, SampledToken]:
        """Compute every row of the plan and sample those that ask for it, but for those whose mask is late."""
        sequences = [row.sequence for row in plan.rows if row.samples]
        masked = [sequence for sequence in sequences if sequence.token_mask is not None]
        if not masked or self._masks is None:
            tokens = self._sampler.sample(self.logits(plan), sequences)
            return dict(zip(sequences, tokens, strict=True))
        began = time.monotonic()
        self._masks.begin(masked)
        logits = self.logits(plan)
        patience = PATIENCE * (time.monotonic() - began)
        patience = min(max(LEAST_PATIENCE_S, patience), MOST_PATIENCE_S)
        masks = self._masks.collect(masked, patience)
        sampled = self._sample_masked(logits, sequences, masks)
        self._masks.give_back(masks)
        return sampled

    def _sample_masked(
        self, logits: Tensor, sequences: list[Sequence], masks: Masks
    ) -> dict[Sequence, SampledToken]:
        kept = [i for i, s in enumerate(sequences) if s.token_mask is None or s in masks.rows]
        if len(kept) < len(sequences):
            logits = logits[torch.tensor(kept, dtype=torch.int64, device=logits.device)]
            sequences = [sequences[i] for i in kept]
        rows = [masks.rows[s] for s in sequences if s.token_mask is not None]
        tokens = self._sampler.sample(logits, sequences, self._bitmask(rows) if rows else None)
        sampled = dict(zip(sequences, tokens, strict=True))
        for sequence, error in masks.errors.items():
            sampled[sequence] = SampledToken(-1, finite=False, error=error)
        return sampled

    def _bitmask(self, rows: list[Tensor]) -> Tensor:
        """The rows as one tensor [rows, words] on the device."""
        bitmask = torch.cat(rows)
        if self._decoder.device.type == "cpu":
            return bitmask
        return bitmask.pin_memory().to(self._decoder.device, non_blocking=True)

    def logits(self, plan: StepPlan) -> Tensor:
        """Logits [sampled rows, vocab] of the plan, in its order; K and V are written."""
        batch = make_forward_batch(plan, self._block_size, self._pool.slots(), self._decoder.device)
        return self.forward(batch)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits of a batch made elsewhere: benchmarks and tests."""
        return self._decoder.forward(batch, self._kv_cache)

    def warm_up(self) -> None:
        """Run every kernel once, so that no request pays for compiling one. Writes into block 0 before it is used."""
        decode = PrefillChunk(0, 1, 1, torch.zeros(1, dtype=torch.int32, device=self._decoder.device))
        for chunks, decodes in (((), 1), ((decode,), 0)):
            self.forward(_one_token(chunks, decodes, self._decoder.device))
        rows = group_rows([0], self._decoder.device)
        site = self._decoder.sites[1]
        x = torch.zeros(1, site.inputs, dtype=self._decoder.dtype, device=self._decoder.device)
        if rows is not None:
            sgmv(x, x.new_zeros(1, site.outputs), site, rows)

    def forget(self, sequence: Sequence) -> None:
        """Drop what the sampler remembers of a sequence that ended."""
        self._sampler.forget(sequence)


def _one_token(chunks: tuple[PrefillChunk, ...], decodes: int, device: torch.device) -> ForwardBatch:
    """Token 0 at position 0 in block 0, as a decode or as a chunk."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return ForwardBatch(
        token_ids=zero,
        positions=zero,
        slots=zero,
        num_decodes=decodes,
        decode_tables=torch.zeros(decodes, 1, dtype=torch.int32, device=device),
        decode_lengths=torch.ones(decodes, dtype=torch.int32, device=device),
        chunks=chunks,
        sampled_tokens=None,
        num_sampled=1,
        lora=None,
        sampled_lora=None,
    )
