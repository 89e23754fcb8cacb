"""Confines a worker process: kernel limits and a system-call filter, set before it reads any payload.

Invariant: when `enter` has returned, all of them are in place, and the parent was alive after the death signal was armed.
"""

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

from loraplex.platform.processes.parent_death import die_with_parent
from loraplex.platform.workers.seccomp import refuse_system_calls
from loraplex.platform.workers.task import Sandbox

OOM_SCORE_ADJ: Final = "1000"
CPU_GRACE_S: Final = 2
"""Time from SIGXCPU at the soft limit to SIGKILL at the hard limit."""
STANDARD_STREAMS: Final = (0, 1, 2)


def enter(sandbox: Sandbox, parent_pid: int) -> None:
    """Limit this process. Raises `OSError` or `ValueError` where the system refuses."""
    die_with_parent(parent_pid)
    if sandbox.filter_system_calls and threads() != 1:
        raise OSError(f"{threads()} threads after the start: the filter would hold for one of them alone")
    lower_priority(sandbox.niceness)
    prefer_for_oom_kill()
    for kind, (soft, hard) in _limits(sandbox).items():
        _, most = resource.getrlimit(kind)
        allowed = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, allowed), allowed))
    if sandbox.filter_system_calls:
        os.environ.clear()
        refuse_system_calls()


def _limits(sandbox: Sandbox) -> dict[int, tuple[int, int]]:
    """Return kernel limit -> (soft, hard)."""
    limits = {resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_FSIZE: (0, 0)}
    if sandbox.cpu_s is not None:
        limits[resource.RLIMIT_CPU] = (sandbox.cpu_s, sandbox.cpu_s + CPU_GRACE_S)
    bounds = {
        resource.RLIMIT_NOFILE: sandbox.max_descriptors,
        resource.RLIMIT_STACK: sandbox.stack_bytes,
        resource.RLIMIT_DATA: _beyond("VmData", sandbox.data_bytes),
        resource.RLIMIT_AS: _beyond("VmSize", sandbox.address_space_bytes),
    }
    return limits | {kind: (bound, bound) for kind, bound in bounds.items() if bound is not None}


def _beyond(name: str, allowed_bytes: int | None) -> int | None:
    return None if allowed_bytes is None else status_bytes(name) + allowed_bytes


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process and its children to `niceness`; at 10 it gets a tenth of a busy core.

    With autogroup (Linux) niceness counts inside a session only: a process with its own session takes half of a busy
    machine at any niceness (measured). A process that shares cores with an engine therefore shares its session and
    has only its own process group. At 19, 20 ms of work took 0.7 s.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def prefer_for_oom_kill() -> None:
    """Make this process the kernel's first choice when the machine runs out of memory."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)


def threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def status_bytes(name: str) -> int:
    """Return a number of /proc/self/status. Raises `OSError` where it is missing.

    VmData is the private writable memory mapped, which RLIMIT_DATA counts, VmSize the address space.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def discard_output(*streams: int) -> None:
    """Point standard streams to /dev/null: messages of libraries are unbounded and may quote untrusted content."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nothing, stream)
    os.close(nothing)


def close_descriptors_but(kept: set[int]) -> None:
    """Close all descriptors but the standard streams and `kept`."""
    # One by one: some Python builds close a range number by number, and a container may allow 10^9 of them.
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept and int(name) not in STANDARD_STREAMS:
            with suppress(OSError):
                os.close(int(name))
