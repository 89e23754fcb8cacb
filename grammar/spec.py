"""`GrammarSpec`: the grammar that a gateway sends to an engine.

Invariant: it names its backend and contains that backend's source text, so the engine compiles exactly what was
checked.
"""

from typing import Literal, TypeAlias

import msgspec

Backend: TypeAlias = Literal["xgrammar", "llguidance"]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A backend and its source.

    `source`: for llguidance its grammar (Lark text or the JSON list of grammars), for xgrammar a structural tag as
    JSON.

    `fast_forward` lets the engine append tokens that must follow. `close` makes it end the document within the last
    tokens instead of truncating it.
    """

    backend: Backend
    source: str
    fast_forward: bool = True
    close: bool = False


def encode_spec(spec: GrammarSpec) -> bytes:
    """Return the bytes of `EngineRequest.grammar`."""
    return msgspec.msgpack.encode(spec)


def decode_spec(data: bytes) -> GrammarSpec:
    """Parse the bytes of `encode_spec`. Raises `msgspec.DecodeError`."""
    return msgspec.msgpack.decode(data, type=GrammarSpec)
