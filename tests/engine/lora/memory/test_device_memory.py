"""`DeviceAdapterMemory` on an arena in host memory: bytes per rank row, and pages at the places in the table, in every
type.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.engine.lora.immediate_stream import ImmediateStream

from loraplex.engine.errors import AdapterInexact, AdapterTooLarge
from loraplex.engine.kernels.reference.sgmv import sgmv
from loraplex.engine.lora.batch import group_rows
from loraplex.engine.lora.memory.base import Placement
from loraplex.engine.lora.memory.device_memory import DeviceAdapterMemory
from loraplex.engine.lora.memory.host_cache import HostCache
from loraplex.engine.lora.memory.page_copy import copy_pages
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.page_geometry import ALIGNMENT, PAGE_RANKS
from loraplex.engine.lora.site import A_PAGES, LoraSite, make_site
from loraplex.engine.lora.weights import LoraModule, LoraWeights

CPU = torch.device("cpu")
QKV = tuple(f"layers.0.{name}_proj" for name in "qkv")
DOWN = ("layers.0.down_proj",)
WIDTHS = dict.fromkeys(QKV, (64, 32)) | {QKV[0]: (64, 96), DOWN[0]: (80, 64)}


def sites() -> list[LoraSite]:
    return [
        make_site(QKV, 64, (96, 32, 32), 6, CPU, 64),
        make_site(DOWN, 80, (64,), 6, CPU, 64),
    ]


def memory(places: Sequence[LoraSite], pages: PageFormat, max_bytes: int = 1 << 18) -> DeviceAdapterMemory:
    return DeviceAdapterMemory(
        places,
        pages,
        max_bytes=max_bytes,
        max_slots=6,
        max_rank=64,
        device=CPU,
        allocate_blob=HostCache(0).blob,
        stream=ImmediateStream(),
        start_copy=partial(copy_pages, ImmediateStream()),
    )


def adapter(digest: str, ranks: dict[str, int], seed: int = 0) -> LoraWeights:
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for name, rank in ranks.items():
        inputs, outputs = WIDTHS[name]
        a = torch.randn((rank, inputs), generator=generator)
        modules[name] = LoraModule(a, 0.1 * torch.randn((outputs, rank), generator=generator))
    return LoraWeights(digest, modules)


def install(pool: DeviceAdapterMemory, slot: int, weights: LoraWeights) -> Placement:
    placement = pool.place(slot, pool.pack(weights))
    assert pool.is_there(placement)
    pool.install(placement)
    return placement


@pytest.mark.parametrize("rank", [1, 8, 16, 17, 40, 64])
def test_a_rank_costs_its_own_rows_and_no_more(rank: int) -> None:
    pool = memory(sites(), PageFormat(torch.bfloat16))
    packed = pool.pack(adapter("a", dict.fromkeys(WIDTHS, rank)))
    exact = rank * 2 * sum(inputs + outputs for inputs, outputs in WIDTHS.values())
    assert packed.nbytes == exact == packed.blob.nbytes
    placement = pool.place(0, packed)
    assert placement.nbytes == pool.used_bytes == exact


@pytest.mark.parametrize("page_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_the_table_leads_to_the_pages_of_every_adapter(page_dtype: torch.dtype | None) -> None:
    """Read the table as a kernel does, page by page, at the adapter's own rank."""
    places = sites()
    pages = PageFormat(torch.float32, page_dtype)
    pool = memory(places, pages)
    adapters = [
        adapter("a", dict.fromkeys(WIDTHS, 40), seed=1),
        adapter("b", {QKV[1]: 3, DOWN[0]: 17}, seed=2),
        adapter("c", {QKV[0]: 16, QKV[2]: 9}, seed=3),
    ]
    for slot, weights in enumerate(adapters):
        install(pool, slot, weights)
    for (slot, weights), site in itertools.product(enumerate(adapters), places):
        expected, _ = pages.rounded(weights, site.names)
        for s, name in enumerate(site.names):
            entry = site.table[slot, s]
            if name not in expected:
                assert not entry.any()
                continue
            assert entry[0] == weights.modules[name].rank
            a, b = read(pool, site, slot, s)
            scales = scales_of(pool, site, slot, s)
            torch.testing.assert_close(b.t() @ (a * scales), expected[name].b @ expected[name].a)


def read(pool: DeviceAdapterMemory, site: LoraSite, slot: int, s: int) -> tuple[torch.Tensor, torch.Tensor]:
    entry = [int(value) for value in site.table[slot, s]]
    found = []
    for first, width in ((A_PAGES, site.inputs), (A_PAGES + site.max_pages, site.slice_sizes[s])):
        rows = []
        for number in range(-(-entry[0] // PAGE_RANKS)):
            address = entry[first + number]
            assert address % ALIGNMENT == 0
            count = min(PAGE_RANKS, entry[0] - number * PAGE_RANKS)
            start, dtype = address - pool._base, pool._pages.dtype
            content = pool._storage[start : start + count * width * dtype.itemsize]
            rows.append(content.view(dtype).view(count, width).float())
        assert not any(entry[first + len(rows) : first + site.max_pages])
        found.append(torch.cat(rows))
    return found[0], found[1]


def scales_of(pool: DeviceAdapterMemory, site: LoraSite, slot: int, s: int) -> torch.Tensor:
    rank, address = int(site.table[slot, s, 0]), int(site.table[slot, s, 1])
    if not address:
        return torch.ones(rank, 1)
    start = address - pool._base
    return pool._storage[start : start + 4 * rank].view(torch.float32).unsqueeze(1)


@pytest.mark.parametrize("page_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_the_torch_backend_reads_what_the_table_says(page_dtype: torch.dtype | None) -> None:
    places = sites()
    pages = PageFormat(torch.float32, page_dtype)
    pool = memory(places, pages)
    weights = adapter("a", {QKV[0]: 20, QKV[2]: 5}, seed=4)
    install(pool, 2, weights)
    assert places[0].page_dtype is page_dtype and 2 not in places[1].slots
    x, y = torch.randn(3, 64), torch.zeros(3, 160)
    batch = group_rows([2, -1, 2], CPU)
    assert batch is not None
    sgmv(x, y, places[0], batch.groups)
    expected, _ = pages.rounded(weights, QKV)
    for begin, name in ((0, QKV[0]), (128, QKV[2])):
        delta = x @ expected[name].a.t() @ expected[name].b.t()
        delta[1] = 0
        torch.testing.assert_close(y[:, begin : begin + delta.shape[1]], delta, rtol=1e-4, atol=1e-4)
    assert not y[:, 96:128].any()


def test_removing_gives_every_byte_back_and_clears_the_table() -> None:
    places = sites()
    pool = memory(places, PageFormat(torch.float32, torch.int8))
    placements = [
        install(pool, slot, adapter(str(slot), dict.fromkeys(WIDTHS, 8 + slot))) for slot in range(3)
    ]
    assert pool.used_bytes == sum(placement.nbytes for placement in placements) <= pool.max_bytes
    for placement in placements:
        pool.remove(placement)
    assert (pool.used_bytes, pool.waste_bytes) == (0, 0)
    assert not any(site.table.any() or site.slots for site in places)


def test_8_bit_pages_take_half_and_their_scales_little() -> None:
    weights = adapter("a", dict.fromkeys(WIDTHS, 16))
    whole = memory(sites(), PageFormat(torch.bfloat16)).pack(weights)
    halved = memory(sites(), PageFormat(torch.bfloat16, torch.int8)).pack(weights)
    assert halved.blob.nbytes == whole.blob.nbytes // 2 + 64 * len(WIDTHS)
    assert halved.report is not None and 0.005 < halved.report.worst < 0.03


def test_what_the_empty_arena_cannot_hold_is_refused_for_good() -> None:
    pool = memory(sites(), PageFormat(torch.float32), max_bytes=64 * 1000)
    with pytest.raises(
        AdapterTooLarge, match=r"adapter large takes \d+ bytes in pages; the arena of \d+ slabs"
    ):
        pool.pack(adapter("large", dict.fromkeys(WIDTHS, 64)))
    assert pool.fits(pool.pack(adapter("small", dict.fromkeys(WIDTHS, 8))))


def test_an_adapter_over_the_bound_of_error_is_refused() -> None:
    pool = memory(sites(), PageFormat(torch.float32, torch.int8, max_error=0.001))
    with pytest.raises(AdapterInexact, match="allowed is 0.001"):
        pool.pack(adapter("a", {DOWN[0]: 4}))


def test_fresh_pages_go_in_few_copies() -> None:
    """Eight matrices of four page sizes, side by side in the blob and in the empty arena: one copy per size."""
    pool = memory(sites(), PageFormat(torch.float32), max_bytes=1 << 22)
    placement = install(pool, 0, adapter("a", dict.fromkeys(WIDTHS, 16)))
    assert placement.copy is not None
    (spans,) = placement.copy.batches()
    assert len(placement.packed.pages) == 8 and len(spans) == 4
    assert sum(nbytes for _, _, nbytes in spans) == placement.packed.blob.nbytes
