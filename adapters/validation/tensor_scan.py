"""Scans a tensor's values in bounded chunks without loading it, by bit pattern (IEEE 754, bfloat16)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loraplex.adapters.storage.safe_files import CHUNK_BYTES, read_exactly
from loraplex.adapters.validation.safetensors_header import TensorEntry

# dtype: (unsigned integer of the same width, the bits of the exponent, all bits but the sign)
_BITS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "F32": ("<u4", 0x7F80_0000, 0x7FFF_FFFF),
    "F16": ("<u2", 0x7C00, 0x7FFF),
    "BF16": ("<u2", 0x7F80, 0x7FFF),
}


@dataclass(frozen=True, slots=True)
class TensorValues:
    """`non_finite` counts NaN and infinities."""

    non_finite: int
    all_zero: bool


def scan_tensor(descriptor: int, entry: TensorEntry) -> TensorValues:
    """Scan one tensor. Raises `EOFError` when the file is shorter than its header says."""
    integer, exponent, magnitude = _BITS[entry.dtype]
    non_finite, all_zero = 0, True
    for start in range(0, entry.nbytes, CHUNK_BYTES):
        length = min(CHUNK_BYTES, entry.nbytes - start)
        bits: npt.NDArray[np.unsignedinteger] = np.frombuffer(
            read_exactly(descriptor, length, entry.offset + start), dtype=integer
        )
        non_finite += int(np.count_nonzero((bits & exponent) == exponent))
        all_zero = all_zero and not np.any(bits & magnitude)
    return TensorValues(non_finite, all_zero)
