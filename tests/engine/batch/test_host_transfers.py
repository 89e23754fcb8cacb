"""Packed transfers return the given tensors, whatever their types and sizes; here from a CPU to itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
TYPES = (torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.uint8)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=3).map(tuple)), max_size=6
    ),
    st.integers(0, 1000),
)
def test_tensors_arrive_as_they_were(
    specifications: list[tuple[torch.dtype, tuple[int, ...]]], seed: int
) -> None:
    transfers = HostTransfers(CPU, packs=True)
    for step in range(4):
        tensors = [random_tensor(dtype, shape, seed + step) for dtype, shape in specifications]
        for arrived in (transfers.stage(tensors), transfers.fetch(tensors).wait()):
            assert [t.dtype for t in arrived] == [t.dtype for t in tensors]
            assert all(
                torch.equal(a, t) and a.data_ptr() != t.data_ptr() or not t.numel()
                for a, t in zip(arrived, tensors, strict=True)
            )


def test_earlier_tensors_do_not_change_with_later_ones() -> None:
    transfers = HostTransfers(CPU, packs=True)
    first = transfers.stage([torch.full((4,), 1)])[0]
    for value in range(2, 9):
        transfers.stage([torch.full((4,), value)])
    assert first.tolist() == [1] * 4


def test_strided_tensors_are_packed() -> None:
    tensor = torch.arange(12).view(3, 4).t()
    assert torch.equal(HostTransfers(CPU, packs=True).stage([tensor])[0], tensor)


def test_on_the_host_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert HostTransfers(CPU).stage([tensor])[0] is tensor
    assert HostTransfers(CPU).fetch([tensor]).wait()[0] is tensor


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sampler_with_packed_transfers_gives_the_same_tokens(temperature: float) -> None:
    def rows() -> list[Sequence]:
        found = []
        for seed in range(6):
            params = SamplingParams(
                max_tokens=99,
                temperature=temperature,
                top_p=0.8,
                logprobs=seed if seed % 2 else None,
                frequency_penalty=0.5,
                min_tokens=3,
                stop_token_ids=(5, 6),
                logit_bias={seed: 2.0},
            )
            request = EngineRequest(request_id="r", namespace=b"", prompt_token_ids=[1, 2], sampling=params)
            found.append(Sequence(request, 0, 0.0, seed, [1, 2, 9]))
        return found

    plain, packed = Sampler(300, [0]), Sampler(300, [0], transfers=HostTransfers(CPU, packs=True))
    ours, theirs = rows(), rows()
    for step in range(5):
        logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(step))
        expected, found = plain.sample(logits, ours), packed.sample(logits, theirs)
        assert expected == found
        for sequences, sampled in ((ours, expected), (theirs, found)):
            for sequence, token in zip(sequences, sampled, strict=True):
                sequence.token_ids.append(token.token_id)
