"""`GrammarSpec`: what crosses from gateway to engine. Invariant: it names its backend and holds that backend's own source
text, so that the engine decides nothing and compiles exactly what was tried.
"""

from typing import Literal, TypeAlias

import msgspec

Backend: TypeAlias = Literal["xgrammar", "llguidance"]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`source`: for llguidance its grammar (Lark text or the JSON list of grammars), for xgrammar a structural tag as JSON.

    `fast_forward` lets the engine append tokens that must follow. `close` makes it end the document within the last
    tokens instead of truncating it.
    """

    backend: Backend
    source: str
    fast_forward: bool = True
    close: bool = False


def encode_spec(spec: GrammarSpec) -> bytes:
    """The bytes of `EngineRequest.grammar`."""
    return msgspec.msgpack.encode(spec)


def decode_spec(data: bytes) -> GrammarSpec:
    """Raises `msgspec.DecodeError` on anything else."""
    return msgspec.msgpack.decode(data, type=GrammarSpec)
