"""A seccomp filter for processes that read untrusted files (Linux, seccomp(2)).

Invariant: a refused call fails with EPERM, a call of another architecture ends the process, and no later call removes
the filter. Files open for reading only.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_SET_NO_NEW_PRIVS = 38
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET, ARGUMENT_BYTES = 0, 4, 16, 8
"""Offsets in `struct seccomp_data`. The kernel reads only the lower half of flags and commands, which comes first on both machines."""
ARCHITECTURES: Final[Mapping[str, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_CALLS = 0x40000000
"""On x86-64 the same calls have a second range of numbers from here on."""

CHANGING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
"""Any of these flags creates, empties or writes a file. They are the same on both machines; O_TMPFILE needs one of them."""

OWNER_COMMANDS: Final = {"F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15}
OWNER_REQUESTS: Final = {"FIOSETOWN": 0x8901, "SIOCSPGRP": 0x8902, "FIOASYNC": 0x5452}
"""These have the kernel send a signal of choice to another process. They are the same on both machines."""


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call that is refused where one of `tests`, a jump kind and its value, is true of its argument at `place`."""

    on_x86_64: int
    on_aarch64: int | None
    place: int
    tests: tuple[tuple[int, int], ...]


_CHANGES: Final = ((JUMP_IF_ANY_BIT, CHANGING),)
CHECKED: Final[Mapping[str, CheckedCall]] = {
    "open": CheckedCall(2, None, 1, _CHANGES),
    "openat": CheckedCall(257, 56, 2, _CHANGES),
    "fcntl": CheckedCall(72, 25, 1, tuple((JUMP_IF_EQUAL, value) for value in OWNER_COMMANDS.values())),
    "ioctl": CheckedCall(16, 29, 1, tuple((JUMP_IF_EQUAL, value) for value in OWNER_REQUESTS.values())),
}

# call: (number on x86-64, number on aarch64); None where there is none.
REFUSED: Final[Mapping[str, tuple[int, int | None]]] = {
    # network
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "recvmmsg": (299, 243),
    # other programs and processes
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    # limits of this and of other processes of this user
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "ioprio_set": (251, 30),
    # locks and memory shared with other processes of this user
    "flock": (73, 32),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    # file names, owners and attributes, other tenants' included
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "creat": (85, None),
    "openat2": (437, 437),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "fallocate": (285, 47),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # kernel interfaces that reading a file does not need
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
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
    is_x86 = machine == "x86_64"
    numbers = [of_x86 if is_x86 else of_arm for of_x86, of_arm in REFUSED.values()]
    tests = [(JUMP_IF_EQUAL, number) for number in numbers if number is not None]
    if is_x86:
        tests.append((JUMP_IF_AT_LEAST, X32_CALLS))
    program = [
        _instruction(LOAD, ARCHITECTURE_OFFSET),
        _instruction(JUMP_IF_EQUAL, ARCHITECTURES[machine], if_true=1),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER_OFFSET),
    ]
    for call in CHECKED.values():
        checked = call.on_x86_64 if is_x86 else call.on_aarch64
        if checked is not None:
            program += _checked(checked, call)
    for index, (jump, number) in enumerate(tests):
        # Jump over the remaining tests and the permission.
        program.append(_instruction(jump, number, if_true=len(tests) - index))
    return b"".join([*program, _instruction(RETURN, ALLOW), _instruction(RETURN, REFUSE)])


def _checked(number: int, call: CheckedCall) -> list[bytes]:
    """Return the test of one call, which decides it; other calls continue after it with the number still loaded."""
    count = len(call.tests)
    return [
        _instruction(JUMP_IF_EQUAL, number, if_false=count + 3),
        _instruction(LOAD, ARGUMENTS_OFFSET + call.place * ARGUMENT_BYTES),
        # Jump over the remaining tests and the permission.
        *(_instruction(jump, value, if_true=count - at) for at, (jump, value) in enumerate(call.tests)),
        _instruction(RETURN, ALLOW),
        _instruction(RETURN, REFUSE),
    ]


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _prctl(option: int, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    padded = (*arguments, 0, 0, 0, 0)[:4]
    if libc.prctl(option, *(ctypes.c_ulong(argument) for argument in padded)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
