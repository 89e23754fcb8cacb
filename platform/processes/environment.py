"""Environments of child processes: what they get of this one's, without the settings and secrets of loraplex."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

BOUND_THREADS: Final = {"OMP_PROC_BIND": "true", "GOMP_SPINCOUNT": "3000"}


def foreign_environment() -> dict[str, str]:
    """This process's environment without the settings of loraplex, for processes that must not reach its stores.

    Python processes below it import no module from their working directory: not from the folder that `-P` leaves out, and
    from no relative folder in `PYTHONPATH`, of which an empty entry is the working directory.
    """
    prefixes = ("LORAPLEX_", "DATABASE_URL", "REDIS_URL", "RAY_AUTH_TOKEN", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(prefixes)}
    return kept | code_environment() | {"PYTHONSAFEPATH": "1"}


def engine_environment() -> dict[str, str]:
    """This process's environment for an engine, without settings and secrets of loraplex. The operator's own variables stay.

    OpenMP threads are bound to one core each. Unbound threads may share a core while another process uses the other one;
    then they spin at every barrier (measured on 2 busy cores: a step takes 10 to 30 times as long). Large allocations use
    huge pages, because address translation of 4 KiB pages costs a fifth of a decode step. A thread that waits for another spins for
    some 50 us and then sleeps: spinning on would keep a busy process on the core of the thread that is waited for.
    """
    return BOUND_THREADS | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | foreign_environment()


@contextmanager
def binding_threads() -> Iterator[None]:
    """Import torch within the block, and its threads are bound to cores as those of an engine; others stay free."""
    cores, before = os.sched_getaffinity(0), dict(os.environ)
    os.environ.update(BOUND_THREADS | before)
    try:
        yield
    finally:
        for name in BOUND_THREADS.keys() - before.keys():
            del os.environ[name]
        # Importing torch binds this thread to one core, which threads started later would inherit.
        os.sched_setaffinity(0, cores)


def code_environment() -> dict[str, str]:
    """What a process needs to find the code: the absolute folders of `PYTHONPATH`, if any, and nothing else."""
    folders = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(each)]
    return {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}


def ray_requires_tokens() -> bool:
    """Whether Ray here, which reads the variable itself, neither takes nor sends anything without a token."""
    return os.environ.get("RAY_AUTH_MODE") == "token"
