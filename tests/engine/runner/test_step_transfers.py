"""The transfers of a step: one each for its inputs and its sampling, one back, and no value read in between.

The device is `meta`, which has shapes and no values: reading one fails.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.engine.runner.cuda_graphs.static_buffers import buffers_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.engine.batch.forward_batch import BatchRows, UnknownTokens
from loraplex.engine.batch.host_transfers import HostTransfers, Results
from loraplex.engine.batch.sequence import Sequence as Row
from loraplex.engine.batch.step_plan import UNKNOWN_TOKEN, PlannedRow, StepPlan
from loraplex.engine.messages import EngineRequest
from loraplex.engine.runner.cuda_graphs.buckets import Buckets, StepShape
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticBlocks, StaticInputs
from loraplex.engine.sampling import sampler as sampler_module
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.sampling.sampling_batch import SampledRows
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.token_mask import TokenMask

VOCAB = 1000
META = torch.device("meta")

PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"logit_bias": {5: 1.0}, "temperature": 1.0, "logprobs": 0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"min_tokens": 50, "stop_token_ids": (7, 8)},
)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies between host and device, and what asks the device for a number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.to_device = 0
        self.questions: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            self.questions.append(name)
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if source.device != result.device:
                self.to_device += result.device == META
                self.questions += [name] * (result.device != META)
        return result


class ListWatch(TorchFunctionMode):
    """Finds tensors that are made on the device of a Python list, each with a wait of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.lists += func in (torch.tensor, torch.as_tensor) and result.device == META
        return result


class CountedTransfers(HostTransfers):
    """There is nothing to bring back."""

    def __init__(self) -> None:
        super().__init__(META)
        self.stages = 0
        self.fetches = 0

    def stage(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.stages += 1
        return super().stage(tensors)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Results:
        self.fetches += 1
        assert all(tensor.device == META for tensor in tensors)
        return Results([torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors], None)


def row(index: int, mask: TokenMask | None = None, **sampling: Any) -> Row:
    params = SamplingParams(**{"max_tokens": 100, "temperature": 0.0} | sampling)
    request = EngineRequest(request_id="r", namespace=b"", prompt_token_ids=[1, 2], sampling=params)
    return Row(request, 0, 0.0, index, [1, 2, 3], token_mask=mask)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> CountedTransfers:
    monkeypatch.setattr(sampler_module, "apply_bitmask", lambda logits, rows, bitmask: None)
    return CountedTransfers()


@pytest.mark.parametrize("parameters", [*((p,) for p in PARAMETERS), PARAMETERS])
def test_a_step_asks_the_device_for_nothing_but_its_results(
    transfers: CountedTransfers, parameters: tuple[dict[str, Any], ...]
) -> None:
    sampler = Sampler(VOCAB, [0], transfers=transfers)
    rows = [row(index, **p) for index, p in enumerate(parameters * 3)]
    for step in range(1, 4):
        with Watch() as watch, ListWatch() as lists:
            pending = sampler.start(torch.empty(len(rows), VOCAB, device=META), rows)
        assert watch.questions == [] and lists.lists == 0
        assert watch.to_device <= 1
        assert transfers.fetches == step
        for sequence, token in zip(rows, pending.collect(), strict=True):
            sequence.token_ids.append(token.token_id)


def test_the_watch_sees_what_it_is_for() -> None:
    with Watch() as watch, ListWatch() as lists:
        torch.tensor([1.0], device=META)
        torch.ones(2).to(META)
    assert (watch.to_device, lists.lists) == (1, 1)
    with Watch() as watch:
        torch.ones(3).nonzero()
        torch.ones(1).item()
    assert watch.questions == ["nonzero", "_local_scalar_dense"]


def test_parameters_stay_on_the_device_while_the_batch_keeps_its_rows(transfers: CountedTransfers) -> None:
    sampler = Sampler(VOCAB, [0], transfers=transfers)
    rows = [row(index, logit_bias={3: 1.0}, logprobs=1) for index in range(4)]
    logits = torch.empty(4, VOCAB, device=META)
    for _ in range(3):
        sampler.start(logits, rows)
    assert transfers.stages == 1
    sampler.start(logits[:3], rows[:3])
    assert transfers.stages == 2


def test_rows_are_rebuilt_when_a_mask_or_an_ending_changes() -> None:
    rows = [row(0, temperature=1.0), row(1)]
    held = SampledRows(rows, VOCAB)
    assert held.is_of(list(rows)) and not held.is_of(rows[:1])
    rows[1].token_mask = object()  # type: ignore[assignment]
    assert not held.is_of(rows)
    short = [row(0, min_tokens=9)]
    assert not SampledRows(short, VOCAB).is_of(short), "it may end after its next token"


def step_rows(decodes: int, chunks: Sequence[int] = ()) -> BatchRows:
    """Rows of one token each, every other one not known yet; then chunks of so many tokens, the ends of prompts."""
    planned = [
        PlannedRow(row(i), 3 + i, (UNKNOWN_TOKEN if i % 2 else i,), (2 * i, 2 * i + 1), None, True)
        for i in range(decodes)
    ]
    for i, count in enumerate(chunks, decodes):
        table = (2 * i, 2 * i + 1)
        planned.append(PlannedRow(row(i), 0, tuple(range(count)), table, None, True))
    return BatchRows(StepPlan(tuple(planned)), 4, {})


def before(rows: BatchRows, device: torch.device) -> UnknownTokens:
    sequences = [sequence for _, sequence in rows.unknown]
    places = {sequence: index for index, sequence in enumerate(reversed(sequences))}
    return UnknownTokens(places, torch.arange(100, 100 + len(sequences), device=device))


def static_inputs(device: torch.device, packs: bool | None = None) -> StaticInputs:
    return StaticInputs(Buckets(8, 16), StaticBlocks(6, 4, 20), device, HostTransfers(device, packs))


DECODES = StepShape(8, 8, 0, None)
MIXED = StepShape(16, 16, 8, 8)


@pytest.mark.parametrize("chunks", [[], [3, 1]])
def test_the_inputs_of_a_step_travel_at_once(chunks: list[int]) -> None:
    rows = step_rows(5, chunks)
    inputs = static_inputs(META)
    for launch in (
        lambda: inputs.fill(rows, MIXED if chunks else DECODES, before(rows, META)),
        lambda: rows.batch(META, HostTransfers(META), before(rows, META)),
    ):
        with Watch() as watch, ListWatch() as lists:
            launch()
        assert watch.questions == [] and (watch.to_device, lists.lists) == (1, 0)


@pytest.mark.parametrize("packs", [False, True])
def test_padding_is_of_no_row_and_unknown_tokens_are_those_of_the_step_before(packs: bool) -> None:
    cpu = torch.device("cpu")
    rows = step_rows(5)
    inputs = static_inputs(cpu, packs)
    for buffer in buffers_of(inputs):
        buffer.fill_(-9)
    assert inputs.fill(rows, DECODES, before(rows, cpu)).tolist() == [*range(5)]
    assert inputs.token_ids.tolist() == [0, 101, 2, 100, 4, 0, 0, 0, *[-9] * 8]
    assert inputs.positions.tolist()[:8] == [3, 4, 5, 6, 7, 0, 0, 0]
    assert inputs.lengths.tolist()[:8] == [4, 5, 6, 7, 8, 0, 0, 0], "padding is no decode"
    assert inputs.slots.tolist()[4:8] == [9 * 4 + 3, 80, 80, 80]
    assert inputs.row_slots.tolist()[:8] == [-1] * 8
    assert inputs.tables[4:].tolist() == [[8, 9, *[-9] * 4], *[[-9] * 6] * 11]
    batch = inputs.batch(DECODES, None, None)
    assert batch.num_decodes == batch.num_sampled == 8
    assert batch.sampled_tokens is None and batch.chunks is None
    eager = rows.batch(cpu, HostTransfers(cpu, packs), before(rows, cpu))
    for name in ("token_ids", "positions", "slots", "decode_lengths"):
        assert getattr(eager, name).tolist() == getattr(batch, name)[:5].tolist()


@pytest.mark.parametrize("packs", [False, True])
def test_chunks_of_a_captured_step_are_those_of_the_eager_one(packs: bool) -> None:
    cpu = torch.device("cpu")
    rows = step_rows(5, [3, 1])
    inputs = static_inputs(cpu, packs)
    for buffer in buffers_of(inputs):
        buffer.fill_(-9)
    inputs.fill(rows, MIXED, before(rows, cpu))
    batch = inputs.batch(MIXED, None, None)
    eager = rows.batch(cpu, HostTransfers(cpu, packs), before(rows, cpu))
    found, expected = batch.chunks, eager.chunks
    assert found is not None and expected is not None
    assert found.begins.tolist() == [5, 8, *[0] * 6] and found.ends.tolist() == [8, 9, *[0] * 6]
    for name in ("begins", "ends", "lengths", "tile_chunks", "tile_begins"):
        count = len(getattr(expected, name))
        assert getattr(found, name)[:count].tolist() == getattr(expected, name).tolist()
    assert found.tile_chunks.tolist()[2:] == [-1] * (len(found.tile_chunks) - 2)
    assert found.tables[:2, :2].tolist() == expected.tables.tolist() == [[10, 11], [12, 13]]
    assert batch.decode_lengths.tolist() == [4, 5, 6, 7, 8, *[0] * 11]
    assert batch.sampled_tokens is not None and eager.sampled_tokens is not None
    assert batch.sampled_tokens.tolist() == [*eager.sampled_tokens.tolist(), 0] == [0, 1, 2, 3, 4, 7, 8, 0]


def test_a_row_without_a_token_goes_on_with_one_that_there_is() -> None:
    """Its embedding is read all the same: a negative index would end a GPU's context, and every row with it."""
    cpu = torch.device("cpu")
    rows = step_rows(2)
    failed = UnknownTokens({sequence: 0 for _, sequence in rows.unknown}, torch.tensor([-2]))
    inputs = static_inputs(cpu)
    inputs.fill(rows, DECODES, failed)
    assert inputs.token_ids.tolist()[:2] == [0, 0]
    assert rows.batch(cpu, HostTransfers(cpu), failed).token_ids.tolist() == [0, 0]


def test_a_token_that_no_step_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no step before"):
        step_rows(2).batch(META, HostTransfers(META))
