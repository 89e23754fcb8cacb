"""Parses a multipart body (RFC 7578) into the two files of an adapter, written to a folder while the body arrives.

Invariant: a part is identified by its field name, or by a file name that is exactly one of the two. Nothing else in a part's
headers is used. The parser reads each byte once and buffers none.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Self

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.storage.hashing_writer import WRITE_BYTES, HashedFile, WrittenFile
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE, max_file_bytes
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.validation.upload_files import PICKLE_FILE, PICKLE_REASON
from loraplex.platform.errors import InvalidBody, InvalidParameter, MissingParameter, UnknownParameter

FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)
FRAME_BYTES: Final = 64 << 10
"""Bound of the bytes of boundaries and headers of two parts."""
_DISPOSITION: Final = b"content-disposition"
_ENCODING: Final = b"content-transfer-encoding"


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of the content type. Raises `InvalidBody`."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
        raise InvalidBody("The body must be multipart/form-data with a boundary of 1 to 70 characters.")
    return boundary


class FolderReceiver:
    """Writes the parts of one body to files. A context manager whose methods block; its owner removes the folder."""

    def __init__(self, boundary: bytes, folder: Path, limits: AdapterLimits, floor_bytes: int = 0) -> None:
        self._folder = folder
        self._floor_bytes = floor_bytes
        self._max_bytes = max_file_bytes(limits)
        self._written: dict[str, WrittenFile] = {}
        self._name = ""
        self._file: HashedFile | None = None
        self._headers: dict[bytes, bytes] = {}
        self._field, self._value = bytearray(), bytearray()
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._headers.clear,
                "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._on_header,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises `InvalidBody`, `InvalidParameter` naming the part, `UploadTooLarge`, `StorageFull`."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidBody(f"The body is not valid multipart/form-data: {error}.") from error

    def finish(self) -> dict[str, WrittenFile]:
        """Return the written files by name. Raises `InvalidBody` for a body that ends early, `MissingParameter`."""
        if not self._ended:
            raise InvalidBody("The body ends before its closing boundary.")
        for name in FILES:
            if name not in self._written:
                raise MissingParameter(f"`{name}` is required.", param=name)
            if self._written[name].size == 0:
                raise InvalidParameter(f"`{name}` is empty.", param=name)
        return dict(self._written)

    def _on_header(self) -> None:
        self._headers[bytes(self._field).strip().lower()] = bytes(self._value).strip()
        self._field.clear()
        self._value.clear()

    def _on_headers(self) -> None:
        self._name = self._part_name()
        if self._name in self._written:
            raise InvalidParameter(f"`{self._name}` occurs twice.", param=self._name)
        encoding = self._headers.get(_ENCODING, b"binary").lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            raise InvalidParameter(
                f"`{self._name}` must be sent without a transfer encoding.", param=self._name
            )
        self._file = HashedFile(
            self._folder / self._name, self._max_bytes[self._name], self._name, self._floor_bytes
        )

    def _part_name(self) -> str:
        kind, options = parse_options_header(self._headers.get(_DISPOSITION))
        given = [options.get(key, b"").decode("utf-8", "replace") for key in (b"name", b"filename")]
        for name in given:
            if kind == b"form-data" and name in FILES:
                return name
        if PICKLE_FILE in given:
            raise UnknownParameter(f"{PICKLE_FILE} {PICKLE_REASON}.", param=PICKLE_FILE)
        name_excerpt = given[0][:64]
        raise UnknownParameter(
            f"Unknown part `{name_excerpt}`; the parts are {' and '.join(FILES)}.", param=name_excerpt
        )

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._file.write(memoryview(data)[start:end])

    def _on_part_end(self) -> None:
        if self._file is not None:
            self._written[self._name] = self._file.finish()
            self._file = None

    def _on_end(self) -> None:
        self._ended = True


async def receive_folder(
    chunks: AsyncIterator[bytes],
    content_type: str,
    folder: Path,
    limits: AdapterLimits,
    floor_bytes: int = 0,
) -> dict[str, WrittenFile]:
    """Write the files of a multipart body to `folder`. Raises what `FolderReceiver` and `chunks` raise."""
    with FolderReceiver(boundary_of(content_type), folder, limits, floor_bytes) as receiver:
        gathered = bytearray()
        async for chunk in chunks:
            gathered += chunk
            if len(gathered) >= WRITE_BYTES:
                await on_thread(receiver.feed, bytes(gathered))
                gathered.clear()
        await on_thread(receiver.feed, bytes(gathered))
        return await on_thread(receiver.finish)
