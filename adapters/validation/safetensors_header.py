"""Parses the header of a safetensors file strictly: every byte of the file belongs to exactly one tensor.

Format: https://github.com/huggingface/safetensors#format. Tensor data is not read here, and nothing is executed.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from loraplex.adapters.errors import HeaderRejected, MalformedJson
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.storage.safe_files import OpenFile, read_exactly
from loraplex.adapters.validation.strict_json import parse_json

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
MAX_NAME_LENGTH = 512
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 32
_LENGTH_BYTES = 8
_MAX_DEPTH = 3
_FILE = "adapter_model.safetensors"
_OTHER_FORMATS = {
    b"\x80": "a pickle",
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x1f\x8b": "a gzip archive",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `offset` is counted from the start of the file, `nbytes` is shape x dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: OpenFile, limits: AdapterLimits) -> Mapping[str, TensorEntry]:
    """Return the tensors by name, in file order; at most the header is in memory. Raises `HeaderRejected`, or `EOFError`."""
    length = _header_length(*file, limits.max_header_bytes)
    raw = read_exactly(file.descriptor, length, _LENGTH_BYTES)
    if not raw.startswith(b"{"):
        raise HeaderRejected(_FILE, "the header does not begin with '{'")
    try:
        document = parse_json(raw, max_depth=_MAX_DEPTH)
    except MalformedJson as error:
        raise HeaderRejected(_FILE, f"the header {error}") from error
    fields = cast(dict[str, object], document)
    _check_metadata(fields.pop("__metadata__", {}))
    if not fields:
        raise HeaderRejected(_FILE, "holds no tensor")
    if len(fields) > limits.max_tensors:
        raise HeaderRejected(_FILE, f"holds {len(fields)} tensors, at most {limits.max_tensors} are allowed")
    data_start = _LENGTH_BYTES + length
    entries = sorted((_entry(name, value, data_start) for name, value in fields.items()), key=_position)
    _check_cover(entries, data_start, file.size)
    return {entry.name: entry for entry in entries}


def _header_length(descriptor: int, size: int, max_header_bytes: int) -> int:
    start = os.pread(descriptor, _LENGTH_BYTES, 0)
    for magic, kind in _OTHER_FORMATS.items():
        if start.startswith(magic) and size >= _LENGTH_BYTES:
            declared = int(struct.unpack("<Q", start)[0])
            if declared > max_header_bytes:
                raise HeaderRejected(_FILE, f"looks like {kind}; only safetensors is read")
    if len(start) < _LENGTH_BYTES:
        raise HeaderRejected(_FILE, f"has {size} bytes, too few for the 8 bytes of the header's length")
    length = int(struct.unpack("<Q", start)[0])
    if length > max_header_bytes:
        raise HeaderRejected(
            _FILE, f"declares a header of {length} bytes, at most {max_header_bytes} are allowed"
        )
    if length > size - _LENGTH_BYTES:
        raise HeaderRejected(
            _FILE, f"declares a header of {length} bytes, but only {size - _LENGTH_BYTES} follow"
        )
    return length


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderRejected("__metadata__", "must be an object of strings")


def _entry(name: str, value: object, data_start: int) -> TensorEntry:
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise HeaderRejected(repr(name[:100]), f"a name has 1 to {MAX_NAME_LENGTH} printable characters")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderRejected(name, "must be an object of exactly dtype, shape and data_offsets")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise HeaderRejected(name, f"dtype {dtype!r:.40} is not one of {', '.join(DTYPE_BYTES)}")
    shape = _shape(name, value["shape"])
    begin, end = _offsets(name, value["data_offsets"])
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise HeaderRejected(
            name, f"{dtype} of shape {list(shape)} takes {expected} bytes, not {end - begin}"
        )
    return TensorEntry(name, dtype, shape, data_start + begin, expected)


def _shape(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise HeaderRejected(name, f"shape must be a list of at most {MAX_DIMENSIONS} numbers")
    if not all(type(size) is int and 0 < size <= MAX_DIMENSION for size in value):
        raise HeaderRejected(
            name,
            f"every size in shape must be an integer from 1 to {MAX_DIMENSION}, not {value!r:.60}; DeepSpeed ZeRO-3 and"
            " FSDP write 0 where the shards were not gathered before saving",
        )
    return tuple(value)


def _offsets(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(offset) is int for offset in value):
        raise HeaderRejected(name, "data_offsets must be two integers")
    begin, end = value
    if not 0 <= begin < end:
        raise HeaderRejected(name, "data_offsets must rise from 0 or more")
    return begin, end


def _position(entry: TensorEntry) -> int:
    return entry.offset


def _check_cover(entries: list[TensorEntry], data_start: int, size: int) -> None:
    position = data_start
    for entry in entries:
        if entry.offset != position:
            kind = "overlaps the tensor before it" if entry.offset < position else "leaves a hole before it"
            raise HeaderRejected(entry.name, f"{kind}: tensors must cover the data without overlap or hole")
        position += entry.nbytes
    if position != size:
        kind = "is truncated" if size < position else "holds bytes after the last tensor"
        raise HeaderRejected(_FILE, f"{kind}: the header describes {position} bytes, the file has {size}")
