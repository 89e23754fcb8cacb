"""`TaskSpec`: what a worker process runs, within which bounds, and for how many callers at once."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

Result = TypeVar("Result")

Mode: TypeAlias = Literal["fork", "reuse", "spawn"]
How: TypeAlias = Literal["cpu", "memory", "deadline", "crashed", "cancelled"]
Files: TypeAlias = AbstractAsyncContextManager[Sequence[tuple[int, int]]]
"""Opens files for a process; each is its descriptor and its size in bytes."""

MIB: Final = 1 << 20


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that a worker process sets on itself before it reads any payload. None: no bound of its own.

    No worker dumps core or writes a file. `data_bytes` and `address_space_bytes` are what a task may allocate beyond the
    process that is ready for it; `stack_bytes` is that of its thread. `cpu_s` is whole seconds of a process's whole life.
    `max_descriptors` bounds the numbers of descriptors opened later. With `filter_system_calls` the process, which must have
    one thread, can open nothing and has an empty environment.
    """

    niceness: int = 10
    cpu_s: int | None = None
    data_bytes: int | None = None
    address_space_bytes: int | None = None
    stack_bytes: int | None = None
    max_descriptors: int | None = None
    filter_system_calls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskSpec(Generic[Result]):
    """One kind of work. `name` is that of its processes and log lines. `work` is its noun in error texts, in the plural;
    `unavailable` is what callers get to read where no process can be had.

    `function` is "module:name". With a `setup`, that function is called once per process, with the setup, and returns the
    function to run; what it prepares is there before the first task. Payloads and results cross as msgpack, decoded by the
    annotations of the function and as `result`.

    `mode`: `fork` runs each task in a fork of one warm process, `reuse` runs tasks in up to `concurrent` processes one after
    the other, `spawn` starts a process per task. `environment` is that of the processes.

    `deadline_s` bounds one task in a ready process, `queue_timeout_s` the wait for its result; None: no bound. A fork server
    that has not reported a task `hang_grace_s` after its deadline is killed. `refusals` are classes of errors that inputs
    cause; each is named to the caller with its text, any other error with its class alone.
    """

    name: str
    work: str
    unavailable: str
    function: str
    result: Any
    mode: Mode
    sandbox: Sandbox
    environment: Mapping[str, str]
    deadline_s: float
    setup: object | None = None
    refusals: tuple[type[Exception], ...] = ()
    concurrent: int = 1
    concurrent_per_tenant: int = 1
    queued: int | None = None
    queued_per_tenant: int = 4096
    queue_timeout_s: float | None = 60.0
    start_timeout_s: float = 60.0
    hang_grace_s: float = 15.0
    max_reply_bytes: int = 16 * MIB


@dataclass(frozen=True, slots=True)
class TaskStats:
    """A snapshot of one task. `restarts` are processes that were lost, or did not start; `pids` those of its processes."""

    waiting: int = 0
    running: int = 0
    restarts: int = 0
    pids: tuple[int, ...] = ()
