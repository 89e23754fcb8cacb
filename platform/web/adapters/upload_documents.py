"""What the upload routes are sent: the declared files, bodies and their digest."""

import base64
import re
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator
from starlette.requests import Request

from loraplex.adapters.limits import DEFAULT_LIMITS
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE, max_file_bytes
from loraplex.adapters.validation.upload_files import PICKLE_FILE, PICKLE_REASON
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.request_bodies import RequestModel
from loraplex.tenants.registry.uploads import DeclaredFile

FileName = Literal["adapter_config.json", "adapter_model.safetensors"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MAX_BYTES: Final = max_file_bytes(DEFAULT_LIMITS)
_CONTENT_DIGEST: Final = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?:,|$)")


class FileBody(RequestModel):
    name: FileName
    size: Annotated[int, Field(ge=1, le=DEFAULT_LIMITS.max_weights_bytes)]
    sha256: Sha256

    @field_validator("name", mode="before")
    @classmethod
    def _is_no_pickle(cls, name: object) -> object:
        if name == PICKLE_FILE:
            raise ValueError(f"{PICKLE_FILE} {PICKLE_REASON}")
        return name


class UploadBody(RequestModel):
    """Exactly the two files of an adapter, in any order."""

    files: Annotated[list[FileBody], Field(min_length=2, max_length=2)]

    @model_validator(mode="after")
    def _both(self) -> "UploadBody":
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError(f"`files` must hold {CONFIG_FILE} and {WEIGHTS_FILE}, each once")
        for file in self.files:
            if file.size > MAX_BYTES[file.name]:
                raise ValueError(f"the size of {file.name} must be at most {MAX_BYTES[file.name]} bytes")
        return self

    def declared(self) -> list[DeclaredFile]:
        """Return the files sorted by name."""
        return [
            DeclaredFile(file.name, file.size, file.sha256)
            for file in sorted(self.files, key=lambda f: f.name)
        ]


def content_digest(request: Request) -> str | None:
    """Return the SHA-256 of Content-Digest (RFC 9530) in hexadecimal digits; None without the header.

    Raises `InvalidParameter` when the header names no SHA-256.
    """
    given = request.headers.get("content-digest")
    if given is None:
        return None
    match = _CONTENT_DIGEST.search(given[:1000])
    if match is None:
        raise InvalidParameter(
            "Content-Digest must hold `sha-256=:<the hash in base64>:`.", param="Content-Digest"
        )
    return base64.b64decode(match[1]).hex()


def binary_body() -> dict[str, Any]:
    """Build the `requestBody` of a part, for `openapi_extra`."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"required": True, "content": content}


def folder_body() -> dict[str, Any]:
    """Build the `requestBody` of a whole adapter, for `openapi_extra`."""
    properties = {name: {"type": "string", "format": "binary"} for name in (CONFIG_FILE, WEIGHTS_FILE)}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
