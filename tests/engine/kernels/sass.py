"""What the machine code of a kernel says: registers, stack, widths of loads, tensor cores, and how long its main loop is.

The tools are those of the Triton wheel; no GPU is needed.
"""

import re
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", re.MULTILINE)
_INSTRUCTION_BYTES = 16
_BRANCH = re.compile(r"BRA.*\b0x([0-9a-f]+)\s*$")
_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.E(?:\.\w+)*")
_WIDTH = re.compile(r"\.(64|128)\b")
_MATRIX = re.compile(r"\b(HMMA|HGMMA|IMMA|IGMMA|QGMMA)\b")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """`load_bits`: of the widest load from global memory.

    `loop`: instructions of the longest innermost loop, of those that multiply matrices if any do; 0 without one.
    `matrix`: the tensor core's instruction, if any. `local`: loads and stores of spilled registers, `loop_local` those in `loop`.
    `late_loads`: the widest ones behind the first barrier.
    """

    registers: int
    stack: int
    local: int
    loop_local: int
    load_bits: int
    matrix: str | None
    loop: int
    late_loads: int

    def document(self) -> dict[str, Any]:
        return asdict(self)


@cache
def machine_code(cubin: bytes) -> MachineCode:
    """Of one kernel; the same one is disassembled only once."""
    return machine_codes([cubin])[0]


def machine_codes(cubins: Sequence[bytes]) -> list[MachineCode]:
    """Of many kernels at once: the disassembler takes 0.3 s for its own start."""
    codes = [_code(cubin) for cubin in cubins]
    with NamedTemporaryFile(suffix=".bin") as file:
        Path(file.name).write_bytes(b"".join(codes))
        listing = _output(triton.knobs.nvidia.nvdisasm.path, "-b", "SM90a", "-ndf", file.name)
    lines = _INSTRUCTION.findall(listing)
    assert len(lines) * _INSTRUCTION_BYTES == sum(map(len, codes))
    found, begin = [], 0
    for cubin, code in zip(cubins, codes, strict=True):
        end = begin + len(code) // _INSTRUCTION_BYTES
        found.append(_described(cubin, lines[begin:end], begin))
        begin = end
    return found


def _code(cubin: bytes) -> bytes:
    """The instructions: what the ELF section `.text.KERNEL` holds, of which there is one."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + size * i) for i in range(count)]
    found = []
    for name, _, _, _, offset, length in headers:
        at = headers[names][4] + name
        if cubin.startswith(b".text.", at):
            found.append(cubin[offset : offset + length])
    (code,) = found
    return code


def _described(cubin: bytes, instructions: list[str], begin: int) -> MachineCode:
    """`begin`: how many instructions stand before the first one."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        usage = _output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
    main = _main_loop(instructions, _loops(instructions, begin))
    matrix = _MATRIX.search("\n".join(instructions))
    return MachineCode(
        registers=_number("REG", usage),
        stack=_number("STACK", usage),
        local=_spills(instructions),
        loop_local=_spills(main),
        load_bits=_widest(instructions),
        matrix=matrix[1] if matrix else None,
        loop=len(main),
        late_loads=_late_loads(instructions),
    )


def _loops(instructions: list[str], begin: int) -> list[tuple[int, int]]:
    """Each stretch that a branch leads back over."""
    loops: list[tuple[int, int]] = []
    for place, instruction in enumerate(instructions):
        branch = _BRANCH.search(instruction)
        target = int(branch[1], 16) // _INSTRUCTION_BYTES - begin if branch else place
        # A kernel ends with a branch to itself.
        if target < place:
            loops.append((target, place + 1))
    return loops


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


def _spills(instructions: list[str]) -> int:
    return sum(" STL" in f" {line}" or " LDL" in f" {line}" for line in instructions)


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
