"""Functions that worker processes run in tests: well-behaved, and misbehaving in every way that the pool reports."""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from loraplex.platform.workers.messages import Done, Report, encode, frame
from loraplex.platform.workers.task import Sandbox, TaskSpec

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
SANDBOX = Sandbox(data_bytes=256 * MIB)


class Upset(Exception):
    """Caused by an input."""

    def __init__(self, message: str, param: str | None = None, pointer: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.pointer = pointer


class VeryUpset(Upset):
    pass


class Panic(BaseException):
    """What a Rust library raises when it breaks down."""


class Sum(msgspec.Struct, frozen=True):
    total: int
    pid: int


def task(function: str, **changes: Any) -> TaskSpec[Any]:
    """A task of this module, in a sandbox of 256 MiB."""
    defaults: dict[str, Any] = {
        "name": function,
        "work": "sums",
        "unavailable": "sums cannot be computed now",
        "function": f"{__name__}:{function}",
        "result": Any,
        "mode": "reuse",
        "sandbox": SANDBOX,
        "environment": {"PYTHONPATH": str(ROOT)},
        "deadline_s": 60.0,
        "refusals": (Upset,),
    }
    return TaskSpec(**defaults | changes)


def add(first: int, second: int) -> Sum:
    return Sum(first + second, os.getpid())


def adder(base: int) -> Callable[[int], Sum]:
    """Prepare a function, as tasks with a setup do."""

    def add_to_base(number: int) -> Sum:
        return add(base, number)

    return add_to_base


def broken_setup(base: int) -> Callable[[int], Sum]:
    raise RuntimeError("no setup")


def with_a_thread(base: int) -> Callable[[int], Sum]:
    threading.Thread(target=signal.pause, daemon=True).start()
    return adder(base)


def misbehave(how: str) -> str:
    match how:
        case "refuse":
            raise VeryUpset("too \ud800 bad", "field", "/a/0")
        case "refuse by surrogates":
            raise Upset("bad", "\ud800", "/\ud800")
        case "panic":
            raise Panic("secret")
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "nap":
            time.sleep(0.3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "allocate":
            return str(len([bytearray(256 * MIB) for _ in range(8)]))
        case "babble":
            write_endlessly()
        case "noise":
            for stream in (1, 2):
                os.write(stream, b"x" * MIB)
        case "large":
            return "x" * MIB
        case "surrogate":
            return "\ud800"
    return how


def write_endlessly(data: bytes = b"x" * MIB) -> None:
    """Write to whatever leads to the gateway."""
    pipes = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    while True:
        for pipe in pipes:
            try:
                os.write(pipe, data)
            except OSError:
                continue


def send(message: bytes, then: str) -> None:
    """Write a message of its own to the gateway, or to the fork server, then stay, without the pipe or with it."""
    pipes = [int(name) for name in os.listdir("/proc/self/fd") if is_pipe(name)]
    for pipe in pipes:
        os.write(pipe, message)
        if then == "close":
            os.close(pipe)
    time.sleep(600)


def is_pipe(name: str) -> bool:
    try:
        return int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
    except FileNotFoundError:
        return False


def report_another_job() -> None:
    write_endlessly(frame(encode(Report(7, encode(Done(None))))))


def read(files: tuple[tuple[int, int], ...], length: int) -> tuple[int, bytes]:
    ((descriptor, size),) = files
    return size, os.pread(descriptor, length, 0)


def surroundings() -> dict[str, Any]:
    """What a worker process has and may do."""
    return {
        "environment": Path("/proc/self/environ").read_bytes().decode().split("\0"),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
        "streams": [str(Path(f"/proc/self/fd/{stream}").readlink()) for stream in (1, 2)],
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "modules": [name for name in sys.modules if name.startswith("loraplex.") and "workers" not in name],
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "file size": resource.getrlimit(resource.RLIMIT_FSIZE),
        "oom": int(Path("/proc/self/oom_score_adj").read_text()),
        "has a process group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0),
        "safe path": sys.flags.safe_path,
        "threads": len(os.listdir("/proc/self/task")),
    }
