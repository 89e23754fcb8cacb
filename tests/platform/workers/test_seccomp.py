"""The filter of system calls, run by a small interpreter of its instructions for both machines."""

import struct

import pytest

from loraplex.platform.workers.seccomp import (
    ALLOW,
    ALLOWED,
    ARCHITECTURES,
    JUMP_IF_EQUAL,
    KILL,
    LOAD,
    REFUSE,
    RETURN,
    filter_program,
)

# open, openat, openat2, stat, fcntl, ioctl, socket, clone, execve, kill, ptrace: what must never be listed.
DANGEROUS = {
    "x86_64": (2, 257, 437, 4, 72, 16, 41, 56, 59, 62, 101),
    "aarch64": (56, 437, 79, 25, 29, 198, 220, 221, 129, 117),
}
X32_CALLS = 0x40000000
"""On x86-64 the same calls have a second range of numbers from here on."""


def run(program: bytes, number: int, architecture: int) -> int:
    instructions = list(struct.iter_unpack("=HBBI", program))
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(0,) * 6)
    accumulator, place = 0, 0
    while True:
        code, if_true, if_false, value = instructions[place]
        place += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x15:
                place += if_true if accumulator == value else if_false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_exactly_the_listed_calls_are_allowed(machine: str) -> None:
    assert (LOAD, JUMP_IF_EQUAL, RETURN) == (0x20, 0x15, 0x06)
    program, architecture = filter_program(machine), ARCHITECTURES[machine]
    listed = {numbers[0 if machine == "x86_64" else 1] for numbers in ALLOWED.values()}
    for number in range(1024):
        assert run(program, number, architecture) == (ALLOW if number in listed else REFUSE), number
    assert listed.isdisjoint(DANGEROUS[machine])


def test_a_call_by_another_convention_is_refused() -> None:
    program = filter_program("x86_64")
    read, write = (ALLOWED[name][0] for name in ("read", "write"))
    assert run(program, X32_CALLS | read, ARCHITECTURES["x86_64"]) == REFUSE
    assert run(program, X32_CALLS | write, ARCHITECTURES["x86_64"]) == REFUSE
    assert run(program, 3, 0x40000003) == KILL, "read of 32-bit x86"
    assert run(filter_program("aarch64"), 63, ARCHITECTURES["x86_64"]) == KILL
