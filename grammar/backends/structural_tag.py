"""Reads a structural tag before xgrammar does: finds its control tokens and converts `open_json_schema`.

Invariant: only places of formats are walked, so nothing inside a tenant's schema is taken for one.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from xgrammar import Grammar

from loraplex.grammar.backends.emit_llguidance import MAX_BLANKS
from loraplex.grammar.backends.emit_xgrammar import OPEN_JSON_SCHEMA
from loraplex.grammar.errors import GrammarInvalid

Format: TypeAlias = dict[str, Any]

BLANK_AFTER_COMMA = re.compile(r'^(basic_(?:array_items|object_properties) ::= \(\()", "', re.MULTILINE)
"""The library ignores the requested separator inside values without a schema."""


def read_structural_tag(source: str) -> Format:
    """Parse the whole tag. Raises `GrammarInvalid` when `source` is no JSON object with a format."""
    try:
        tag = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarInvalid("the structural tag is not JSON") from error
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise GrammarInvalid("the structural tag has no format")
    return tag


def formats_of(content: Format) -> Iterator[Format]:
    """Yield `content` and every format inside it."""
    yield content
    for inner in _inner(content):
        yield from formats_of(inner)


def named_tokens(content: Format) -> Iterator[str | int]:
    """Yield the tokens that a format allows by name."""
    for each in formats_of(content):
        if each.get("type") == "token":
            yield each.get("token", "")
        yield from each.get("trigger_tokens", ())
        if each.get("type") == "token_dispatch":
            yield from (token for token, _ in each.get("rules", ()))


def may_force_without_end(content: Format) -> bool:
    """Return whether the certain text may be endless or huge: `root ::= "a" root`, or a large repetition."""
    return any(
        each.get("type") == "grammar"
        or (each.get("type") == "regex" and "{" in str(each.get("pattern")))
        or (each.get("type") == "repeat" and each.get("min") not in (None, 0, 1))
        for each in formats_of(content)
    )


def lowered(content: Format) -> Format:
    """Return a copy with each `open_json_schema` as a grammar of the library."""
    if content.get("type") == OPEN_JSON_SCHEMA:
        return {"type": "grammar", "grammar": _ebnf(content["json_schema"], content["whitespace"])}
    copy = dict(content)
    for key in ("elements", "tags"):
        if isinstance(copy.get(key), list):
            copy[key] = [_lowered_or_same(each) for each in copy[key]]
    for key in ("content", "begin", "end"):
        copy.update({key: lowered(copy[key])} if isinstance(copy.get(key), dict) else {})
    if isinstance(copy.get("rules"), list):
        copy["rules"] = [[*rule[:-1], _lowered_or_same(rule[-1])] for rule in copy["rules"] if rule]
    return copy


def _lowered_or_same(value: Any) -> Any:
    return lowered(value) if isinstance(value, dict) else value


def _inner(content: Format) -> Iterator[Format]:
    values = [content.get(key) for key in ("content", "begin", "end")]
    for key in ("elements", "tags"):
        values.extend(content.get(key) or ())
    values.extend(rule[-1] for rule in content.get("rules") or () if rule)
    yield from (value for value in values if isinstance(value, dict))


def _ebnf(schema: Any, whitespace: str) -> str:
    text = json.dumps(schema)
    if whitespace == "flexible":
        return str(Grammar.from_json_schema(text, strict_mode=False, max_whitespace_cnt=MAX_BLANKS))
    if whitespace == "spaced":
        return str(Grammar.from_json_schema(text, any_whitespace=False, strict_mode=False))
    compact = Grammar.from_json_schema(text, any_whitespace=False, separators=(",", ":"), strict_mode=False)
    return BLANK_AFTER_COMMA.sub(r'\1","', str(compact))
