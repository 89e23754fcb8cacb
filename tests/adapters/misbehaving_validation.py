"""A validation process that misbehaves as `BEHAVIOUR` in its environment says, in place of reading the folder."""

import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraplex.adapters import validation_child as child
from loraplex.adapters.errors import FolderRejected
from loraplex.adapters.validation import validate

BEHAVIOUR = os.environ.get("BEHAVIOUR", "")
IO_URING_SETUP = 425
PTRACE = {"x86_64": 101, "aarch64": 117}.get(os.uname().machine, 0)
ATTACH = 16
SHMGET = {"x86_64": 29, "aarch64": 194}.get(os.uname().machine, 0)
SIOCSPGRP, FIOASYNC = 0x8902, 0x5452
OPEN = {"x86_64": 2}.get(os.uname().machine)


def act(folder: Path, *_: Any) -> Any:
    match BEHAVIOUR:
        case "spin":
            while True:
                pass
        case "sleep":
            signal.pause()
        case "nap":
            time.sleep(0.3)
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "silent":
            os._exit(0)
        case "allocate":
            bytearray(1 << 36)
        case "babble":
            while True:
                os.write(1, b"x" * (1 << 20))
    raise FolderRejected("deeds", repr(attempts(folder)))


def attempts(folder: Path) -> dict[str, str]:
    """Return what the kernel answers to calls that the process must not make."""
    libc = ctypes.CDLL(None, use_errno=True)

    def system_call(number: int, *arguments: int | ctypes.c_char_p) -> None:
        if libc.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def write() -> None:
        with (folder / "written").open("wb", buffering=0) as file:
            file.write(b"x")

    def opened(flags: int, name: str = "adapter_config.json") -> Callable[[], None]:
        return lambda: os.close(os.open(folder / name, flags, 0o600))

    def on_opened(act: Callable[[int], object]) -> Callable[[], None]:
        def opened_and_used() -> None:
            with (folder / "adapter_config.json").open("rb", buffering=0) as file:
                act(file.fileno())

        return opened_and_used

    def opened_by_its_older_call() -> None:
        path = str(folder / "other").encode()
        if OPEN is None:
            raise PermissionError(errno.EPERM, "there is no such call")
        system_call(OPEN, ctypes.c_char_p(path), os.O_CREAT | os.O_WRONLY, 0o600)

    tried: dict[str, Callable[[], object]] = {
        "socket": socket.socket,
        "socketpair": socket.socketpair,
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "fork": os.fork,
        "signal": lambda: os.kill(os.getppid(), 0),
        "io_uring": lambda: system_call(IO_URING_SETUP, 1, 0),
        "ptrace": lambda: system_call(PTRACE, ATTACH, os.getppid(), 0, 0),
        "remove": lambda: os.unlink(folder / "adapter_config.json"),
        "rename": lambda: (folder / "adapter_config.json").rename(folder / "other"),
        "link": lambda: os.link(folder / "adapter_config.json", folder / "other"),
        "mode": lambda: (folder / "adapter_config.json").chmod(0o777),
        "cut": lambda: os.truncate(folder / "adapter_config.json", 0),
        "folder": lambda: (folder / "made").mkdir(),
        "limits": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE),
        "files": open_many,
        "write": write,
        "append": opened(os.O_WRONLY | os.O_APPEND),
        "update": opened(os.O_RDWR),
        "empty": opened(os.O_RDONLY | os.O_TRUNC),
        "create": opened(os.O_RDONLY | os.O_CREAT, "other"),
        "nameless": opened(os.O_TMPFILE | os.O_RDWR, "."),
        "older": opened_by_its_older_call,
        "owner": on_opened(lambda file: fcntl.fcntl(file, fcntl.F_SETOWN, os.getppid())),
        "owner signal": on_opened(lambda file: fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGKILL)),
        "owner group": on_opened(lambda file: fcntl.ioctl(file, SIOCSPGRP, struct.pack("i", os.getppid()))),
        "asynchronous": on_opened(lambda file: fcntl.ioctl(file, FIOASYNC, struct.pack("i", 1))),
        "lock": on_opened(lambda file: fcntl.flock(file, fcntl.LOCK_EX)),
        "shared memory": lambda: system_call(SHMGET, 0, 4096, 0o1600),
        "scheduling": lambda: os.sched_setparam(0, os.sched_param(0)),
        "flags": on_opened(lambda file: fcntl.fcntl(file, fcntl.F_GETFL)),
        "times": lambda: os.utime(folder / "adapter_config.json", (0, 0)),
        "device": lambda: os.close(os.open(os.devnull, os.O_WRONLY)),
        "read": opened(os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW),
        "core": lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
    }
    return {
        **{name: outcome(call) for name, call in tried.items()},
        "niceness": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "torch": str("torch" in sys.modules),
    }


def open_many() -> None:
    opened: list[int] = []
    try:
        for _ in range(40):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (OSError, ValueError) as error:
        return type(error).__name__ if isinstance(error, ValueError) else os.strerror(error.errno or 0)
    return "done"


if __name__ == "__main__":
    if BEHAVIOUR == "thread":
        threading.Thread(target=signal.pause, daemon=True).start()
    validate.examine = act  # type: ignore[assignment]  # a stand-in that never returns
    child.main()
