"""Reads tensors' values in bounded chunks: finds those that are not finite, and compares copies with the base model's own.

Copies of the embedding and the head are what PEFT saves beside LoRA. One is equal if its values cast to bfloat16 are, as
trainers load one model in several types.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loraplex.adapters.errors import Problem
from loraplex.adapters.storage.safe_files import CHUNK_BYTES, read_exactly
from loraplex.adapters.validation.safetensors_header import TensorEntry
from loraplex.adapters.validation.tensor_assignment import TensorAssignment

# dtype: (unsigned integer of the same width, the bits of the exponent, all bits but the sign)
_BITS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "F32": ("<u4", 0x7F80_0000, 0x7FFF_FFFF),
    "F16": ("<u2", 0x7C00, 0x7FFF),
    "BF16": ("<u2", 0x7F80, 0x7FFF),
}
_DIFFERS = (
    "differs from the base model's own: as bfloat16 its SHA-256 begins with {}, the base model's with {}; it was trained, or"
    " is of another model. Only low-rank changes are served: train without modules_to_save and without new tokens"
)
_UNCOMPARABLE = (
    "cannot be compared with the base model, which is served from quantized weights without a digest of its own: quantize it"
    " again by `loraplex quantize`, or save the adapter with save_embedding_layers=False"
)
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True, slots=True)
class TensorValues:
    """`non_finite` counts NaN and infinities."""

    non_finite: int
    all_zero: bool


def scan_tensor(descriptor: int, entry: TensorEntry) -> TensorValues:
    """Scan one tensor. Raises `EOFError` when the file is shorter than its header says."""
    integer, exponent, magnitude = _BITS[entry.dtype]
    non_finite, all_zero = 0, True
    for content in _chunks(descriptor, entry):
        bits: npt.NDArray[np.unsignedinteger] = np.frombuffer(content, dtype=integer)
        non_finite += int(np.count_nonzero((bits & exponent) == exponent))
        all_zero = all_zero and not np.any(bits & magnitude)
    return TensorValues(non_finite, all_zero)


def copy_problems(
    descriptor: int, assignment: TensorAssignment, base: Mapping[str, str]
) -> Iterator[Problem]:
    """Every copy must equal the base model's tensor (`base`: SHA-256 by path) as bfloat16. Raises `EOFError` when the file shrinks.

    Beside a LoRA, PEFT writes one unasked: where it cannot be compared it is let pass, with a warning.
    """
    for path, entry in assignment.base_copies:
        module, own = assignment.modules[path], base.get(path)
        shape = (module.out_features, module.in_features)
        expected = list(reversed(shape) if module.is_embedding else shape)
        if list(entry.shape) != expected:
            yield entry.name, f"must have the base model's shape {expected}, not {list(entry.shape)}"
        elif own is None and path not in assignment.seen:
            yield entry.name, _UNCOMPARABLE
        elif own is not None and (found := _bfloat16_sha256(descriptor, entry)) != own:
            yield entry.name, _DIFFERS.format(found[:16], own[:16])


def _bfloat16_sha256(descriptor: int, entry: TensorEntry) -> str:
    digest = hashlib.sha256()
    for content in _chunks(descriptor, entry):
        digest.update(content if entry.dtype == "BF16" else _as_bfloat16(content, _FLOATS[entry.dtype]))
    return digest.hexdigest()


def _as_bfloat16(content: bytes, dtype: str) -> bytes:
    """Round to the nearest, ties to even; values that are not finite are refused by another check."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits: npt.NDArray[np.uint32] = np.frombuffer(content, dtype=dtype).astype("<f4").view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def _chunks(descriptor: int, entry: TensorEntry) -> Iterator[bytes]:
    for start in range(0, entry.nbytes, CHUNK_BYTES):
        yield read_exactly(descriptor, min(CHUNK_BYTES, entry.nbytes - start), entry.offset + start)
