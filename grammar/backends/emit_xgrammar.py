"""Emits a grammar tree as a structural tag for xgrammar, in JSON. Invariant: a tenant's text is only a JSON string or
a schema.

The format `open_json_schema` is loraplex's own: a schema as the standard reads it, with objects open unless closed;
the library closes every object. `xgrammar_mask.py` converts it to a format of the library.
"""

import json
from typing import Any, TypeAlias

from loraplex.grammar.backends.prefix import after_prefix, begins_with_token
from loraplex.grammar.errors import GrammarInvalid
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

Format: TypeAlias = dict[str, Any]

OPEN_JSON_SCHEMA = "open_json_schema"


def emit(node: Node) -> str:
    """Emit the source. Raises `GrammarInvalid` for text that is not Unicode or a part without its trigger at the
    start.
    """
    return _tag(_format_of(node))


def ebnf_source(text: str) -> str:
    """Return a tenant's own EBNF grammar, with rules written with `::=` and a first rule named `root`."""
    return _tag({"type": "grammar", "grammar": text})


def structural_tag_source(tag: dict[str, Any]) -> str:
    """Return a tenant's own structural tag: `{"type": "structural_tag", "format": …}`."""
    if tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise GrammarInvalid('a structural tag is {"type": "structural_tag", "format": {…}}')
    return _dumps(tag)


def _tag(content: Format) -> str:
    return _dumps({"type": "structural_tag", "format": content})


def _dumps(value: dict[str, Any]) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarInvalid("a text holds half of a surrogate pair") from error
    return text


def _format_of(node: Node) -> Format:
    match node:
        case Literal(text):
            return _text(text)
        case SpecialToken(text):
            return {"type": "token", "token": text}
        case JsonValue(schema, whitespace):
            return {"type": OPEN_JSON_SCHEMA, "json_schema": schema, "whitespace": whitespace}
        case Pattern(regex):
            return {"type": "regex", "pattern": regex} if regex else _text("")
        case FreeText(without):
            return _any_text(*without)
        case Concatenation(parts):
            return _sequence(*map(_format_of, parts)) if parts else _text("")
        case Alternation(parts):
            return {"type": "or", "elements": [_format_of(part) for part in parts]}
        case Separated(part, separator, least, most):
            return _separated(_format_of(part), separator, least, most)
        case Triggered(trigger, part, most, ends):
            by = _by_token if begins_with_token(part) else _by_text
            return by(trigger, _format_of(after_prefix(part, trigger)), most, ends)
    raise TypeError(f"not a node of the tree: {node!r}")


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _any_text(*without: str) -> Format:
    return {"type": "any_text", "excludes": list(without)}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _repeat(content: Format, least: int, most: int | None) -> Format:
    """Repeat `content`, written out if it has control tokens, which the library's own `repeat` loses."""
    if most is None:
        return _sequence(*[content] * least, {"type": "star", "content": content})
    if not _has_token(content):
        return {"type": "repeat", "min": least, "max": most, "content": content}
    more = _text("")
    for _ in range(most - least):
        more = {"type": "optional", "content": _sequence(content, more)}
    return _sequence(*[content] * least, more)


def _has_token(content: Format) -> bool:
    inner = (*content.get("elements", ()), *([content["content"]] if "content" in content else ()))
    return content["type"] == "token" or any(map(_has_token, inner))


def _separated(part: Format, separator: str, least: int, most: int | None) -> Format:
    if most == 0:
        return _text("")
    if not separator:
        return _repeat(part, least, most)
    more = _repeat(_sequence(_text(separator), part), max(least - 1, 0), None if most is None else most - 1)
    whole = _sequence(part, more) if most != 1 else part
    return whole if least else {"type": "optional", "content": whole}


def _by_token(trigger: str, rest: Format, most: int | None, ends: bool) -> Format:
    text = _any_text(trigger)
    if most == 0:
        return text
    if ends:
        call = _sequence(text, {"type": "token", "token": trigger}, rest)
        return {"type": "or", "elements": [call, text]}
    return _sequence(_repeat(_sequence(text, {"type": "token", "token": trigger}, rest), 0, most), text)


def _by_text(trigger: str, rest: Format, most: int | None, ends: bool) -> Format:
    """Nest the parts to bound them: the text after a part may contain one part less."""
    if ends and most != 0:
        return _dispatch(trigger, rest, loop=False)
    if most is None:
        return _dispatch(trigger, rest, loop=True)
    nest = _any_text(trigger)
    for _ in range(most):
        nest = _dispatch(trigger, _sequence(rest, nest), loop=False)
    return nest


def _dispatch(trigger: str, rest: Format, *, loop: bool) -> Format:
    return {"type": "dispatch", "rules": [[trigger, rest]], "loop": loop, "excludes": []}
