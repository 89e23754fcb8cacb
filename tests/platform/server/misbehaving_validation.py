"""Functions of validation processes: one misbehaves as the uploaded adapter_config.json says ({"behaviour": …, "folder": its own
path}), one validates many uploads."""

import ctypes
import errno
import fcntl
import importlib
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from loraplex.adapters.errors import FolderRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.storage.safe_files import OpenFile, read_exactly
from loraplex.adapters.target_modules import BaseModel
from loraplex.adapters.validation import validate
from loraplex.adapters.validation.result import ValidationResult
from loraplex.adapters.validation.upload_files import UploadFiles

IO_URING_SETUP = 425
PTRACE = {"x86_64": 101, "aarch64": 117}.get(os.uname().machine, 0)
ATTACH = 16
MMAP = {"x86_64": 9, "aarch64": 222}.get(os.uname().machine, 0)
SHMGET = {"x86_64": 29, "aarch64": 194}.get(os.uname().machine, 0)
SIOCSPGRP, FIOASYNC = 0x8902, 0x5452
OPEN = {"x86_64": 2}.get(os.uname().machine)
MAX_DESCRIPTOR = 1024


def act(files: UploadFiles, *_: Any) -> Any:
    upload = json.loads(read_exactly(*files.config, offset=0))
    match upload["behaviour"]:
        case "spin":
            while True:
                pass
        case "sleep":
            wait(-1)
        case "nap":
            wait(0.3)
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "fail":
            importlib.import_module("colorsys")
        case "silent":
            os._exit(0)
        case "allocate":
            bytearray(1 << 36)
        case "babble":
            write_endlessly()
    raise FolderRejected(
        "deeds", repr(attempts(Path(upload["folder"]), *(file.descriptor for file in files)))
    )


def wait(timeout_s: float) -> None:
    """Wait without a call that is refused; -1 is forever."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=timeout_s)


def attempts(folder: Path, config: int, weights: int) -> dict[str, Any]:
    """Return what the kernel answers to calls that the process must not make."""
    libc = ctypes.CDLL(None, use_errno=True)

    def system_call(number: int, *arguments: int | ctypes.c_char_p) -> None:
        if libc.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def opened(flags: int, path: Path = folder / "adapter_config.json") -> Callable[[], None]:
        return lambda: os.close(os.open(path, flags, 0o600))

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
        "write": opened(os.O_WRONLY | os.O_CREAT | os.O_TRUNC, folder / "written"),
        "append": opened(os.O_WRONLY | os.O_APPEND),
        "update": opened(os.O_RDWR),
        "empty": opened(os.O_RDONLY | os.O_TRUNC),
        "create": opened(os.O_RDONLY | os.O_CREAT, folder / "other"),
        "nameless": opened(os.O_TMPFILE | os.O_RDWR, folder),
        "older": opened_by_its_older_call,
        "read": opened(os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW),
        "read another upload": opened(os.O_RDONLY, folder.with_name("other") / "adapter_config.json"),
        "read a setting": opened(os.O_RDONLY, Path("/etc/passwd")),
        "read the parent": opened(os.O_RDONLY, Path(f"/proc/{os.getppid()}/environ")),
        "reopen": opened(os.O_RDONLY, Path(f"/proc/self/fd/{config}")),
        "reopen to write": opened(os.O_RDWR, Path(f"/proc/self/fd/{weights}")),
        "list descriptors": lambda: os.listdir("/proc/self/fd"),
        "list uploads": lambda: os.listdir(folder.parent),
        "existence": lambda: os.stat(folder),
        "link target": lambda: os.readlink("/proc/self/exe"),
        "working folder": lambda: os.chdir(folder),
        "duplicate": lambda: os.dup(config),
        "cut open": lambda: os.ftruncate(weights, 0),
        "mode open": lambda: os.fchmod(weights, 0o777),
        "send": lambda: os.sendfile(1, config, 0, 1),
        "owner": lambda: fcntl.fcntl(config, fcntl.F_SETOWN, os.getppid()),
        "owner signal": lambda: fcntl.fcntl(config, fcntl.F_SETSIG, signal.SIGKILL),
        "owner group": lambda: fcntl.ioctl(config, SIOCSPGRP, struct.pack("i", os.getppid())),
        "asynchronous": lambda: fcntl.ioctl(config, FIOASYNC, struct.pack("i", 1)),
        "lock": lambda: fcntl.flock(config, fcntl.LOCK_EX),
        "shared memory": lambda: system_call(SHMGET, 0, 4096, 0o1600),
        "scheduling": lambda: os.sched_setparam(0, os.sched_param(0)),
        "times": lambda: os.utime(folder / "adapter_config.json", (0, 0)),
        "device": lambda: os.close(os.open(os.devnull, os.O_WRONLY)),
        "core": lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
        "descriptors": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        "change config": lambda: os.write(config, b"x"),
        "change weights": lambda: os.write(weights, b"x"),
        "map to write": lambda: system_call(MMAP, 0, 4096, mmap.PROT_WRITE, mmap.MAP_SHARED, weights, 0),
    }
    return {
        "refusals": {name: outcome(call) for name, call in tried.items()},
        "environment": dict(os.environ),
        "readable": [number for number in range(MAX_DESCRIPTOR) if is_readable(number)],
        "torch": "torch" in sys.modules,
    }


def write_endlessly() -> None:
    """Write to whatever leads to the gateway."""
    while True:
        for descriptor in range(MAX_DESCRIPTOR):
            with suppress(OSError):
                os.write(descriptor, b"x" * (1 << 20))


def is_readable(descriptor: int) -> bool:
    try:
        return bool(os.pread(descriptor, 1, 0))
    except OSError:
        return False


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (OSError, ValueError) as error:
        return type(error).__name__ if isinstance(error, ValueError) else os.strerror(error.errno or 0)
    return "done"


def validate_files(files: UploadFiles, base: BaseModel, limits: AdapterLimits) -> ValidationResult:
    """The function of a validation, with a stand-in for its checks."""
    validate.examine = act  # type: ignore[assignment]  # a stand-in that takes fewer arguments
    return validate.validate_files(files, base, limits)


def validate_uploads(
    files: tuple[OpenFile, ...],
    base: BaseModel,
    limits: AdapterLimits,
) -> list[ValidationResult]:
    """Validate several uploads, as one process never does; each has two files."""
    return [
        validate.validate_files(UploadFiles(config, weights), base, limits)
        for config, weights in zip(files[::2], files[1::2], strict=True)
    ]
