"""`Content-Encoding` of request bodies: gzip is decompressed piece by piece, every other encoding is refused by name (415).

Invariant: no piece has more than `PIECE_BYTES`, and the whole at most `MAX_EXPANSION` times what was received, so that a small
body costs neither much memory nor a long turn of the event loop.
"""

import zlib
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request

from loraplex.platform.errors import BodyTooLarge, InvalidBody, UnsupportedEncoding
from loraplex.platform.observability.request_id import response_headers_of

GZIP: Final = "gzip"
NAMES: Final = {"": "", "identity": "", GZIP: GZIP, "x-gzip": GZIP}
"""What a header may say, and the encoding that it means (RFC 9110, 8.4.1)."""
GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
PIECE_BYTES: Final = 64 << 10
MAX_EXPANSION: Final = 100
"""Texts that people write shrink by 3 to 10. Below `PIECE_BYTES` any ratio is harmless, as of one repeated word."""


def content_encoding(request: Request) -> str:
    """Return `gzip`, or an empty text for a plain body. Raises `UnsupportedEncoding`."""
    named = ",".join(request.headers.getlist("content-encoding")).strip().lower()
    if named not in NAMES:
        response_headers_of(request.scope)["accept-encoding"] = GZIP
        raise UnsupportedEncoding(
            f"Content-Encoding {named[:100]!r} is not supported; allowed: gzip, identity."
        )
    return NAMES[named]


async def decompressed(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the content of a gzip body of one member, at most `max_bytes`. Raises `BodyTooLarge`, `InvalidBody`."""
    stream, received, size = zlib.decompressobj(GZIP_WINDOW), 0, 0
    async for chunk in chunks:
        received += len(chunk)
        while True:
            try:
                piece = stream.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                raise InvalidBody(f"The body is not gzip, as its Content-Encoding says: {error}.") from error
            if stream.unused_data:
                raise InvalidBody("The body goes on after the end of its gzip content.")
            if not piece:
                break
            size += len(piece)
            if size > max_bytes:
                raise BodyTooLarge(f"The body is larger than {max_bytes} bytes, once decompressed.")
            if size > max(PIECE_BYTES, MAX_EXPANSION * received):
                raise BodyTooLarge(
                    f"The body expands to more than {MAX_EXPANSION} times its compressed size."
                )
            yield piece
            chunk = stream.unconsumed_tail
    if not stream.eof:
        raise InvalidBody("The body ends within its gzip content.")
