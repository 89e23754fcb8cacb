"""Files of a folder under names that begin with the digest of all, so that browsers may keep them for a year.

Invariant: a name stands for one content. All files are in memory; each is compressed once.
"""

import gzip
import hashlib
import mimetypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

DIGEST_LENGTH: Final = 12
SERVED: Final = {".css", ".js", ".png", ".svg"}
"""Suffixes of files that are served; licences and notes beside them are not."""
CACHE_CONTROL: Final = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class StaticFile:
    """One file. `name` is its path in the folder, below the digest: so modules import each other by relative paths."""

    name: str
    content: bytes
    media_type: str

    @cached_property
    def compressed(self) -> bytes:
        """The content as gzip writes it at its best."""
        return gzip.compress(self.content, mtime=0)


class StaticFiles:
    """The files of `folder`, at `prefix`."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._prefix = prefix
        self._names: dict[str, str] = {}
        self._files: dict[str, StaticFile] = {}
        for path, file in _read(folder):
            self._names[path] = file.name
            self._files[file.name] = file

    def url(self, path: str) -> str:
        """Return the address of a file by its path in the folder. Raises `KeyError`."""
        return f"{self._prefix}/{self._names[path]}"

    async def send(self, request: Request) -> Response:
        """Respond with the file that the path parameter `name` names."""
        file = self._files.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404)
        headers = {"cache-control": CACHE_CONTROL, "vary": "accept-encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(file.content, headers=headers, media_type=file.media_type)
        return Response(
            file.compressed, headers=headers | {"content-encoding": "gzip"}, media_type=file.media_type
        )


def _read(folder: Path) -> Iterator[tuple[str, StaticFile]]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix in SERVED)
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    digests = [hashlib.sha256(content).hexdigest() for content in contents.values()]
    digest = hashlib.sha256("".join([*contents, *digests]).encode()).hexdigest()[:DIGEST_LENGTH]
    for path, content in contents.items():
        yield path, StaticFile(f"{digest}/{path}", content, mimetypes.types_map[Path(path).suffix])
