"""The memory worksheet: what a model, its adapters and its KV cache take, and how many rows that serves. Free of torch.

Invariant: pure arithmetic on the configuration; nothing is allocated and no file but config.json is read.
"""

from dataclasses import dataclass

from loraplex.engine.capacity.weight_bytes import ITEM_SIZES, WeightBytes, weight_bytes
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ModelError
from loraplex.engine.lora.page_geometry import (
    ALIGNMENT,
    MAX_ADAPTER_SLOTS,
    MIN_SCALE_BYTES,
    PAGE_RANKS,
    SPLIT_K,
)
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.sampling_params import CPU_SCORE_SLICE_BYTES, SCORE_SLICE_BYTES

CPU_KV_BYTES = 1 << 30
"""The default KV pool of a CPU: its memory is the machine's, and other processes use it too."""
MIN_ADAPTER_BYTES = 512 << 20
"""The adapters' default where the device's memory is unknown, as a CPU's is, and the least of it on a GPU."""
ADAPTER_SHARE = 4
"""A GPU's adapters get a quarter of what weights and reserve leave, its KV cache the rest."""
_GRAPH_BYTES = 512 << 20
"""Captured graphs keep their kernels' arguments and the partial sums of attention. An estimate."""
_GRAPH_TOKENS = 2048
"""Captured graphs share one set of activations, of a step of at most so many tokens."""
_CONTEXT_BYTES = 640 << 20
"""CUDA's context, loaded kernels and the workspace of its matrix products. An estimate."""
_SAMPLING_COPIES = 4
"""fp32 rows of logits that sampling needs at once: logits, probabilities, sorted values and their indices."""
_SCORE_COPIES = 3
"""Of a slice of scored positions: logits in the model's type and in float32, and their log-softmax."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`memory` bytes of the device (None: unknown), of which `free` are unused. `dtype` is the type of the computation."""

    is_cuda: bool
    dtype: str
    memory: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What the worksheet is computed for: rows of `context` tokens (None: the longest), adapters of `rank`."""

    context: int | None = None
    rank: int = 16


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """An adapter on all projections in pages of `page_dtype`, and how many of them the budget holds."""

    page_dtype: str
    num_bytes: int
    resident: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes. `budget`: the usable part of the device (None: unknown). `reserve` and its parts are estimates.

    `adapters`: the pages in use come first. `rows`: sequences of `context` tokens that fit the KV pool at once, even where
    `max_num_seqs` is less.
    """

    machine: Machine
    budget: int | None
    weights: tuple[WeightBytes, ...]
    reserve: tuple[tuple[str, int], ...]
    adapter_budget: int
    adapters: tuple[AdapterBytes, ...]
    rank: int
    kv_bytes: int
    kv_token_bytes: int
    kv_tokens: int
    max_model_len: int
    context: int
    rows: int

    @property
    def weights_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def reserve_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.reserve)

    @property
    def total(self) -> int:
        return self.weights_bytes + self.reserve_bytes + self.adapter_budget + self.kv_bytes

    @property
    def is_over_budget(self) -> bool:
        return self.budget is not None and self.total > self.budget

    @property
    def fits(self) -> bool:
        """Whether all of it fits, and the KV pool holds a row of `context` tokens."""
        return not self.is_over_budget and self.rows >= 1


def plan_memory(
    model: ModelConfig, config: EngineConfig, machine: Machine, workload: Workload | None = None
) -> MemoryPlan:
    """Compute what `config` takes on `machine`. Adapters without a requested size get a share of what weights and reserve
    leave of a GPU, and a KV pool without one gets the rest.

    Raises `ModelError` for a `max_model_len` that the model has no positions for.
    """
    requested = workload or Workload()
    budget = memory_budget(config, machine)
    weights = weight_bytes(model, machine.dtype, config.quantization)
    reserve = _reserve(model, config, machine)
    taken = sum(weight.num_bytes for weight in weights) + sum(size for _, size in reserve)
    kv_item = ITEM_SIZES.get(_chosen(config.cache.kv_dtype, machine), 1)
    token_bytes = 2 * model.kv_size * model.num_layers * kv_item
    block_size = config.cache.block_size
    room = None if budget is None else budget - taken
    requested_kv = _requested_kv_bytes(config, token_bytes * block_size)
    adapters = config.lora.max_bytes
    if adapters is None:
        adapters = default_adapter_bytes(room if machine.is_cuda else None, requested_kv or 0)
    kv_bytes = _kv_bytes(machine, room, adapters, requested_kv, token_bytes * block_size)
    kv_tokens = kv_bytes // (token_bytes * block_size) * block_size
    longest = _max_model_len(model, config, kv_tokens)
    context = requested.context or longest
    return MemoryPlan(
        machine=machine,
        budget=budget,
        weights=weights,
        reserve=reserve,
        adapter_budget=adapters,
        adapters=_adapters(model, config, machine, requested.rank, adapters),
        rank=requested.rank,
        kv_bytes=kv_bytes,
        kv_token_bytes=token_bytes,
        kv_tokens=kv_tokens,
        max_model_len=longest,
        context=context,
        rows=kv_tokens // (-(-context // block_size) * block_size),
    )


def memory_budget(config: EngineConfig, machine: Machine) -> int | None:
    """Return the usable part of the device: a share of all of it, and at most what is free."""
    if machine.memory is None:
        return None
    share = int(machine.memory * config.memory_utilization)
    return share if machine.free is None else min(share, machine.free)


def default_adapter_bytes(room: int | None, requested_kv: int) -> int:
    """Return the adapters' bytes where no setting asks for any.

    `room`: what weights and reserve leave of a GPU (None: unknown); `requested_kv`: what the KV cache takes of it at least.
    """
    if room is None:
        return MIN_ADAPTER_BYTES
    return max(MIN_ADAPTER_BYTES, min(room // ADAPTER_SHARE, room - requested_kv))


def adapter_bytes(model: ModelConfig, rank: int, page_dtype: str) -> int:
    """One adapter of `rank` on all projections; modules in 8 bits have a page of scales each."""
    item = ITEM_SIZES.get(page_dtype, 1)
    scales = 0 if page_dtype in ITEM_SIZES else _scale_page_bytes(rank)
    shapes = model.projection_shapes().values()
    return model.num_layers * sum(
        _page_bytes(rank, outputs * item) + _page_bytes(rank, inputs * item) + scales
        for outputs, inputs in shapes
    )


def _page_bytes(rank: int, row_bytes: int) -> int:
    """Return the bytes of all pages of a matrix. Each page starts where a kernel's widest load may."""
    full, rest = divmod(rank, PAGE_RANKS)
    return sum(-(-rows * row_bytes // ALIGNMENT) * ALIGNMENT for rows in [PAGE_RANKS] * full + [rest])


def _scale_page_bytes(rank: int) -> int:
    """Return the bytes of a page of fp32 scales: a power of two."""
    return max(MIN_SCALE_BYTES, 1 << (4 * rank - 1).bit_length())


def _max_model_len(model: ModelConfig, config: EngineConfig, kv_tokens: int) -> int:
    """Return the requested length, else the model's own, at most one row of the KV pool."""
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        return min(longest, kv_tokens or longest)
    if not 1 <= config.max_model_len <= longest:
        raise ModelError(f"`max_model_len` must lie in 1..{longest}, got {config.max_model_len}")
    return config.max_model_len


def _chosen(name: str, machine: Machine) -> str:
    """Resolve `auto` to the type of the computation."""
    return machine.dtype if name == "auto" else name


def _adapters(
    model: ModelConfig, config: EngineConfig, machine: Machine, rank: int, budget: int
) -> tuple[AdapterBytes, ...]:
    own = _chosen(config.lora.page_dtype, machine)
    # Pages of 8 bits are for GPUs: a CPU stores the values they represent in the model's type.
    kinds = (own, machine.dtype, "int8", "fp8") if machine.is_cuda else (machine.dtype,)
    sizes = {page_dtype: adapter_bytes(model, rank, page_dtype) for page_dtype in dict.fromkeys(kinds)}
    return tuple(
        AdapterBytes(page_dtype, size, min(budget // size, MAX_ADAPTER_SLOTS))
        for page_dtype, size in sizes.items()
    )


def _requested_kv_bytes(config: EngineConfig, block_bytes: int) -> int | None:
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks * block_bytes
    return config.cache.kv_bytes


def _kv_bytes(
    machine: Machine, room: int | None, adapters: int, requested: int | None, block_bytes: int
) -> int:
    """Round down to whole blocks."""
    wanted = requested
    if wanted is None:
        wanted = max(room - adapters, 0) if machine.is_cuda and room is not None else CPU_KV_BYTES
    return wanted // block_bytes * block_bytes


def _reserve(model: ModelConfig, config: EngineConfig, machine: Machine) -> tuple[tuple[str, int], ...]:
    item = ITEM_SIZES[machine.dtype]
    tokens, rows = config.scheduler.max_tokens(is_cuda=machine.is_cuda), config.scheduler.max_num_seqs
    attention = 2 * model.q_size + 2 * model.kv_size
    widest = max(attention, 3 * model.intermediate_size)
    activations = tokens * (3 * model.hidden_size + widest) * item
    sampling = rows * model.vocab_size * _SAMPLING_COPIES * ITEM_SIZES["float32"]
    slice_bytes = SCORE_SLICE_BYTES if machine.is_cuda else CPU_SCORE_SLICE_BYTES
    scored = min(tokens * model.vocab_size * ITEM_SIZES["float32"], slice_bytes)
    logits = rows * model.vocab_size * item + max(sampling, _SCORE_COPIES * scored)
    parts = (("activations of a step", activations), ("logits and sampling", logits))
    if not machine.is_cuda:
        return parts
    is_adapted = config.lora.max_bytes != 0
    tables = _table_bytes(model, config.lora.max_rank) if is_adapted else 0
    hidden = _hidden_bytes(model, config.lora.max_rank, tokens) if is_adapted else 0
    return (
        *parts,
        ("adapter tables", tables),
        ("adapters' hidden values", hidden),
        ("graphs", _GRAPH_BYTES + min(tokens, _GRAPH_TOKENS) * activations // tokens),
        ("CUDA context", _CONTEXT_BYTES),
    )


def _table_bytes(model: ModelConfig, max_rank: int) -> int:
    """Per slot and module: rank, scales, and the addresses of the pages of A and B."""
    entries = 2 + 2 * -(-max_rank // PAGE_RANKS)
    modules = len(model.projection_shapes()) * model.num_layers + 2
    return MAX_ADAPTER_SLOTS * modules * entries * 8


def _hidden_bytes(model: ModelConfig, max_rank: int, tokens: int) -> int:
    """fp32 partial sums of a step's tokens at the projection that has most: `make_workspace` allocates them once."""
    slices = ((3, model.hidden_size), (1, model.q_size), (2, model.hidden_size), (1, model.intermediate_size))
    sums = max(count * -(-inputs // SPLIT_K) for count, inputs in slices)
    return sums * tokens * -(-max_rank // PAGE_RANKS) * PAGE_RANKS * ITEM_SIZES["float32"]
