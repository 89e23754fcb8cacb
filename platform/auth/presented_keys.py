"""The key that a request of `/v1` presents: `Authorization: Bearer …`, or `x-api-key`, by which clients of Anthropic send theirs.

Invariant: of two keys of this server neither is used unless they are equal.
"""

from typing import Final

from starlette.datastructures import Headers

from loraplex.tenants.errors import MalformedKey

API_KEY_HEADER: Final = "x-api-key"
_OURS: Final = "lpx_"


def authorizations(headers: Headers) -> list[str]:
    """Return the `Authorization` headers, where `x-api-key` may stand for the only one. A key of another vendor beside one of
    this server does not count. Raises `MalformedKey` for two keys of this server.
    """
    given, keys = headers.getlist("authorization"), headers.getlist(API_KEY_HEADER)
    if not keys or len(given) > 1:
        return given
    ours = {key for key in (*keys, *map(_bearer, given)) if key.startswith(_OURS)}
    if len(ours) > 1 or len(keys) > 1:
        raise MalformedKey(f"Authorization and {API_KEY_HEADER} have different keys")
    return [f"Bearer {ours.pop()}"] if ours else given or keys


def _bearer(header: str) -> str:
    scheme, _, token = header.partition(" ")
    return token.strip(" ") if scheme.lower() == "bearer" else ""
