"""The header reader against a corpus of bad files, each with its own message, and against random bytes."""

import json
import os
import pickle  # noqa: TID251  # as an attack
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from loraplex.adapters.errors import AdapterRejected, FolderRejected, HeaderRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.storage.safe_files import open_regular
from loraplex.adapters.validation import safetensors_header
from loraplex.adapters.validation.safetensors_header import TensorEntry

LIMITS = AdapterLimits(max_header_bytes=4096, max_tensors=16)
FileWriter = Callable[..., Path]


def read_header(path: Path, limits: AdapterLimits) -> Mapping[str, TensorEntry]:
    with open_regular(path, max_bytes=limits.max_weights_bytes) as file:
        return safetensors_header.read_header(file, limits)


def entry(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONE = entry(0, 8)
BAD_HEADERS: list[tuple[str, object, bytes, str]] = [
    ("no tensor", {}, b"", "holds no tensor"),
    ("metadata only", {"__metadata__": {"format": "pt"}}, b"", "holds no tensor"),
    ("array", b"[1]", b"", "does not begin with '{'"),
    ("leading space", b' {"a":1}', b"", "does not begin with '{'"),
    ("not json", b"{oops}", b"", "is not JSON"),
    ("not utf-8", b'{"\xff": 1}', b"", "is not UTF-8"),
    ("trailing text", b'{"a": 1} x', b"", "is not JSON"),
    ("deep", b'{"a":' * 40 + b"1" + b"}" * 40, b"", "nested more than 3 levels"),
    ("deep behind a quote", b'{"\\"": [[[[1]]]]}', b"", "nested more than 3 levels"),
    (
        "duplicate name",
        b'{"a":%b,"a":%b}' % ((json.dumps(ONE).encode(),) * 2),
        bytes(8),
        "repeats the key 'a'",
    ),
    ("duplicate key", b'{"a":{"dtype":"F32","dtype":"F16"}}', bytes(8), "repeats the key 'dtype'"),
    ("NaN", b'{"a": NaN}', b"", "holds NaN"),
    ("long integer", b'{"a": ' + b"9" * 4000 + b"}", b"", "must be an object"),
    ("metadata of numbers", {"__metadata__": {"a": 1}, "t": ONE}, bytes(8), "must be an object of strings"),
    ("entry is a list", {"t": [1]}, b"", "exactly dtype, shape and data_offsets"),
    ("extra key", {"t": {**ONE, "strides": [1]}}, bytes(8), "exactly dtype, shape and data_offsets"),
    ("missing offsets", {"t": {"dtype": "F32", "shape": [2]}}, bytes(8), "exactly dtype, shape"),
    ("integer dtype", {"t": entry(0, 8, (1,), "I64")}, bytes(8), "'I64' is not one of F64, F32, F16, BF16"),
    ("dtype is a list", {"t": entry(0, 8, (2,), ["F32"])}, bytes(8), "is not one of F64, F32"),
    ("negative shape", {"t": entry(0, 8, (-2,))}, bytes(8), "integer from 1 to"),
    ("zero in shape", {"t": entry(0, 8, (0, 2))}, bytes(8), "integer from 1 to"),
    ("boolean in shape", {"t": entry(0, 8, (True, 2))}, bytes(8), "integer from 1 to"),
    ("float in shape", {"t": entry(0, 8, (2.0,))}, bytes(8), "integer from 1 to"),
    ("huge shape", {"t": entry(0, 8, (1 << 40, 1 << 40))}, bytes(8), "integer from 1 to"),
    ("many dimensions", {"t": entry(0, 8, (1,) * 9)}, bytes(8), "at most 8 numbers"),
    ("shape is text", {"t": entry(0, 8, "2")}, bytes(8), "at most 8 numbers"),
    ("size mismatch", {"t": entry(0, 8, (3,))}, bytes(8), "takes 12 bytes, not 8"),
    ("backward offsets", {"t": entry(8, 0)}, bytes(8), "must rise from 0"),
    ("negative offset", {"t": entry(-8, 0)}, bytes(8), "must rise from 0"),
    ("three offsets", {"t": {**ONE, "data_offsets": [0, 4, 8]}}, bytes(8), "must be two integers"),
    ("overlap", {"t": ONE, "u": entry(4, 12)}, bytes(12), "u: overlaps"),
    ("same place", {"t": ONE, "u": ONE}, bytes(8), "overlaps"),
    ("hole", {"t": ONE, "u": entry(12, 20)}, bytes(20), "u: leaves a hole"),
    ("hole at the start", {"t": entry(4, 12)}, bytes(12), "t: leaves a hole"),
    ("truncated data", {"t": ONE}, bytes(7), "is truncated"),
    ("bytes behind", {"t": ONE}, bytes(9), "holds bytes after the last tensor"),
    ("empty name", {"": ONE}, bytes(8), "1 to 512 printable"),
    ("control character", {"a\x1b[2J": ONE}, bytes(8), "1 to 512 printable"),
    ("long name", {"a" * 513: ONE}, bytes(8), "1 to 512 printable"),
    ("many tensors", {f"t{i}": entry(8 * i, 8 * i + 8) for i in range(17)}, bytes(136), "at most 16"),
]


@pytest.fixture
def safetensors_file(tmp_path: Path) -> FileWriter:
    """Write a file from a header (an object, or raw bytes) and the data after it."""

    def write(header: object, data: bytes = b"", *, length: int | None = None, name: str = "file") -> Path:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
        return path

    return write


@pytest.mark.parametrize(("header", "data", "message"), [pytest.param(*b[1:], id=b[0]) for b in BAD_HEADERS])
def test_bad_headers(safetensors_file: FileWriter, header: object, data: bytes, message: str) -> None:
    with pytest.raises(HeaderRejected) as caught:
        read_header(safetensors_file(header, data), LIMITS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "has 0 bytes, too few", id="empty"),
        pytest.param(b"\x01\x00\x00", "too few for the 8 bytes", id="short"),
        pytest.param(struct.pack("<Q", 100) + b"{}", "but only 2 follow", id="truncated header"),
        pytest.param(struct.pack("<Q", 4097) + b"{" * 5000, "at most 4096 are allowed", id="long header"),
        pytest.param(b"\xff" * 64, "at most 4096 are allowed", id="huge length"),
        pytest.param(pickle.dumps({"weights": [1.0] * 50}), "looks like a pickle", id="pickle"),
        pytest.param(b"GGUF\x03\x00\x00\x00" + b"\x09" * 60, "looks like a GGUF file", id="gguf"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    with pytest.raises(HeaderRejected) as caught:
        read_header(path, LIMITS)
    assert message in str(caught.value)


def test_zip_renamed(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps([1, 2, 3]))
    with pytest.raises(HeaderRejected, match="looks like a zip archive"):
        read_header(path, LIMITS)


def test_links_pipes_folders_and_large_files_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    save_file({"t": np.ones(4, np.float32)}, str(real))
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(real)
    os.mkfifo(pipe)
    cases = [(link, "symbolic link"), (pipe, "not a regular file"), (tmp_path, "not a regular file")]
    for path, message in [*cases, (tmp_path / "absent", "is missing")]:
        with pytest.raises(FolderRejected, match=message):
            read_header(path, LIMITS)
    with pytest.raises(FolderRejected, match="at most 10 are allowed"):
        read_header(real, AdapterLimits(max_weights_bytes=10))


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "b": np.ones((2, 3), np.float32),
        "a": np.ones((5,), np.float16),
        "c": np.full((1, 1), 7, np.float32),
    }
    path = tmp_path / "file.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    header = read_header(path, LIMITS)
    content = path.read_bytes()
    assert {name: entry.shape for name, entry in header.items()} == {n: t.shape for n, t in tensors.items()}
    for name, found in header.items():
        assert content[found.offset : found.offset + found.nbytes] == tensors[name].tobytes()


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_bytes_give_a_cover_or_a_refusal(tmp_path: Path, data: st.DataObject) -> None:
    """A valid file with a few bytes changed, cut or inserted."""
    path = tmp_path / "fuzz.safetensors"
    save_file({"first": np.ones((2, 3), np.float32), "second": np.zeros(4, np.float16)}, str(path))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(content)))
        replacement = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"-1", b"[", b'"', b"null", b"0", b"{}"])
        )
        content[position : position + data.draw(st.integers(0, 3))] = replacement
    path.write_bytes(content)
    try:
        header = read_header(path, LIMITS)
    except AdapterRejected as error:
        assert error.message
        return
    assert sum(found.nbytes for found in header.values()) == len(content) - min(
        e.offset for e in header.values()
    )


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "t", "__metadata__"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_refused_by_name(safetensors_file: FileWriter, header: object) -> None:
    with pytest.raises(HeaderRejected):
        read_header(safetensors_file(header, bytes(8)), LIMITS)
