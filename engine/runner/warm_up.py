"""`WarmUp`: runs every kernel that a step may launch, once and before the first request, so that no step waits for a compiler.

Invariant: the numbers of rows come from the tables that choose tiles at run time (`tiling`), never from a list of their own.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath, BatchRows, ForwardBatch
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.kernels.dispatch import KernelBackend, backend_on
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import FEW_ADAPTERS, DeviceLoraBatch
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.sampling.scorer import Scorer
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.token_mask import TokenMask

SOME_ROWS = 2
"""Rows of a step with one adapter, whose kernels do not depend on the number of rows; a step of fewer has one chunk."""

SAMPLINGS = (
    SamplingParams(max_tokens=2, temperature=0.0),
    SamplingParams(max_tokens=2, temperature=0.0, logprobs=2),
    # Only the repetition penalty counts the prompt: without it the history of a first token is empty.
    SamplingParams(max_tokens=2, temperature=0.0, frequency_penalty=1.0),
    SamplingParams(max_tokens=2, temperature=0.0, presence_penalty=1.0, repetition_penalty=1.1),
    SamplingParams(max_tokens=2, temperature=0.0, logit_bias={0: 1.0}, min_tokens=1),
    # No token ends such a row, so `min_tokens` forbids none.
    SamplingParams(max_tokens=2, temperature=0.0, min_tokens=1, ignore_eos=True),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=2, min_p=0.1),
    SamplingParams(max_tokens=2, top_k=2),
    SamplingParams(max_tokens=2, top_k=2, top_p=0.9, min_p=0.1),
)
"""Every operation that the sampler may launch. Each is sampled alone, too: beside others no tensor of it is empty."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: sampled rows, tokens, and tokens of a sequence. `adapter_slots` 0: there are no adapters."""

    rows: int
    tokens: int
    model_len: int
    adapter_slots: int


class WarmUp:
    """Call `run` once, before the KV cache is used: tokens are written into block 0."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: list[Tensor],
        block_size: int,
        sampler: Sampler,
        adapters: AdapterPath,
        limits: StepLimits,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._sampler = sampler
        self._adapters = adapters
        self._limits = limits
        self._transfers = HostTransfers(decoder.device)

    @torch.inference_mode()
    def run(self) -> None:
        """Run steps, the head of scored positions, and the sampler."""
        for rows in self._steps():
            self._decoder.forward(self._batch(rows), self._kv_cache)
        scorer = Scorer(self._decoder, self._adapters)
        for count in first_of_each(self._decoder.tiling, min(scorer.slice_rows, self._limits.tokens)):
            scorer.warm_up(count)
        for samplings in (SAMPLINGS, *((sampling,) for sampling in SAMPLINGS)):
            self._sample(_sequences(samplings))

    def _steps(self) -> Iterator[list[PlannedRow]]:
        """Every tiling of decodes and of chunks, then every path of adapters."""
        limits = self._limits
        for count in first_of_each(self._decoder.tiling, limits.tokens):
            yield self._decodes(count)
            yield self._chunks(max(count, SOME_ROWS))
        if limits.adapter_slots and backend_on(self._decoder.device) is KernelBackend.TRITON:
            yield self._adapted(1)
            yield [*self._adapted(1), *self._chunks(SOME_ROWS, _adapter(0))]
            yield self._adapted(min(FEW_ADAPTERS + 1, limits.adapter_slots))

    def _adapted(self, adapters: int) -> list[PlannedRow]:
        """Return decodes of so many adapters."""
        rows = self._decodes(max(SOME_ROWS, adapters))
        return [replace(row, adapter=_adapter(index % adapters)) for index, row in enumerate(rows)]

    def _decodes(self, count: int) -> list[PlannedRow]:
        """Return `count` first tokens without a prompt; no more are sampled than in the largest step."""
        return [
            PlannedRow(_sequence(0), 0, (0,), (0,), None, samples=row < self._limits.rows)
            for row in range(count)
        ]

    def _chunks(self, count: int, adapter: AdapterRef | None = None) -> list[PlannedRow]:
        """Return prompts of `count` tokens in all, none longer than the model's context; several if possible."""
        longest = self._limits.model_len
        lengths = [1, *(min(longest, count - begin) for begin in range(1, count, longest))]
        return [
            PlannedRow(_sequence(length), 0, (0,) * length, self._table(length), adapter, samples=True)
            for length in lengths[: self._limits.rows]
        ]

    def _table(self, tokens: int) -> tuple[int, ...]:
        return (0,) * -(-tokens // self._block_size)

    def _batch(self, rows: list[PlannedRow]) -> ForwardBatch:
        slots = {row.adapter.key: int(row.adapter.digest) for row in rows if row.adapter is not None}
        batch = BatchRows(StepPlan(tuple(rows)), self._block_size, slots).batch(
            self._decoder.device, self._transfers, None, self._adapters
        )
        return replace(batch, lora=_everywhere(batch.lora), sampled_lora=_everywhere(batch.sampled_lora))

    def _sample(self, sequences: list[Sequence]) -> None:
        """Sample a token of each sequence, then the same with a mask for each."""
        decoder, vocab = self._decoder, self._decoder.config.vocab_size
        logits = torch.zeros(len(sequences), vocab, dtype=decoder.dtype, device=decoder.device)
        bitmask = torch.full((len(sequences), -(-vocab // 32)), -1, dtype=torch.int32, device=decoder.device)
        self._sampler.sample(logits, sequences)
        for sequence in sequences:
            # The sampler asks only whether there is one.
            sequence.token_mask = cast("TokenMask", object())
        self._sampler.sample(logits, sequences, bitmask)
        for sequence in sequences:
            self._sampler.forget(sequence)


def first_of_each(tiling: Callable[[int], Hashable], most: int) -> list[int]:
    """Return the smallest number in 1 ... `most` of each value of `tiling`."""
    found: dict[Hashable, int] = {}
    for count in range(1, most + 1):
        found.setdefault(tiling(count), count)
    return list(found.values())


def _everywhere(lora: LoraBatch | None) -> LoraBatch | None:
    """Return the same rows for a step in which every site acts, though no adapter is loaded."""
    return replace(lora, is_static=True) if isinstance(lora, DeviceLoraBatch) else lora


def _adapter(slot: int) -> AdapterRef:
    return AdapterRef(namespace=b"", digest=str(slot), blob_path="")


def _sequence(prompt_tokens: int, sampling: SamplingParams = SAMPLINGS[0]) -> Sequence:
    """Return a sequence of no request. Its token is 0."""
    request = EngineRequest(
        request_id="", namespace=b"", prompt_token_ids=[0] * prompt_tokens, sampling=sampling
    )
    return Sequence(request=request, choice=0, arrival=0.0, seed=0, token_ids=[0])


def _sequences(samplings: Iterable[SamplingParams]) -> list[Sequence]:
    return [_sequence(1, sampling) for sampling in samplings]
