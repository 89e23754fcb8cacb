"""The streaming parser of multipart bodies, byte by byte and with hostile bodies."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.errors import UploadTooLarge
from loraplex.adapters.limits import AdapterLimits
from loraplex.platform.errors import (
    GatewayError,
    InvalidBody,
    InvalidParameter,
    MissingParameter,
    UnknownParameter,
)
from loraplex.platform.web.adapters.multipart_upload import receive_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LIMITS = AdapterLimits(max_config_bytes=100, max_weights_bytes=10_000)
TYPE = "multipart/form-data; boundary=frame"
Part = tuple[str, bytes]


def part(disposition: str, content: bytes, more: str = "") -> bytes:
    return f"--frame\r\nContent-Disposition: {disposition}\r\n{more}\r\n".encode() + content + b"\r\n"


def body(*parts: Part) -> bytes:
    written = b"".join(part(f'form-data; name="{name}"; filename="x"', content) for name, content in parts)
    return written + b"--frame--\r\n"


WHOLE = body((CONFIG, b"{}"), (WEIGHTS, b"\r\n--fram\r\n--"))


async def receive(content: bytes, folder: Path, step: int = 1000, kind: str = TYPE) -> dict[str, bytes]:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(content), step):
            yield content[start : start + step]

    folder.mkdir(exist_ok=True, parents=True)
    written = await receive_folder(chunks(), kind, folder, LIMITS)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name, file in files.items():
        assert (written[name].size, written[name].sha256) == (len(file), hashlib.sha256(file).hexdigest())
    return files


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_two_files_arrive(tmp_path: Path, step: int) -> None:
    expected = {CONFIG: b"{}", WEIGHTS: b"\r\n--fram\r\n--"}
    assert await receive(WHOLE, tmp_path, step) == expected
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


@given(st.binary(min_size=1, max_size=300), st.integers(1, 50))
@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_any_content_in_any_chunks(tmp_path: Path, content: bytes, step: int) -> None:
    folder = tmp_path / hashlib.sha256(content + bytes([step])).hexdigest()
    if b"\r\n--frame" in b"\r\n" + content:
        return
    if not folder.exists():
        files = await receive(body((WEIGHTS, content), (CONFIG, b"{}")), folder, step)
        assert files[WEIGHTS] == content


async def test_only_the_two_file_names_are_accepted(tmp_path: Path) -> None:
    """A form with another field name is understood where its file name is exactly one of the two."""
    content = part(f'form-data; name="files"; filename="{CONFIG}"', b"{}")
    content += part(f'form-data; name="{WEIGHTS}"; filename="../../{CONFIG}"', b"w") + b"--frame--\r\n"
    assert await receive(content, tmp_path) == {CONFIG: b"{}", WEIGHTS: b"w"}


HOSTILE: list[tuple[str, bytes, type[Exception]]] = [
    ("nothing", b"", InvalidBody),
    ("no part", b"--frame--\r\n", MissingParameter),
    ("one file", body((CONFIG, b"{}")), MissingParameter),
    ("truncated", WHOLE[:-8], InvalidBody),
    ("twice", body((CONFIG, b"{}"), (CONFIG, b"{}")), InvalidParameter),
    ("a third", body((CONFIG, b"{}"), ("adapter_model.bin", b"x"), (WEIGHTS, b"w")), UnknownParameter),
    ("path", body((f"../{CONFIG}", b"{}")), UnknownParameter),
    ("path in a file name", part(f'form-data; name="f"; filename="/{CONFIG}"', b"{}"), UnknownParameter),
    ("nul", body((f"{CONFIG}\0", b"{}")), UnknownParameter),
    ("no name", part("form-data", b"{}"), UnknownParameter),
    ("attachment", part(f'attachment; name="{CONFIG}"', b"{}"), UnknownParameter),
    ("no header", b"--frame\r\n\r\nx\r\n--frame--\r\n", UnknownParameter),
    (
        "base64",
        part(f'form-data; name="{CONFIG}"', b"e30=", "Content-Transfer-Encoding: base64\r\n"),
        InvalidParameter,
    ),
    ("another boundary", WHOLE.replace(b"--frame", b"--other"), InvalidBody),
    ("large configuration", body((CONFIG, b" " * 101)), UploadTooLarge),
    ("large weights", body((WEIGHTS, b" " * 10_001)), UploadTooLarge),
    ("empty configuration", body((CONFIG, b""), (WEIGHTS, b"w")), InvalidParameter),
    ("empty weights", body((CONFIG, b"{}"), (WEIGHTS, b"")), InvalidParameter),
    ("many headers", part("form-data", b"x", "A: b\r\n" * 20), InvalidBody),
    ("a long header", part("form-data", b"x", f"A: {'b' * 10_000}\r\n"), InvalidBody),
    ("json", b'{"files": []}', InvalidBody),
]


async def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    for frame in (
        body(("adapter_model.bin", b"x")),
        part('form-data; name="f"; filename="adapter_model.bin"', b"x"),
    ):
        with pytest.raises(UnknownParameter, match=r"adapter_model.bin is a pickle.*weights_only=True"):
            await receive(frame, tmp_path)


@pytest.mark.parametrize(
    ("content", "error"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
async def test_hostile_frames(tmp_path: Path, content: bytes, error: type[Exception]) -> None:
    for step in (3, 1000):
        with pytest.raises(error) as caught:
            await receive(content, tmp_path / str(step), step)
        assert type(caught.value) is error


@pytest.mark.parametrize(
    "kind",
    ["", "application/json", "multipart/mixed; boundary=frame", "multipart/form-data"]
    + [f"multipart/form-data; boundary={'x' * 71}", 'multipart/form-data; boundary=""'],
)
async def test_other_content_types(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InvalidBody):
        await receive(WHOLE, tmp_path, kind=kind)
    assert issubclass(InvalidBody, GatewayError)
