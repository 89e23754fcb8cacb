"""What a gateway and its process of trial compilations tell each other, one JSON line each.

Invariant: an answer is a result only. No compiled grammar and nothing of the tokenizer crosses.
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
    """What one trial may cost, how many run and wait, and what is remembered of them.

    `deadline_s` counts from the start of the trial, `cpu_s` is whole seconds. `memory_bytes` is what a trial may
    allocate beyond the warm process it starts from, `grammar_bytes` what the compiled grammar and its first mask may
    keep. `stack_bytes` is half of what a thread of the engine has, so that recursion which passes here passes there.
    A process that gives no result `hang_grace_s` after the deadline is killed and started again.
    `queue_timeout_s` bounds a request's whole wait, the queue and a restart included. `cache_*` bound remembered verdicts.
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
    """Compile this now."""

    check_id: int
    spec: GrammarSpec


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this trial any more."""

    check_id: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Trials are taken. `seconds` is what the start took, `bytes` the resident memory."""

    seconds: float
    bytes: int


class CheckResult(msgspec.Struct, frozen=True):
    """What a trial found out itself. `bytes` is what it kept allocated, `cpu_s` what it took."""

    outcome: Outcome
    text: str = ""
    bytes: int = 0
    cpu_s: float = 0.0


class CompileResult(msgspec.Struct, frozen=True, tag="result"):
    """The end of a trial. Times in seconds; `text` is the library's own words, cleaned."""

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
