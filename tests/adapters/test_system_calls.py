"""The filter of system calls, run by a small interpreter of its instructions for both machines."""

import os
import struct

import pytest

from loraplex.adapters.system_calls import (
    ALLOW,
    ARCHITECTURES,
    JUMP_IF_ANY_BIT,
    JUMP_IF_AT_LEAST,
    JUMP_IF_EQUAL,
    KILL,
    LOAD,
    REFUSE,
    REFUSED,
    RETURN,
    X32_CALLS,
    filter_program,
)

# read, write, mmap, openat, exit_group: what every process needs.
NEEDED = {"x86_64": (0, 1, 9, 257, 231), "aarch64": (63, 64, 222, 56, 94)}


def run(program: bytes, number: int, architecture: int, *arguments: int) -> int:
    instructions = list(struct.iter_unpack("=HBBI", program))
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    accumulator, place = 0, 0
    while True:
        code, if_true, if_false, value = instructions[place]
        place += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x15 | 0x35:
                holds = accumulator == value if code == JUMP_IF_EQUAL else accumulator >= value
                place += if_true if holds else if_false
            case 0x45:
                place += if_true if accumulator & value else if_false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_exactly_the_listed_calls_are_refused(machine: str) -> None:
    assert (LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY_BIT, RETURN) == (0x20, 0x15, 0x35, 0x45, 0x06)
    program, architecture = filter_program(machine), ARCHITECTURES[machine]
    column = 0 if machine == "x86_64" else 1
    listed = {numbers[column] for numbers in REFUSED.values()} - {None}
    for number in range(512):
        assert run(program, number, architecture) == (REFUSE if number in listed else ALLOW), number
    assert listed.isdisjoint(NEEDED[machine])


@pytest.mark.parametrize(
    ("machine", "number", "place"), [("x86_64", 257, 2), ("x86_64", 2, 1), ("aarch64", 56, 2)]
)
def test_files_open_for_reading_alone(machine: str, number: int, place: int) -> None:
    program, architecture = filter_program(machine), ARCHITECTURES[machine]

    def opened(flags: int) -> int:
        # A folder's number and an address have all bits; so may the upper half of flags, which the kernel ignores.
        return run(program, number, architecture, *[2**64 - 1] * place, flags)

    for flags in (os.O_RDONLY, os.O_CLOEXEC | os.O_NOFOLLOW, os.O_DIRECTORY | os.O_NONBLOCK, 1 << 40):
        assert opened(flags) == ALLOW
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_WRONLY | os.O_APPEND, 3):
        assert opened(flags) == opened(flags | os.O_CLOEXEC | 1 << 40) == REFUSE, flags
    assert opened(os.O_TMPFILE | os.O_RDWR) == REFUSE


@pytest.mark.parametrize(
    ("machine", "number", "refused", "allowed"),
    [
        ("x86_64", 72, (8, 10, 15), (0, 1, 2, 3, 4, 9, 11, 16, 1030)),
        ("aarch64", 25, (8, 10, 15), (0, 1, 2, 3, 4, 9, 11, 16, 1030)),
        ("x86_64", 16, (0x8901, 0x8902, 0x5452), (0x5401, 0x5413, 0x541B, 0x5421, 0x8903)),
        ("aarch64", 29, (0x8901, 0x8902, 0x5452), (0x5401, 0x5413, 0x541B, 0x5421, 0x8903)),
    ],
)
def test_an_open_file_cannot_signal_another_process(
    machine: str, number: int, refused: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    program, architecture = filter_program(machine), ARCHITECTURES[machine]
    for command in refused:
        # The kernel ignores the upper half of a command.
        for asked in (command, command | 1 << 40):
            assert run(program, number, architecture, 2**64 - 1, asked, 1) == REFUSE, command
    for command in allowed:
        assert run(program, number, architecture, refused[0], command, refused[0]) == ALLOW, command


def test_a_call_by_another_convention_is_refused() -> None:
    program = filter_program("x86_64")
    assert run(program, X32_CALLS | 41, ARCHITECTURES["x86_64"]) == REFUSE
    assert run(program, 359, 0x40000003) == KILL, "socket of 32-bit x86"
    assert run(filter_program("aarch64"), 198, ARCHITECTURES["x86_64"]) == KILL
