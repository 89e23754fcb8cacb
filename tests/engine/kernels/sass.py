"""What the machine code of a kernel says: registers, stack, widths of loads, tensor cores, and how long its main loop is.

The tools are those of the Triton wheel; no GPU is needed.
"""

import re
import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.E(?:\.\w+)*")
_WIDTH = re.compile(r"\.(64|128)\b")
_MATRIX = re.compile(r"\b(HMMA|HGMMA|IMMA|IGMMA|QGMMA)\b")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """`load_bits`: of the widest load from global memory.

    `loop`: instructions of the longest innermost loop, of those that multiply matrices if any do; 0 without one.
    `matrix`: the tensor core's instruction, if any. `local`: loads and stores of spilled registers.
    `late_loads`: the widest ones behind the first barrier.
    """

    registers: int
    stack: int
    local: int
    load_bits: int
    matrix: str | None
    loop: int
    late_loads: int

    def document(self) -> dict[str, Any]:
        return asdict(self)


@cache
def machine_code(cubin: bytes) -> MachineCode:
    """Disassemble one kernel; the same one only once."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        usage = _output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        listing = _output(triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name)
    instructions, loops = _instructions(listing)
    main = _main_loop(instructions, loops)
    matrix = _MATRIX.search("\n".join(instructions))
    return MachineCode(
        registers=_number("REG", usage),
        stack=_number("STACK", usage),
        local=sum(" STL" in f" {line}" or " LDL" in f" {line}" for line in instructions),
        load_bits=_widest(instructions),
        matrix=matrix[1] if matrix else None,
        loop=len(main),
        late_loads=_late_loads(instructions),
    )


def _instructions(listing: str) -> tuple[list[str], list[tuple[int, int]]]:
    """All instructions, and each stretch that a branch leads back over."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction[1])
            target = _BRANCH.search(instruction[1])
            # A kernel ends with a branch to itself.
            if target and labels.get(target[1], len(instructions) - 1) < len(instructions) - 1:
                loops.append((labels[target[1]], len(instructions)))
    return instructions, loops


def _main_loop(instructions: list[str], loops: list[tuple[int, int]]) -> list[str]:
    innermost = [
        instructions[begin:end]
        for begin, end in loops
        if not any(begin <= first and last <= end and (first, last) != (begin, end) for first, last in loops)
    ]
    multiplying = [loop for loop in innermost if _MATRIX.search("\n".join(loop))]
    return max(multiplying or innermost, key=len, default=[])


def _late_loads(instructions: list[str]) -> int:
    barriers = [place for place, line in enumerate(instructions) if "BAR." in line]
    behind = instructions[barriers[0] :] if barriers else []
    return sum("LDG.E.128" in line for line in behind)


def _widest(instructions: list[str]) -> int:
    widths = [0]
    for line in instructions:
        if load := _LOAD.search(line):
            width = _WIDTH.search(load[0])
            widths.append(int(width[1]) if width else 32)
    return max(widths)


def _number(name: str, usage: str) -> int:
    return max(int(found) for found in re.findall(rf"\b{name}:(\d+)", usage))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
