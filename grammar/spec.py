"""`GrammarSpec`: the grammar that a gateway sends to an engine.

Invariant: it names its backend and contains that backend's source text, so the engine compiles exactly what was
checked.
"""

from typing import Final, Literal, TypeAlias

import msgspec

Backend: TypeAlias = Literal["xgrammar", "llguidance"]


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """The thought before the answer: at most `most` tokens between `start` and `end`, None without a bound.

    `begun`: the prompt ends inside it; else the output may begin with `start`, or with the answer.
    """

    start: str
    end: str
    most: int | None = None
    begun: bool = False


class HeldInput(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a custom tool: a text that matches the Lark grammar, written as the JSON string behind `head`."""

    head: str
    source: str


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A backend and its source. Without a source the answer is any text.

    `source`: for llguidance its grammar (Lark text or the JSON list of grammars), for xgrammar a structural tag as
    JSON.

    `fast_forward` lets the engine append tokens that must follow. `close` makes it end the document within the last
    tokens instead of truncating it.

    `thought` comes before the answer. `inputs`: strings in the answer that have grammars of their own.
    """

    backend: Backend
    source: str
    fast_forward: bool = True
    close: bool = False
    thought: Thought | None = None
    inputs: tuple[HeldInput, ...] = ()


ANY_TEXT: Final = GrammarSpec(backend="llguidance", source="")


def encode_spec(spec: GrammarSpec) -> bytes:
    """Return the bytes of `EngineRequest.grammar`."""
    return msgspec.msgpack.encode(spec)


def decode_spec(data: bytes) -> GrammarSpec:
    """Parse the bytes of `encode_spec`. Raises `msgspec.DecodeError`."""
    return msgspec.msgpack.decode(data, type=GrammarSpec)
