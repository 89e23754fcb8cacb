"""Confines a validation process: kernel limits and a system-call filter, set before any untrusted byte is read.

Invariant: nothing is read unless all of them are in place; a machine that cannot confine validates nothing.
"""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex.adapters.system_calls import refuse_system_calls
from loraplex.grammar.parent_death import die_with_parent
from loraplex.grammar.trial.confinement import lower_priority, prefer_for_oom_kill, threads

MIN_PRIORITY: Final = 19
CPU_GRACE_S: Final = 2
"""Time from SIGXCPU at the soft limit to SIGKILL at the hard limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one validation, and how many run and wait.

    `cpu_s` is whole seconds, enough to read the largest adapter several times. `deadline_s` counts from the process's
    start at the lowest priority. `memory_bytes` is address space beyond that of the started process.
    """

    cpu_s: int = 120
    deadline_s: float = 900.0
    memory_bytes: int = 256 << 20
    max_descriptors: int = 16
    concurrent: int = 2
    concurrent_per_tenant: int = 1
    queued: int = 256
    queued_per_tenant: int = 16


DEFAULT_VALIDATION_LIMITS: Final = SandboxLimits()


def confine(limits: SandboxLimits, parent_pid: int) -> None:
    """Limit this process. Raises `OSError` or `ValueError` where the system refuses."""
    die_with_parent(parent_pid)
    if threads() != 1:
        raise OSError(f"{threads()} threads after the start: the filter would hold for one of them alone")
    lower_priority(MIN_PRIORITY)
    prefer_for_oom_kill()
    bounds: Mapping[int, tuple[int, int]] = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_NOFILE: (limits.max_descriptors, limits.max_descriptors),
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + CPU_GRACE_S),
        resource.RLIMIT_AS: (status_bytes("VmSize") + limits.memory_bytes,) * 2,
    }
    for kind, (soft, hard) in bounds.items():
        _, most = resource.getrlimit(kind)
        allowed = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, allowed), allowed))
    refuse_system_calls()


def status_bytes(name: str) -> int:
    """Return a number of /proc/self/status; VmSize is the address space."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def discard_standard_error() -> None:
    """Discard standard error: messages of libraries may quote untrusted content."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
