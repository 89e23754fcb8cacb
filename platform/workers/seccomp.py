"""A seccomp filter for processes that read untrusted files through open descriptors (Linux, seccomp(2)).

Invariant: a call outside `ALLOWED` fails with EPERM, a call of another architecture ends the process, and no later call
removes the filter.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping
from typing import Final

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_SET_NO_NEW_PRIVS = 38
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET = 0, 4
"""Offsets in `struct seccomp_data`."""
ARCHITECTURES: Final[Mapping[str, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# call: (number on x86-64, number on aarch64). None opens a file, takes a path or reaches another process.
ALLOWED: Final[Mapping[str, tuple[int, int]]] = {
    # what is open already
    "read": (0, 63),
    "pread64": (17, 67),
    "write": (1, 64),
    # memory of the interpreter
    "brk": (12, 214),
    "mmap": (9, 222),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    # locks, CPU time, and the end
    "futex": (202, 98),
    "clock_gettime": (228, 113),
    "exit_group": (231, 94),
}


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse_system_calls() -> None:
    """Install the filter for this process, which has one thread. Raises `OSError` where the kernel cannot or will
    not.
    """
    machine = os.uname().machine
    if os.uname().sysname != "Linux" or machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter of system calls is known for {os.uname().sysname} {machine}")
    instructions = filter_program(machine)
    program = _Program(len(instructions) // 8, instructions)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def filter_program(machine: str) -> bytes:
    """Return the filter for `machine`, a key of `ARCHITECTURES`, as consecutive `struct sock_filter`."""
    numbers = [on_x86 if machine == "x86_64" else on_arm for on_x86, on_arm in ALLOWED.values()]
    return b"".join(
        (
            _instruction(LOAD, ARCHITECTURE_OFFSET),
            _instruction(JUMP_IF_EQUAL, ARCHITECTURES[machine], if_true=1),
            _instruction(RETURN, KILL),
            _instruction(LOAD, NUMBER_OFFSET),
            # Jump over the remaining tests and the refusal.
            *(
                _instruction(JUMP_IF_EQUAL, number, if_true=len(numbers) - index)
                for index, number in enumerate(numbers)
            ),
            _instruction(RETURN, REFUSE),
            _instruction(RETURN, ALLOW),
        )
    )


def _instruction(code: int, value: int, *, if_true: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, 0, value)


def _prctl(option: int, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    padded = (*arguments, 0, 0, 0, 0)[:4]
    if libc.prctl(option, *(ctypes.c_ulong(argument) for argument in padded)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
