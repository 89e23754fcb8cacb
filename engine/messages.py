"""The typed messages between gateway and engine (msgspec structs, msgpack on the wire, never pickle).

For every accepted request the events are: one `Started`, a `Scored` where scores are asked for, any number of `Delta`, one
`Finished` per choice; or at any point one `Failed`, which ends the whole request.
"""

from typing import Final, Literal, Self, TypeAlias, get_args

import msgspec

from loraplex.engine.sampling_params import SamplingParams

STEP_TOKEN_BOUNDS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

OTHER_TENANTS: Final = b""
"""In `TenantSteps`: all tenants that have no entry of their own."""

BASE_MODEL: Final = "base"
"""In `EngineStats.step_adapters`: the base model, which has no digest of an adapter."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]

AdapterKey: TypeAlias = tuple[bytes, str]
"""Identity of an adapter in storage, residency and the prefix cache: namespace and digest, never shared across tenants."""


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable adapter version. `namespace` is the tenant's 32-byte cache namespace; `digest` is 64 hex digits."""

    namespace: bytes
    digest: str
    blob_path: str

    @property
    def key(self) -> AdapterKey:
        return (self.namespace, self.digest)


DeadlineKind: TypeAlias = Literal["queue_timeout_s", "first_token_timeout_s", "total_timeout_s"]
DEADLINES: Final[tuple[DeadlineKind, ...]] = get_args(DeadlineKind)
"""The deadlines of a request, as its fields name them."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities of tokens that are given, not sampled: the model's own distribution, whatever the sampling.

    `prompt_logprobs`: score each token of the prompt but the first, with so many of the likeliest in its place (0-20).
    `token_ids`: by position in the prompt, tokens to score as the next one. `continuations`: tokens that follow the prompt, one
    list for each of `n` choices that write nothing; `ending_ids` are scored after each of them.
    """

    prompt_logprobs: int | None = None
    token_ids: dict[int, list[int]] = {}
    continuations: list[list[int]] = []
    ending_ids: list[int] = []


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, checked and tokenized by the gateway. Times are seconds counted from receipt.

    `queue_timeout_s`: until it has a place in the batch; `first_token_timeout_s`: until its first token. With `scores`,
    `max_tokens` may be 0: then the request writes nothing, and its choices end with their `Scored`.

    `received`: by choice that has not ended, the tokens of its response that an engine before this one has sent. The engine goes
    on behind them. Empty: the request begins.
    """

    request_id: str
    namespace: bytes
    prompt_token_ids: list[int]
    sampling: SamplingParams
    weight: float = 1.0
    adapter: AdapterRef | None = None
    grammar: bytes | None = None
    scores: ScoreRequest | None = None
    cache_salt: bytes = b""
    queue_timeout_s: float | None = None
    first_token_timeout_s: float | None = None
    total_timeout_s: float | None = None
    received: dict[int, list[int]] = {}

    @property
    def open_choices(self) -> list[int]:
        """The choices that have not ended, in their order."""
        return sorted(self.received) if self.received else list(range(self.sampling.n))

    def continuation(self, choice: int) -> list[int]:
        """The scored tokens that follow the prompt in a choice."""
        return self.scores.continuations[choice] if self.scores and self.scores.continuations else []

    @property
    def timeouts(self) -> dict[DeadlineKind, float]:
        """Seconds by deadline, of those that it has."""
        found = {kind: getattr(self, kind) for kind in DEADLINES}
        return {kind: seconds for kind, seconds in found.items() if seconds is not None}

    def shortened(self, passed_s: float, *, has_token: bool = False) -> Self:
        """The request with what is left of its deadlines. One that had a token waits for its first again in full."""
        left = {
            kind: seconds if has_token and kind != "total_timeout_s" else seconds - passed_s
            for kind, seconds in self.timeouts.items()
        }
        return msgspec.structs.replace(self, **left)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of the sampled token and of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokenScore(TokenLogprob, frozen=True):
    """Of a token of the prompt. `rank` 1: no token is likelier in its place."""

    rank: int = 1


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one choice. `completion_tokens` includes the token that completed a stop.

    `prompt_tokens` includes `cached_tokens`, and the tokens of a scored continuation. Of an aborted choice it counts only what
    was computed for it or found in the cache; a choice that only waited has 0.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


BatchLimit: TypeAlias = Literal["rows", "tokens", "kv_blocks"]
AdapterTier: TypeAlias = Literal["disk", "host", "device"]


class WaitCauses(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request waited before its first step.

    `queued_before`: sequences that waited for a row when it joined them; `overtaken_by`: of those that came later, how many
    got one earlier, by fair share. `limit`: what kept it from the last step before its first; None if no step came before it.
    `adapter_tier`: where its adapter was when it began to wait for it, None without such a wait; `adapter_bytes`: its size, 0
    if it is unknown. `loads_before`: loads of other adapters that were in progress then. `grammars_before`: grammars that ran
    or waited to be compiled before its own; `compile_s`: the time that its own took, next to nothing from the cache.
    """

    queued_before: int = 0
    overtaken_by: int = 0
    limit: BatchLimit | None = None
    adapter_tier: AdapterTier | None = None
    adapter_bytes: int = 0
    loads_before: int = 0
    grammars_before: int = 0
    compile_s: float = 0.0


NO_CAUSES: Final = WaitCauses()


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The prompt is computed. `digest` is that of the adapter in use, None for the base model.

    `system_fingerprint` is that of the engine, as in its `EngineInfo`. `queue_s` are the seconds from receipt to the first
    step, `prefill_s` those from there to the first token. Of `queue_s`, the first `grammar_s` were spent waiting for the
    grammar, and then `adapter_s` for the adapter. `causes`: of these waits. `resumed`: it goes on behind the request's `received`.
    `engine`: which of several it is; a gateway fills it in.
    """

    request_id: str
    digest: str | None
    cached_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    grammar_s: float = 0.0
    adapter_s: float = 0.0
    causes: WaitCauses = NO_CAUSES
    system_fingerprint: str | None = None
    resumed: bool = False
    engine: str | None = None


class Delta(msgspec.Struct, frozen=True, tag="delta"):
    """New tokens of one choice. `text` may lag behind `token_ids` (partial characters, possible stop strings)."""

    request_id: str
    choice: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """What a choice scores, in nats; it comes before the first `Delta` or, without one, before `Finished`.

    `prompt`: the tokens of the prompt from the second on, None unless they are asked for. `token_ids`: by position in the
    prompt or its continuation, the log-probabilities of the given tokens in their order; of a continuation, the token that
    follows and, at its end, `ending_ids`.
    """

    request_id: str
    choice: int
    prompt: list[TokenScore] | None = None
    token_ids: dict[int, list[float]] = {}


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """One choice ended. `stop` is the stop string or token id that ended it, if one did."""

    request_id: str
    choice: int
    reason: FinishReason
    usage: Usage
    stop: str | int | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The whole request ended with an error; `code` is an `EngineError.code`.

    `usage` by choice: what the unfinished choices used, if the end is due to the request or its client. It is empty if the
    engine failed.
    """

    request_id: str
    code: str
    message: str
    field: str | None = None
    usage: dict[int, Usage] = {}


Event: TypeAlias = Started | Scored | Delta | Finished | Failed


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of probing an adapter. `code` None: it may serve.

    `max_error`: by kind of module (`q_proj`), how far the device's results were from the reference in float32, relative to
    the reference's largest value, over `modules` modules; `bound` is the allowed error. `effect` is that largest value: 0
    when the adapter changes nothing. `generated_tokens` of a greedy response were finite. `longest_step_s`: the most time
    that the probe took of one step. `code` is an `EngineError.code` of a fault of the adapter itself. `system_fingerprint`:
    the engine's.
    """

    digest: str
    modules: int = 0
    finite: bool = True
    effect: float = 0.0
    max_error: dict[str, float] = {}
    bound: float = 0.0
    generated_tokens: int = 0
    longest_step_s: float = 0.0
    code: str | None = None
    message: str = ""
    system_fingerprint: str | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the served model that a gateway needs.

    `vocabulary_sha256`: of the embedding and the head before quantization (`checkpoints/vocabulary_digests.py`).
    `system_fingerprint`: of `checkpoints/digest.py`; None from an engine of an earlier release. `device`: its name, such as NVIDIA H100
    80GB HBM3, or CPU.
    """

    model_digest: str
    system_fingerprint: str | None = None
    model_path: str
    architecture: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    dtype: str
    eos_token_ids: list[int] = []
    prefix_caching: bool = True
    vocabulary_sha256: dict[str, str] = {}
    device: str = ""


class TenantSteps(msgspec.Struct, frozen=True):
    """One tenant's part of the steps of the last minute, in scheduled tokens. `waiting`: its requests that no step has begun.

    Tokens that are computed again after a preemption count again.
    """

    namespace: bytes
    prefill_tokens: int
    decode_tokens: int
    waiting: int

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot in plain numbers; counters only grow. Exporters live in the gateway.

    `step_tokens_histogram[i]` counts steps of at most `STEP_TOKEN_BOUNDS[i]` tokens and more than the previous bound; one
    more count at the end is for steps above all bounds. `late_masks` counts rows that skipped a step because their
    grammar's mask was not ready in time; `forced_tokens` those that a grammar left no choice about. `slow_steps` counts steps
    that took longer than `EngineConfig.step_warning_s`. `step_*_bytes` are what steps read of the device's memory, and `memory_rate`
    the bytes per second at which it was read at the start. `quarantined_adapters`
    are keys (`AdapterRef.key`) of the newest adapters refused here. `device_adapters` are the keys of `resident_adapters`, and
    `host_adapters` of those in host memory, which may be on the device as well. `adapter_read_rate` and `adapter_copy_rate` are
    the bytes per second of loads, measured lately: into host memory, and from there to the device. `adapter_page_error` is the
    greatest relative error that 8-bit pages cause in a module of a resident adapter. `tenant_steps`: the largest tenants first,
    at most 20, then the others as `OTHER_TENANTS`. `max_running` is the most sequences that a batch may have.
    `step_adapters` are the digests of the newest step's rows, each once; `BASE_MODEL` stands for rows without an adapter.
    """

    running: int = 0
    max_running: int = 0
    waiting: int = 0
    waiting_for_adapter: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    referenced_blocks: int = 0
    total_blocks: int = 0
    resident_adapters: list[str] = []
    device_adapters: list[AdapterKey] = []
    host_adapters: list[AdapterKey] = []
    pinned_adapters: int = 0
    quarantined_adapters: list[AdapterKey] = []
    adapter_bytes: int = 0
    adapter_budget_bytes: int = 0
    adapter_waste_bytes: int = 0
    adapter_host_bytes: int = 0
    adapter_host_budget_bytes: int = 0
    adapter_host_hits: int = 0
    adapter_read_rate: float = 0.0
    adapter_copy_rate: float = 0.0
    adapter_page_error: float = 0.0
    adapter_loads: int = 0
    adapter_load_failures: int = 0
    adapter_evictions: int = 0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    corrupted_requests: int = 0
    admission_rejections: int = 0
    aborted_requests: int = 0
    steps: int = 0
    step_tokens: int = 0
    step_tokens_histogram: list[int] = []
    step_seconds: float = 0.0
    step_weight_bytes: int = 0
    step_kv_bytes: int = 0
    step_adapter_bytes: int = 0
    memory_rate: float = 0.0
    slow_steps: int = 0
    tenant_steps: list[TenantSteps] = []
    step_adapters: list[str] = []
    waiting_for_grammar: int = 0
    grammar_compilations: int = 0
    grammar_compile_seconds: float = 0.0
    grammar_failures: int = 0
    mask_seconds: float = 0.0
    late_masks: int = 0
    forced_tokens: int = 0
    heartbeat_age_s: float = 0.0
    draining: bool = False
