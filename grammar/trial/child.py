"""One compile check in a process forked for it: confine, compile, fill the first mask, write the result, exit.

Invariant: a compiled grammar never leaves this process, and the process never returns to the code that forked it.
"""

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn, TypeAlias

from msgspec.structs import replace

from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.trial.confinement import confine, prefer_for_oom_kill, resident_bytes
from loraplex.grammar.trial.error_texts import clean, ran_out_of_memory
from loraplex.grammar.trial.messages import CheckResult, SandboxLimits, encode

FirstMask: TypeAlias = Callable[[GrammarSpec], int]
"""Compiles and fills the first mask; returns 0 when no token is allowed. Raises `GrammarError` or a library's error."""

DONE_STATUS: Final = 0
BROKEN_STATUS: Final = 70
STANDARD_STREAMS: Final = 3
NO_TOKEN: Final = "NoExtension"
"""llguidance's error for an empty first mask."""


def run_check(
    first_mask: FirstMask, spec: GrammarSpec, limits: SandboxLimits, pipe: int, parent_pid: int
) -> NoReturn:
    """Run the forked process to its end. `pipe` takes the result; without one, the parent uses the exit status."""
    status = BROKEN_STATUS
    try:
        gc.disable()
        _close_all_but(pipe)
        prefer_for_oom_kill()
        confine(limits, parent_pid)
        result = check_spec(first_mask, spec, limits)
        os.write(pipe, encode(replace(result, cpu_s=time.process_time())))
        status = DONE_STATUS
    finally:
        os._exit(status)


def check_spec(first_mask: FirstMask, spec: GrammarSpec, limits: SandboxLimits) -> CheckResult:
    """Check `spec`. Any error of a library becomes a result."""
    before = resident_bytes()
    try:
        allowed = first_mask(spec)
    # A panic of a Rust library is not an `Exception`.
    except BaseException as error:  # noqa: BLE001
        return _result_of_error(error)
    kept = max(0, resident_bytes() - before)
    if allowed == 0:
        return CheckResult("unsatisfiable", bytes=kept)
    return CheckResult("accepted" if kept <= limits.grammar_bytes else "size", bytes=kept)


def _result_of_error(error: BaseException) -> CheckResult:
    text = clean(str(error))
    if ran_out_of_memory(error):
        return CheckResult("memory", text)
    return CheckResult("unsatisfiable" if NO_TOKEN in text else "invalid", text)


def _close_all_but(pipe: int) -> None:
    """Close all descriptors but `pipe` and point standard streams to /dev/null: libraries write unbounded tenant text
    there.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(STANDARD_STREAMS):
        os.dup2(nothing, stream)
    # One by one: some Python builds close a range number by number, and a container may allow 10^9 of them.
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= STANDARD_STREAMS and int(name) != pipe:
            with suppress(OSError):
                os.close(int(name))
