"""Confines a compile check: kernel limits that a process sets on itself before it reads any tenant data.

Invariant: when `confine` has returned, the parent was alive after the death signal was armed.
"""

import os
import resource
from contextlib import suppress
from pathlib import Path

from loraplex.grammar.parent_death import die_with_parent
from loraplex.grammar.trial.messages import SandboxLimits

BACKGROUND_PRIORITY = 10
OOM_SCORE_ADJ = "1000"


def lower_priority(priority: int = BACKGROUND_PRIORITY) -> None:
    """Lower the priority of this process and its children: by default to a tenth of a busy core.

    With autogroup (Linux) niceness counts inside a session only: a process with its own session takes half of a busy
    machine at any niceness (measured). A process that shares cores with an engine therefore shares its session and
    has only its own process group. At 19, 20 ms of work took 0.7 s.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(priority, os.getpriority(os.PRIO_PROCESS, 0)))


def confine(limits: SandboxLimits, parent_pid: int) -> None:
    """Limit this process: no core dump, no file written, CPU seconds, memory and stack. Raises OSError, ValueError."""
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
    """Make this process the kernel's first choice when the machine runs out of memory."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)


def allocated_bytes() -> int:
    """Return the private writable memory mapped by this process, which RLIMIT_DATA counts."""
    return _status_bytes("VmData")


def resident_bytes() -> int:
    """Return the anonymous resident memory of this process, including pages shared with its parent."""
    return _status_bytes("RssAnon")


def threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
