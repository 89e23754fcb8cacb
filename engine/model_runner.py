"""`ModelRunner`: executes a step plan: tensors, forward pass, sampling. Knows no queue and decides nothing."""

from torch import Tensor

from loraplex.engine.forward_batch import ForwardBatch, make_forward_batch
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.plan import SampledToken, StepPlan
from loraplex.engine.sampler import Sampler
from loraplex.engine.sequence import Sequence


class ModelRunner:
    """Owns the KV tensors; shares the decoder's sites with the adapter pool."""

    def __init__(
        self, decoder: Decoder, kv_cache: list[Tensor], block_size: int, sampler: Sampler, pool: AdapterPool
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._sampler = sampler
        self._pool = pool

    def execute(self, plan: StepPlan) -> dict[Sequence, SampledToken]:
        """Compute every row of the plan and sample those that ask for it."""
        sequences = [row.sequence for row in plan.rows if row.samples]
        tokens = self._sampler.sample(self.logits(plan), sequences)
        return dict(zip(sequences, tokens, strict=True))

    def logits(self, plan: StepPlan) -> Tensor:
        """Logits [sampled rows, vocab] of the plan, in its order; K and V are written."""
        batch = make_forward_batch(plan, self._block_size, self._pool.slots(), self._decoder.device)
        return self.forward(batch)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits of a batch made elsewhere: benchmarks and tests."""
        return self._decoder.forward(batch, self._kv_cache)

    def forget(self, sequence: Sequence) -> None:
        """Drop what the sampler remembers of a sequence that ended."""
        self._sampler.forget(sequence)
