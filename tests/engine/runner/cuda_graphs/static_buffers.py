"""The buffers of captured steps, which tests poison between replays."""

from torch import Tensor

from loraplex.engine.runner.cuda_graphs.static_inputs import StaticInputs


def buffers_of(inputs: StaticInputs) -> tuple[Tensor, ...]:
    chunks = inputs.chunks
    return (
        inputs.token_ids,
        inputs.positions,
        inputs.slots,
        inputs.row_slots,
        inputs.tables,
        inputs.lengths,
        inputs.sampled,
        *(chunks.begins, chunks.ends, chunks.lengths, chunks.tables),
        *(chunks.tile_chunks, chunks.tile_begins),
    )
