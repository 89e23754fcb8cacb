"""The one language in which answers are composed, before a backend is chosen; each backend has an emitter for it.

Invariant: a tree says everything: whatever text it generates is a well-formed answer, and nothing else is.
"""

from dataclasses import dataclass
from typing import Literal as OneOfValues
from typing import TypeAlias

from loraplex.grammar.constraints import JsonSchemaValue


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text, not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One control token of the tokenizer by its text, for instance `[TOOL_CALLS]`."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A JSON value of the schema. `whitespace` flexible allows the usual blanks, compact none.

    spaced writes one blank behind every comma and colon and none elsewhere, as models learn their calls: what stands
    between two values is then certain, and need not be sampled.
    """

    schema: JsonSchemaValue
    whitespace: OneOfValues["flexible", "spaced", "compact"] = "flexible"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that matches a regular expression as a whole."""

    regex: str


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text, also none, in which none of `without` occurs."""

    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Concatenation:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of the parts, at least one."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Separated:
    """`part` at least `least` times and at most `most` (None: any number), `separator` (may be empty) between."""

    part: "Node"
    separator: str
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Triggered:
    """Free text; each time `trigger` has been written, a whole `part` follows, which begins with `trigger`.

    With `most` the text after that many parts cannot hold the trigger. `trigger` may be a control token's text.
    `ends`: the answer ends with the first part, no text follows it.
    """

    trigger: str
    part: "Node"
    most: int | None = None
    ends: bool = False


Node: TypeAlias = (
    Literal
    | SpecialToken
    | JsonValue
    | Pattern
    | FreeText
    | Concatenation
    | Alternation
    | Separated
    | Triggered
)
