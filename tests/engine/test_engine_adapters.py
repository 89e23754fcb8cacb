"""`Engine` with adapters in pages of an arena, as on a GPU but in host memory, and with adapters in 8 bits."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from tests.engine.lora.immediate_stream import ImmediateStream
from tests.engine.test_engine import ADAPTERS, Harness, Reference, harnesses, prompts
from torch import Tensor

from loraplex.engine.errors import AdapterInexact
from loraplex.engine.kernels import dispatch
from loraplex.engine.lora import pool_factory
from loraplex.engine.lora.memory.device_memory import DeviceAdapterMemory
from loraplex.engine.lora.memory.page_copy import copy_pages
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.site import LoraSite


@pytest.fixture(scope="module")
def peft(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("engine-adapters"))


@pytest.fixture
def engine(peft: Reference) -> Iterator[Callable[..., Harness]]:
    yield from harnesses(peft)


def in_pages(
    sites: Sequence[LoraSite],
    pages: PageFormat,
    *,
    max_bytes: int,
    max_slots: int,
    max_rank: int,
    device: torch.device,
    allocate_blob: Callable[[int], Tensor],
) -> DeviceAdapterMemory:
    """What a GPU has, in host memory."""
    return DeviceAdapterMemory(
        sites,
        pages,
        max_bytes=max_bytes,
        max_slots=max_slots,
        max_rank=max_rank,
        device=device,
        allocate_blob=allocate_blob,
        stream=ImmediateStream(),
        start_copy=partial(copy_pages, ImmediateStream()),
    )


def test_adapters_in_pages_of_an_arena_equal_peft(
    peft: Reference, engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks over one page, on the embedding and the head too, in an arena that holds two or three of them."""
    monkeypatch.setattr(pool_factory, "open_memory", in_pages)
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.REFERENCE)
    served = engine(max_bytes=200_000, max_rank=32)
    names = [None, *ADAPTERS]
    for index, prompt in enumerate(prompts(12, seed=9)):
        served.add(str(index), prompt, names[index % len(names)], max_tokens=12)
    served.run()
    assert not served.failures and served.engine.stats().adapter_evictions > 0
    for index, prompt in enumerate(prompts(12, seed=9)):
        peft.check(names[index % len(names)], prompt, served.outputs[str(index), 0])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("page_dtype", ["int8", "fp8"])
def test_adapters_in_8_bits_run_and_report_their_error(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, page_dtype: str, paged: bool
) -> None:
    if paged:
        monkeypatch.setattr(pool_factory, "open_memory", in_pages)
    served = engine(page_dtype=page_dtype, max_rank=32)
    for index, prompt in enumerate(prompts(5, seed=11)):
        served.add(str(index), prompt, list(ADAPTERS)[index], max_tokens=4)
    served.run()
    assert not served.failures
    assert 0.001 < served.engine.stats().adapter_page_error < 0.05


def test_an_adapter_that_8_bits_spoil_fails_its_request_alone(engine: Callable[..., Harness]) -> None:
    served = engine(page_dtype="int8", max_page_error=1e-4)
    served.add("spoilt", [5, 6], "mlp")
    served.add("base", [5, 6])
    served.run()
    assert served.failures == {"spoilt": AdapterInexact.code}
