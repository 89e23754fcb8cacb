"""Removes a text or control token from the start of a tree. Invariant: trigger + rest = whole."""

from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.tree import Alternation, Concatenation, Literal, Node, Separated, SpecialToken

NOTHING = Concatenation(())


def after_prefix(node: Node, prefix: str) -> Node:
    """Raises `GrammarInvalid` unless every text of `node` begins with `prefix`."""
    match node:
        case Literal(text) if text.startswith(prefix):
            return Literal(text[len(prefix) :]) if text != prefix else NOTHING
        case SpecialToken(text) if text == prefix:
            return NOTHING
        case Concatenation((Literal(text), *rest)) if prefix.startswith(text) and text != prefix:
            return after_prefix(Concatenation(tuple(rest)), prefix[len(text) :])
        case Concatenation((first, *rest)):
            return Concatenation((after_prefix(first, prefix), *rest))
        case Alternation(parts):
            return Alternation(tuple(after_prefix(part, prefix) for part in parts))
        case Separated(part, separator, least, most) if least >= 1:
            return Concatenation((after_prefix(part, prefix), _more(part, separator, least - 1, most)))
    raise GrammarInvalid(f"a part that is triggered by {prefix!r} must begin with it")


def begins_with_token(node: Node) -> bool:
    """Return whether `node` begins with a control token."""
    match node:
        case SpecialToken():
            return True
        case Concatenation((first, *_)):
            return begins_with_token(first)
        case Alternation(parts):
            return all(map(begins_with_token, parts))
        case Separated(part):
            return begins_with_token(part)
    return False


def _more(part: Node, separator: str, least: int, most: int | None) -> Node:
    """Return the parts after the first, each after a separator."""
    if most == 1:
        return NOTHING
    each = Concatenation((Literal(separator), part)) if separator else part
    return Separated(each, "", least, None if most is None else most - 1)
