"""Ways to spoil a good folder, one thing at a time."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.adapters.validation.good_folder import (
    CONFIG,
    HIDDEN,
    RANK,
    WEIGHTS,
    A,
    Header,
    Tensors,
    good_config,
    good_tensors,
    header_of,
    values,
    write_file,
)

Spoil = Callable[[Path], object]
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8}


def weights(content: bytes) -> Spoil:
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


def config_bytes(content: bytes) -> Spoil:
    return lambda folder: (folder / CONFIG).write_bytes(content)


def config(**changes: Any) -> Spoil:
    return lambda folder: (folder / CONFIG).write_text(json.dumps(good_config() | changes))


def config_text(old: str, new: str) -> Spoil:
    return config_bytes(json.dumps(good_config()).replace(old, new).encode())


def tensors(change: Callable[[Tensors], object]) -> Spoil:
    """Other tensors, in a file that is well made."""

    def spoil(folder: Path) -> None:
        changed = good_tensors()
        change(changed)
        write_file(folder, *header_of(changed))

    return spoil


def header(change: Callable[[Header], object]) -> Spoil:
    """Another header before the same data."""

    def spoil(folder: Path) -> None:
        changed, data = header_of(good_tensors())
        change(changed)
        write_file(folder, changed, data)

    return spoil


def put(name: str, *shape: int, value: float = 0.5) -> Spoil:
    return tensors(lambda document: document.update({name: values(*shape, value=value)}))


def entry(**changes: Any) -> Spoil:
    """Of the first tensor, whose 256 bytes come first."""
    return header(lambda document: document[A].update(changes))


def entry_of(name: str, **changes: Any) -> Spoil:
    return header(lambda document: document[name].update(changes))


def typed(dtype: str) -> Spoil:
    size = RANK * HIDDEN * BYTES[dtype]
    return tensors(lambda document: document.update({A: (dtype, (RANK, HIDDEN), bytes(size))}))


def many_tensors(count: int) -> Spoil:
    def spoil(folder: Path) -> None:
        entries = {
            f"t{n}": {"dtype": "F16", "shape": [1], "data_offsets": [2 * n, 2 * n + 2]} for n in range(count)
        }
        write_file(folder, entries, bytes(2 * count))

    return spoil


def zip_archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / WEIGHTS, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)


def repeated_name(folder: Path) -> None:
    document, data = header_of(good_tensors())
    raw = json.dumps(document).encode()
    write_file(folder, raw[:-1] + b"," + json.dumps({A: document[A]}).encode()[1:], data)


def truncated(count: int) -> Spoil:
    return lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - count)


def appended(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"PK\x03\x04" + bytes(100))


def in_place_of(name: str, make: Callable[[Path], object]) -> Spoil:
    """Something that is no file of its own under the file's name."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return spoil


def sparse(size: int) -> Spoil:
    return lambda folder: os.truncate(folder / WEIGHTS, size)


def hard_link(path: Path) -> None:
    other = path.parent.parent / f"{path.parent.name}.linked"
    other.write_bytes(b"{}")
    os.link(other, path)


def drop(*names: str) -> Spoil:
    return tensors(lambda document: [document.pop(name) for name in names])


def extra_file(name: str, content: bytes = b"x") -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def deep_header(folder: Path) -> None:
    write_file(folder, b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
