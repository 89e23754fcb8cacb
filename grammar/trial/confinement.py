"""What holds a trial inside its budget: kernel limits set on itself before it reads anything of a tenant's.

Invariant: after `confine` returned, the parent was alive when the death signal was already armed.
"""

import ctypes
import os
import resource
from contextlib import suppress
from pathlib import Path

from loraplex.grammar.parent_death import die_with_parent
from loraplex.grammar.trial.messages import SandboxLimits

BACKGROUND_PRIORITY = 10
OOM_SCORE_ADJ = "1000"


def lower_priority(priority: int = BACKGROUND_PRIORITY) -> None:
    """Run where nobody else wants to, this process and all it starts, and else with a small share: a tenth of a core.

    Niceness counts inside a session alone where the kernel groups tasks by session (Linux, autogroup): a process with a
    session of its own takes half of a busy machine at any niceness (measured). So whoever shares cores with an engine
    shares its session and has but a process group of its own. At 19, 20 ms of work took 0.7 s.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(priority, os.getpriority(os.PRIO_PROCESS, 0)))


def confine(limits: SandboxLimits, parent_pid: int) -> None:
    """Bound this process: no core dump, no file written, CPU seconds, memory and stack. Raises OSError, ValueError."""
    die_with_parent(parent_pid)
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_STACK: limits.stack_bytes,
        resource.RLIMIT_DATA: allocated_bytes() + limits.memory_bytes,
    }
    for kind, bound in bounds.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


def prefer_for_oom_kill() -> None:
    """When the machine runs out of memory, this process goes first."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)


def return_free_memory() -> None:
    """Give back what was freed (glibc): a trial that filled it would seem to keep nothing."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def allocated_bytes() -> int:
    """Private writable memory mapped by this process, which is what RLIMIT_DATA counts."""
    return _status_bytes("VmData")


def resident_bytes() -> int:
    """Resident memory that is no file's: what this process holds of its own or shares with the one it was forked from."""
    return _status_bytes("RssAnon")


def threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
