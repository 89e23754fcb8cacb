"""`CompileCache`: has workers check whether a grammar compiles within its budget, and keeps the results per tenant.

Invariant: at most one check of a spec runs per tenant, and a check that no request waits for is killed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Final, Literal, TypeAlias

from loraplex.grammar.backends.compile_check import CheckResult, CompileSetup
from loraplex.grammar.errors import GrammarError, GrammarInvalid, GrammarTooCostly
from loraplex.grammar.spec import GrammarSpec, encode_spec
from loraplex.grammar.tenant_cache import TenantCache
from loraplex.platform.errors import WorkersUnavailable
from loraplex.platform.workers.messages import Done, Ended, Reply
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import Sandbox, TaskSpec
from loraplex.tenants.single_flight import SingleFlight

Outcome: TypeAlias = Literal[
    "accepted", "invalid", "unsatisfiable", "size", "cpu", "memory", "deadline", "crashed", "cancelled"
]

MIB: Final = 1 << 20
DIGEST_BYTES: Final = 32
ENTRY_BYTES: Final = 512
"""Bytes of a cached result without its text: key, result, and table entries."""
NICENESS: Final = 7
"""A sixth of a busy core. At 10 (a tenth), a half-second check missed its 5 s deadline while two engines shared two cores."""
STARVED_SHARE: Final = 0.1
"""A check that had less than this share of its CPU seconds until the deadline says nothing about the grammar."""
HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""They halve the cost of a fork, which is most of a small check (measured: 7 to 4 ms, and as much for its end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Limits of one check, of the queue, and of cached results.

    `deadline_s` counts from the start of the check, `cpu_s` is whole seconds, less than the deadline: a check that used them up
    failed because of its grammar, not of a busy machine. `memory_bytes` is what a check may
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
    start_timeout_s: float = 120.0
    cache_bytes: int = 16 << 20
    cache_bytes_per_tenant: int = 1 << 20


def compile_check_task(
    limits: CompileLimits,
    tokenizer: str,
    vocab_size: int,
    end_token_ids: tuple[int, ...],
    environment: Mapping[str, str],
) -> TaskSpec[CheckResult]:
    """Return the task. Its process imports both libraries once; each check is a fork of it.

    `tokenizer` is a model folder or a `tokenizer.json`, `environment` that of the process, without secrets.
    """
    return TaskSpec(
        name="compile_check",
        work="new grammars",
        unavailable="the compile-check process does not run",
        function="loraplex.grammar.backends.compile_check:prepare",
        setup=CompileSetup(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            end_token_ids=end_token_ids,
            grammar_bytes=limits.grammar_bytes,
        ),
        result=CheckResult,
        mode="fork",
        sandbox=Sandbox(
            niceness=NICENESS,
            cpu_s=limits.cpu_s,
            data_bytes=limits.memory_bytes,
            stack_bytes=limits.stack_bytes,
        ),
        environment={**environment, **HUGE_PAGES},
        deadline_s=limits.deadline_s,
        hang_grace_s=limits.hang_grace_s,
        queue_timeout_s=limits.queue_timeout_s,
        start_timeout_s=limits.start_timeout_s,
        concurrent=limits.concurrent,
        concurrent_per_tenant=limits.concurrent_per_tenant,
        queued=limits.queued,
        queued_per_tenant=limits.queued_per_tenant,
    )


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The end of a check. `cpu_s` is its CPU time; `text` is the library's error text, cleaned."""

    outcome: Outcome
    text: str = ""
    cpu_s: float = 0.0
    bytes: int = 0


class CompileCache:
    """`CompileChecks` in the worker pool of a gateway. A check may begin before its process is ready; it waits then."""

    def __init__(self, pool: WorkerPool, task: TaskSpec[CheckResult], limits: CompileLimits) -> None:
        self._pool = pool
        self._task = task
        self._limits = limits
        self._cache: TenantCache[CompileResult] = TenantCache(
            limits.cache_bytes, limits.cache_bytes_per_tenant, cached_bytes
        )
        self._checks = SingleFlight[CompileResult]()

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        """Return when `spec` compiles within the budget, for the tenant of `namespace`.

        Raises `GrammarInvalid` or `GrammarTooCostly` naming `param`, or `WorkersUnavailable` without a result.
        """
        digest = _digest(spec, param)
        result = self._cache.get(namespace, digest)
        if result is None:
            check = partial(self._run, namespace, digest, spec)
            result = await self._checks.run((namespace, digest), check)
        error = refusal(result, self._limits, param)
        if error is not None:
            raise error

    async def _run(self, namespace: bytes, digest: bytes, spec: GrammarSpec) -> CompileResult:
        reply = await self._pool.run(self._task, (spec,), namespace)
        result = self._result_of(reply)
        if result.outcome != "deadline" or result.cpu_s >= self._limits.cpu_s / 2:
            # A deadline missed with little CPU time may be the machine's fault.
            self._cache.put(namespace, digest, result)
        return result

    def _result_of(self, reply: Reply[CheckResult]) -> CompileResult:
        """Raises `WorkersUnavailable` for a check that had no time."""
        match reply:
            case Done(result=check, cpu_s=cpu_s):
                return CompileResult(check.outcome, check.text, cpu_s, check.bytes)
            case Ended(how="deadline", cpu_s=cpu_s) if cpu_s < STARVED_SHARE * self._limits.cpu_s:
                raise WorkersUnavailable(
                    f"this machine was too busy to check the grammar within {self._limits.deadline_s:g} s"
                )
            case Ended(how=how, cpu_s=cpu_s):
                return CompileResult(how, cpu_s=cpu_s)
            case _:
                return CompileResult("crashed")


def refusal(result: CompileResult, limits: CompileLimits, param: str | None) -> GrammarError | None:
    """Return the error of a result, which names the exceeded limit; None when the grammar may be used."""
    match result.outcome:
        case "accepted":
            return None
        case "invalid":
            reason = result.text or "its library gives no reason"
            return GrammarInvalid(f"the grammar does not compile: {reason}", param=param)
        case "unsatisfiable":
            return GrammarInvalid("no text satisfies the grammar", param=param)
        case _:
            return GrammarTooCostly(_budget(result, limits), param=param)


def _budget(result: CompileResult, limits: CompileLimits) -> str:
    match result.outcome:
        case "cpu":
            return f"the grammar does not compile within {limits.cpu_s} s of CPU time"
        case "deadline":
            return f"the grammar was not compiled within {limits.deadline_s:g} s"
        case "memory":
            return f"compiling the grammar takes more than {limits.memory_bytes // MIB} MiB of memory"
        case "size":
            taken, allowed = result.bytes // MIB, limits.grammar_bytes // MIB
            return f"the compiled grammar takes {taken} MiB, allowed are {allowed} MiB"
        case _:
            return "the grammar compiler crashed on the grammar; it may be nested too deep"


def _digest(spec: GrammarSpec, param: str | None) -> bytes:
    try:
        return blake2b(encode_spec(spec), digest_size=DIGEST_BYTES).digest()
    except UnicodeEncodeError:
        raise GrammarInvalid("the grammar has a lone surrogate, which is no text", param=param) from None


def cached_bytes(result: CompileResult) -> int:
    """Return the bytes that a result takes in the cache."""
    return ENTRY_BYTES + len(result.text.encode())
