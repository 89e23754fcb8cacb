"""The backend-independent grammar AST; each backend has an emitter for it.

Invariant: every text that a tree generates is a well-formed output, and every well-formed output is generated.
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
    """One control token of the tokenizer, given by its text, for instance `[TOOL_CALLS]`."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A JSON value of the schema. `whitespace` flexible allows the usual blanks, compact allows none.

    `spaced` writes one blank after every comma and colon and none elsewhere, as models learn their calls. The text
    between two values is then certain and need not be sampled.
    """

    schema: JsonSchemaValue
    whitespace: OneOfValues["flexible", "spaced", "compact"] = "flexible"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that matches a regular expression as a whole."""

    regex: str


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text, also the empty one, that contains none of `without`."""

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
    """`part` at least `least` and at most `most` times (None: unbounded), with `separator` (may be empty) between."""

    part: "Node"
    separator: str
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Triggered:
    """Free text; after each `trigger` in it a whole `part` follows, which begins with `trigger`.

    With `most` the text after that many parts cannot contain the trigger. `trigger` may be a control token's text.
    `ends`: the output ends with the first part, no text follows it.
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
