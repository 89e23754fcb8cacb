"""Opens the adapter pool of a device: an arena, and blobs in pinned memory, on a GPU; blobs alone on a CPU."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loraplex.engine.config import LoraConfig
from loraplex.engine.lora.load_budget import LoadBudget
from loraplex.engine.lora.loader import AdapterSource, Fitting, LoaderThread
from loraplex.engine.lora.memory.base import AdapterMemory
from loraplex.engine.lora.memory.device_memory import DeviceAdapterMemory
from loraplex.engine.lora.memory.host_cache import HostCache
from loraplex.engine.lora.memory.host_memory import HostAdapterMemory
from loraplex.engine.lora.memory.page_copy import CopyThread, CudaCopyStream
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.memory.pinned_arena import PinnedArena
from loraplex.engine.lora.page_geometry import MAX_RANK
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.quarantine import QuarantineTracker
from loraplex.engine.lora.site import LoraSite

SHARE_UNDER_WAY = 4
"""A quarter of the budget may be loading: more would evict adapters that running rows return to."""


def open_pool(
    sites: Sequence[LoraSite],
    source: AdapterSource,
    config: LoraConfig,
    *,
    max_bytes: int,
    max_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] = time.monotonic,
) -> AdapterPool:
    """Open a pool of `max_bytes`, whatever `config` asks for. Raises `ValueError` for an unknown `page_dtype`, or a
    `max_rank` that the kernels have no room for.
    """
    if not 1 <= config.max_rank <= MAX_RANK:
        raise ValueError(f"max_rank must lie in 1..{MAX_RANK}, got {config.max_rank}")
    pages = PageFormat.of(config.page_dtype, dtype, config.max_page_error)
    # On a CPU a blob in the host cache would take memory that `max_bytes` could have. Without adapters none comes back.
    on_host = 0 if device.type == "cpu" or not max_bytes else config.host_max_bytes
    host = HostCache(on_host, PinnedArena(on_host, pinned=device.type == "cuda"))
    memory = open_memory(
        sites,
        pages,
        max_bytes=max_bytes,
        max_slots=max_slots,
        max_rank=config.max_rank,
        device=device,
        allocate_blob=host.blob,
    )
    under_way = max(1, max_bytes // SHARE_UNDER_WAY)
    loader = LoaderThread(
        source, Fitting(sites, config.max_rank), memory.pack, max_bytes=under_way, clock=clock
    )
    faults = QuarantineTracker(config.quarantine_after)
    return AdapterPool(memory, loader, host, faults, LoadBudget(under_way), clock)


def open_memory(
    sites: Sequence[LoraSite],
    pages: PageFormat,
    *,
    max_bytes: int,
    max_slots: int,
    max_rank: int,
    device: torch.device,
    allocate_blob: Callable[[int], Tensor],
) -> AdapterMemory:
    """Return memory that kernels of this device can read."""
    if device.type == "cpu":
        return HostAdapterMemory(sites, pages, max_bytes=max_bytes, max_slots=max_slots, max_rank=max_rank)
    stream = CudaCopyStream(device)
    copies = CopyThread(stream)
    return DeviceAdapterMemory(
        sites,
        pages,
        max_bytes=max_bytes,
        max_slots=max_slots,
        max_rank=max_rank,
        device=device,
        allocate_blob=allocate_blob,
        stream=stream,
        start_copy=copies.start,
        end_copies=copies.close,
    )
