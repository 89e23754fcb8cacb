"""Literals cut as a lexer of JSON would cut them. Where one alternative is a JSON value and another a literal that looks
like one, the longest match would otherwise decide for the literal. Invariant: the pieces joined are the literal.
"""

import re
from collections.abc import Iterator

from loraplex.grammar.tree import Alternation, Concatenation, JsonValue, Literal, Node, Separated, Triggered

LEXEME = re.compile(
    r'"(?:[^"\\]|\\.)*"|"(?:[^"\\]|\\.)*\\?\Z|[{}\[\]:,]|[ \t\n\r]+|[^"{}\[\]:,\s]+|.', re.DOTALL
)

WHOLE_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def json_lexemes(text: str) -> list[str]:
    """The last one may be the beginning of a string."""
    return LEXEME.findall(text)


def needs_lexemes(node: Node) -> bool:
    """Whether a literal somewhere competes with a JSON value for the same beginning."""
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
    """The string that `text` begins and does not end, or nothing."""
    last = json_lexemes(text)[-1]
    return last if last.startswith('"') and not WHOLE_STRING.fullmatch(last) else ""


def with_prefix(node: Node, prefix: str) -> Node:
    """`prefix`, then `node`, with as few literals as can be."""
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
