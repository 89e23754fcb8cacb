"""Emits a grammar tree as Lark text for llguidance.

Invariant: a tenant's text stands only inside a quoted string, an escaped regular expression or a JSON object, so it
cannot become syntax.
"""

import json
from itertools import count, groupby
from typing import Any

from loraplex.grammar.backends.json_lexemes import json_lexemes, needs_lexemes, unfinished, with_prefix
from loraplex.grammar.backends.prefix import after_prefix, begins_with_token
from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_escapes import has_escapes
from loraplex.grammar.tree import (
    Alternation,
    Concatenation,
    FreeText,
    JsonValue,
    Literal,
    Node,
    Pattern,
    Separated,
    SpecialToken,
    Triggered,
)

CONTROL_TOKENS = "// control tokens: "
"""The start of a source's last line; a JSON list follows with the texts of the rules `control_token_<index>`."""

MAX_BLANKS = 32
"""Blanks after a line break: 16 levels of indentation. Elsewhere one, so a model cannot fill its output with blank lines."""

WRITTEN_ESCAPES = 'nrbtf\\"'
"""`json_escapes.py` decides where `u` is one of them."""

ANY_TEXT = "/(?s:.*)/"


def emit(node: Node) -> str:
    """Emit the source. Raises `GrammarInvalid` for text that is not Unicode or a part without its trigger at the
    start.
    """
    return _Emitter(needs_lexemes(node)).source(node)


def lark_source(text: str) -> str:
    """Return a tenant's own grammar, without generated control-token rules."""
    return f"{text}\n{CONTROL_TOKENS}[]"


class _Emitter:
    """Collects rules. Regular parts become one terminal each, since the lexer takes the longest match."""

    def __init__(self, by_lexemes: bool) -> None:
        self._by_lexemes = by_lexemes
        self._lines: list[str] = []
        self._control_tokens: list[str] = []
        self._numbers = count()

    def source(self, node: Node) -> str:
        start = self._rule(node)
        return "\n".join((f"start: {start}", *self._lines, CONTROL_TOKENS + json.dumps(self._control_tokens)))

    def _rule(self, node: Node) -> str:
        """Return an expression for the right side of a rule."""
        text = _literal_text(node) if self._by_lexemes else ""
        if text:
            return " ".join(map(quoted, json_lexemes(text)))
        if is_regular(node):
            return self._terminal(_terminal_of(node))
        match node:
            case JsonValue(schema, whitespace):
                return f"%json {_json_of(schema, whitespace)}"
            case SpecialToken(text):
                return self._control_token(text)
            case Concatenation(parts):
                merged = _merged(parts)
                return " ".join(map(self._named, _handed_on(merged) if self._by_lexemes else merged))
            case Alternation(parts):
                return " | ".join(self._named(part) for part in parts)
            case Separated(part, separator, least, most):
                return _repeated(self._named(part), separator, least, most)
            case Triggered(trigger, part, most, ends):
                return self._triggered(trigger, part, most, ends)
        raise TypeError(f"not a node of the tree: {node!r}")

    def _named(self, node: Node) -> str:
        """Return the name of a rule or terminal for `node`."""
        expression = self._rule(node)
        return expression if expression.isidentifier() else self._add("rule_{}", expression)

    def _terminal(self, expression: str) -> str:
        return self._add("TERMINAL_{}", expression)

    def _add(self, name: str, expression: str, attributes: str = "") -> str:
        name = name.format(next(self._numbers))
        self._lines.append(f"{name}{attributes}: {expression}")
        return name

    def _control_token(self, text: str) -> str:
        if text not in self._control_tokens:
            self._control_tokens.append(text)
        return f"control_token_{self._control_tokens.index(text)}"

    def _triggered(self, trigger: str, part: Node, most: int | None, ends: bool) -> str:
        text = self._terminal(_terminal_of(FreeText((trigger,))))
        if begins_with_token(part):
            head = f"{text} {self._control_token(trigger)}"
        else:
            head = self._add("head_{}", f"{ANY_TEXT} {quoted(trigger)}", "[lazy]")
        rest = self._named(after_prefix(part, trigger))
        if ends:
            return f"{head} {rest} | {text}" if most != 0 else text
        return f"({head} {rest}){_times(0, most)} {text}" if most != 0 else text


def is_regular(node: Node) -> bool:
    """Return whether the texts of `node` are a regular language that one terminal can express."""
    match node:
        case Literal() | Pattern() | FreeText():
            return True
        case Concatenation(parts) | Alternation(parts):
            return all(map(is_regular, parts))
        case Separated(part):
            return is_regular(part)
    return False


def quoted(text: str) -> str:
    """Return a string literal of the grammar syntax, which is that of JSON without control characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarInvalid("a text holds half of a surrogate pair") from error
    return json.dumps(text).replace("\x7f", "\\u007f")


def delimited(regex: str) -> str:
    """Return a regular expression between slashes."""
    if not regex:
        return '""'
    parts: list[str] = []
    letters = iter(regex)
    for letter in letters:
        if letter == "\\":
            escaped = next(letters, None)
            if escaped is None:
                raise GrammarInvalid("the regular expression ends in a backslash")
            parts.append("\\n" if escaped == "\n" else letter + escaped)
        else:
            parts.append({"/": r"\/", "\n": r"\n"}.get(letter, letter))
    return f"/{''.join(parts)}/"


def _merged(parts: tuple[Node, ...]) -> list[Node]:
    """Merge adjacent regular parts into one."""
    merged: list[Node] = []
    for regular, neighbours in groupby(parts, is_regular):
        group = tuple(neighbours)
        merged.extend([Concatenation(group)] if regular else group)
    return merged


def _literal_text(node: Node) -> str:
    """Return the text of a node of literals only, else an empty text."""
    match node:
        case Literal(text):
            return text
        case Concatenation(parts):
            texts = [_literal_text(part) for part in parts]
            return "".join(texts) if all(texts) else ""
    return ""


def _handed_on(parts: list[Node]) -> list[Node]:
    """Move a string that a literal begins to the part that ends it."""
    handed: list[Node] = []
    begun = ""
    for index, part in enumerate(parts):
        part = with_prefix(part, begun) if begun else part
        text = _literal_text(part)
        begun = unfinished(text) if text and index + 1 < len(parts) else ""
        rest = text.removesuffix(begun)
        handed.extend([Literal(rest)] if text and rest else [] if text else [part])
    return handed


def _terminal_of(node: Node) -> str:
    match node:
        case Literal(text):
            return quoted(text)
        case Pattern(regex):
            return delimited(regex)
        case FreeText(without):
            return " & ".join([ANY_TEXT, *(f"~({ANY_TEXT} {quoted(text)} {ANY_TEXT})" for text in without)])
        case Concatenation(parts):
            return " ".join(f"({_terminal_of(part)})" for part in parts) or '""'
        case Alternation(parts):
            return " | ".join(f"({_terminal_of(part)})" for part in parts)
        case Separated(part, separator, least, most):
            return _repeated(f"({_terminal_of(part)})", separator, least, most)
    raise TypeError(f"not regular: {node!r}")


def _repeated(part: str, separator: str, least: int, most: int | None) -> str:
    if most == 0:
        return '""'
    if not separator or most == 1:
        return f"{part}{_times(least, most)}"
    more = _times(max(least - 1, 0), None if most is None else most - 1)
    whole = f"{part} ({quoted(separator)} {part}){more}"
    return whole if least else f"({whole})?"


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _json_of(schema: JsonSchemaValue, whitespace: str) -> str:
    """Return the schema with the required options, whatever a tenant wrote in their place."""
    escapes = has_escapes(schema)
    options: dict[str, Any] = {
        "coerce_one_of": False,
        "json_allow_general_unicode_escapes": escapes,
        "json_allowed_escapes": WRITTEN_ESCAPES + ("u" if escapes else ""),
        "lenient": False,
        "whitespace_flexible": False,
    }
    if whitespace == "flexible":
        options["whitespace_pattern"] = rf"\x20|\r?\n[\x20\x09]{{0,{MAX_BLANKS}}}"
    elif whitespace == "spaced":
        options |= {"item_separator": ", ", "key_separator": ": "}
    whole = {"not": {}} if schema is False else {} if schema is True else schema
    return json.dumps({**whole, "x-guidance": options}, allow_nan=False)
