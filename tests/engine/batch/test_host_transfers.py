"""Packed transfers return the given tensors, whatever their types and sizes; here from a CPU to itself."""

from typing import Any

import msgspec
import numpy as np
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


VALUES: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 500),
    "n": (2,),
    "temperature": (0.0, 0.4, 2.0),
    "top_p": (0.3, 1.0),
    "top_k": (1, 40),
    "min_p": (0.1, 1.0),
    "presence_penalty": (-2.0, 1.5),
    "frequency_penalty": (-2.0, 0.5),
    "repetition_penalty": (0.5, 1.3),
    "logit_bias": ({7: 100.0}, {4: -100.0, 5: 3.0}),
    "min_tokens": (1, 5),
    "stop": (("a", "b"),),
    "stops_behind": (("<a>", "</a>"),),
    "stop_token_ids": ((5, 6),),
    "ignore_eos": (True,),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (False,),
    "seed": (-3, 11),
    "logprobs": (0, 1, 20),
}
"""Values of every sampling parameter that differ from its default or are at a bound."""


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


@pytest.mark.parametrize(("dtype", "shape"), [(np.int64, (0,)), (np.float32, (2, 0)), (np.int32, (0, 3))])
def test_tensors_of_no_bytes_are_packed(dtype: Any, shape: tuple[int, ...]) -> None:
    """One that NumPy made has no stride, by which it could be viewed as bytes."""
    empty, other = torch.from_numpy(np.concatenate([np.empty(shape, dtype)])), torch.arange(3)
    transfers = HostTransfers(CPU, packs=True)
    for tensors in ([empty], [empty, other], [other, empty]):
        for arrived in (transfers.stage(tensors), transfers.fetch(tensors).wait()):
            assert [t.dtype for t in arrived] == [t.dtype for t in tensors]
            assert all(map(torch.equal, arrived, tensors))


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


def first_token(sampling: dict[str, Any], seed: int) -> Sequence:
    """A sequence that has its prompt alone."""
    params = SamplingParams(**{"max_tokens": 99, "temperature": 0.0, **sampling})
    request = EngineRequest(request_id="r", namespace=b"", prompt_token_ids=[1, 2], sampling=params)
    return Sequence(request, 0, 0.0, seed, [1, 2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_token_with_each_parameter_is_the_same_packed(temperature: float) -> None:
    assert VALUES.keys() == {field.name for field in msgspec.structs.fields(SamplingParams)}
    each = [{"temperature": temperature, name: value} for name, values in VALUES.items() for value in values]
    for samplings in (*([sampling] for sampling in each), *([sampling] * 2 for sampling in each), each):
        logits = torch.randn(len(samplings), 300, generator=torch.Generator().manual_seed(len(samplings)))
        plain, packed = (
            Sampler(300, [0], transfers=HostTransfers(CPU, packs)).sample(
                logits, [first_token(sampling, seed) for seed, sampling in enumerate(samplings)]
            )
            for packs in (False, True)
        )
        assert plain == packed and all(token.finite for token in plain), samplings
