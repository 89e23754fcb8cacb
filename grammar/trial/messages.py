"""Messages between a gateway and its compile-check process, one JSON line each.

Invariant: a reply is a result only. Neither compiled grammars nor tokenizer data cross.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from loraplex.grammar.spec import GrammarSpec

MAX_LINE_BYTES: Final = 16 << 20

Refusal: TypeAlias = Literal["invalid", "unsatisfiable", "cpu", "memory", "size", "deadline", "crashed"]
Outcome: TypeAlias = Literal["accepted", "starved", "cancelled"] | Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one check, of the queue, and of cached results.

    `deadline_s` counts from the start of the check, `cpu_s` is whole seconds. `memory_bytes` is what a check may
    allocate beyond the warm process it is forked from. `grammar_bytes` is what the compiled grammar and its first
    mask may keep. `stack_bytes` is half of an engine thread's stack, so recursion that passes here passes there.

    A process without a result `hang_grace_s` after the deadline is killed and restarted. `queue_timeout_s` bounds a
    request's whole wait, including the queue and a restart. `cache_*` bound cached results.
    """

    deadline_s: float = 5.0
    cpu_s: int = 4
    memory_bytes: int = 1 << 30
    grammar_bytes: int = 64 << 20
    stack_bytes: int = 4 << 20
    concurrent: int = 2
    concurrent_per_tenant: int = 1
    queued: int = 256
    queued_per_tenant: int = 16
    hang_grace_s: float = 15.0
    queue_timeout_s: float = 30.0
    cache_bytes: int = 16 << 20
    cache_bytes_per_tenant: int = 1 << 20


class CompileSpawn(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on standard input. `tokenizer` is a folder or a `tokenizer.json`, `vocab_size` the model's own."""

    parent_pid: int
    tokenizer: str
    vocab_size: int
    end_token_ids: tuple[int, ...]
    limits: SandboxLimits


class StartCheck(msgspec.Struct, frozen=True, tag="try"):
    """Start the check of `spec`."""

    check_id: int
    spec: GrammarSpec


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Kill this check: no request waits for it any more."""

    check_id: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process accepts checks. `seconds` is the duration of its start, `bytes` its resident memory."""

    seconds: float
    bytes: int


class CheckResult(msgspec.Struct, frozen=True):
    """The forked process's own result. `bytes` is the memory that the grammar keeps, `cpu_s` its CPU time."""

    outcome: Outcome
    text: str = ""
    bytes: int = 0
    cpu_s: float = 0.0


class CompileResult(msgspec.Struct, frozen=True, tag="result"):
    """The end of a check. Times in seconds; `text` is the library's error text, cleaned."""

    check_id: int
    outcome: Outcome
    text: str
    wall_s: float
    cpu_s: float
    bytes: int


Order: TypeAlias = StartCheck | Cancel
Report: TypeAlias = Ready | CompileResult

encode: Final = msgspec.json.Encoder().encode
decode_spawn: Final = msgspec.json.Decoder(CompileSpawn).decode
decode_order: Final[Callable[[bytes], Order]] = msgspec.json.Decoder(Order).decode
decode_report: Final[Callable[[bytes], Report]] = msgspec.json.Decoder(Report).decode
decode_check_result: Final = msgspec.json.Decoder(CheckResult).decode
