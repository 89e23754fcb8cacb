"""Splits literals as a JSON lexer would.

A literal that looks like a JSON value would otherwise win against that value by longest match. Invariant: the joined
parts are the literal.
"""

import re
from collections.abc import Iterator

from loraplex.grammar.tree import Alternation, Concatenation, JsonValue, Literal, Node, Separated, Triggered

LEXEME = re.compile(
    r'"(?:[^"\\]|\\.)*"|"(?:[^"\\]|\\.)*\\?\Z|[{}\[\]:,]|[ \t\n\r]+|[^"{}\[\]:,\s]+|.', re.DOTALL
)

WHOLE_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def json_lexemes(text: str) -> list[str]:
    """Split the literal; the last part may be the start of a string."""
    return LEXEME.findall(text)


def needs_lexemes(node: Node) -> bool:
    """Return whether a literal competes with a JSON value for the same start."""
    match node:
        case Alternation(parts):
            firsts = [first for part in parts for first in _first_leaves(part)]
            literal = any(isinstance(first, Literal) and first.text[0] in '{["' for first in firsts)
            return (
                literal
                and any(isinstance(first, JsonValue) for first in firsts)
                or any(map(needs_lexemes, parts))
            )
        case Concatenation(parts):
            return any(map(needs_lexemes, parts))
        case Separated(part) | Triggered(_, part):
            return needs_lexemes(part)
    return False


def unfinished(text: str) -> str:
    """Return the unterminated string at the end of `text`, or an empty text."""
    last = json_lexemes(text)[-1]
    return last if last.startswith('"') and not WHOLE_STRING.fullmatch(last) else ""


def with_prefix(node: Node, prefix: str) -> Node:
    """Return `prefix` followed by `node`, with as few literals as possible."""
    match node:
        case Literal(text):
            return Literal(prefix + text)
        case Concatenation((first, *rest)):
            return Concatenation((with_prefix(first, prefix), *rest))
        case Alternation(parts):
            return Alternation(tuple(with_prefix(part, prefix) for part in parts))
    return Concatenation((Literal(prefix), node))


def _first_leaves(node: Node) -> Iterator[Node]:
    match node:
        case Concatenation((first, *_)) | Separated(first):
            yield from _first_leaves(first)
        case Alternation(parts):
            for part in parts:
                yield from _first_leaves(part)
        case _:
            yield node
