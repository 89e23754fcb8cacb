"""Frozen settings of one engine. Sizes in tokens, blocks or bytes as named; times in seconds."""

from dataclasses import dataclass

CPU_STEP_TOKENS = 256
"""Few, because every decoding row waits for the whole step."""
CUDA_STEP_TOKENS = 1024
"""What a GPU computes in little more than the time in which it reads the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue. `max_num_batched_tokens` None: what suits the device, see `max_tokens`.

    `overlap` "on" prepares a step while the previous one computes; "auto" does so where the device is not the host. A tenant
    without a row in the batch takes the place of another tenant's newest one after `max_slot_wait_s`.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_adapters_per_step: int = 64
    max_waiting: int = 1024
    max_adapter_wait_s: float = 10.0
    max_slot_wait_s: float = 1.0
    overlap: str = "auto"

    def max_tokens(self, *, is_cuda: bool) -> int:
        """Return the most tokens of a step."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return CUDA_STEP_TOKENS if is_cuda else CPU_STEP_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV pool. `num_blocks` None derives the count from `kv_bytes`; if that is None too, `memory_plan` sets it.

    `kv_dtype` is auto or fp8.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_bytes: int | None = None
    kv_dtype: str = "auto"
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Residency of adapters on the device. `max_bytes` 0 refuses adapters altogether; None: `memory_plan` sets it.

    `page_dtype` is auto (the model's), int8 or fp8. An adapter is refused if quantizing changes one of its modules by more
    than `max_page_error` of its norm. `host_max_bytes`: adapters kept in host memory next to a GPU.
    """

    max_bytes: int | None = None
    host_max_bytes: int = 4 << 30
    max_rank: int = 256
    page_dtype: str = "auto"
    max_page_error: float = 0.05
    quarantine_after: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Bounds of grammars. A row with a mask that takes longer than `mask_timeout_s` ends alone."""

    compile_threads: int = 1
    mask_timeout_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that an engine needs to start. `model` is a directory, a `.gguf` file or a hub id.

    `memory_utilization`: the planned share of a GPU's memory, including what other processes use. `cuda_graphs` "auto"
    replays steps on CUDA, "off" never. With `deterministic` a row's response has the same bits in every batch, after any
    prefix hit and after a preemption: every projection multiplies a fixed number of rows, adapters have one kind of kernel,
    and blocks that decoding wrote are not shared. A step that takes longer than `step_warning_s` is logged.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = "none"
    max_model_len: int | None = None
    memory_utilization: float = 0.9
    cuda_graphs: str = "auto"
    deterministic: bool = False
    step_warning_s: float = 10.0
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    lora: LoraConfig = LoraConfig()
    grammar: GrammarConfig = GrammarConfig()
