"""Translates ECMA-262 patterns (JSON Schema) to Rust regular expressions (the backend).

Invariant: a translation matches exactly what the original matches under the u flag, less U+0000 in some classes.
Look-around, back-references, word boundaries and anchors in the middle have no translation.
"""

import re
from dataclasses import dataclass
from typing import Final

_DIGIT: Final = "0-9"
_WORD: Final = "0-9A-Z_a-z"
_SPACE: Final = (
    r"\u{9}-\u{D}\u{20}\u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
)
_LINE_ENDS: Final = r"\u{A}\u{D}\u{2028}\u{2029}"
_ANY: Final = r"[\u{0}-\u{10FFFF}]"
_CATEGORIES: Final = frozenset(
    category
    for group in ("LLuLlLtLmLo", "MMnMcMe", "NNdNlNo", "PPcPdPsPePiPfPo", "SSmScSkSo", "ZZsZlZp")
    for category in re.findall("[A-Z][a-z]?", group)
)
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "v": "\v", "f": "\f", "0": "\0"}
_SYNTAX: Final = "^$\\.*+?()[]{}|/-"
_MAX_NESTING: Final = 40
_QUOTED: Final = frozenset('"\\')
_PROBED: Final = frozenset(("\0", "\x01", *_QUOTED))
"""llguidance adds an escaped quote and backslash to a class that has all of U+0000 to U+001F, with or without U+000A.

So a class with U+0001 that lacks one of the two loses U+0000.
"""
# Patterns of widespread clients with an equivalent without look-around: an address in zod 4.0.
_WITHOUT_LOOK_AROUND: Final = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}


class _NoTranslation(Exception):
    pass


@dataclass(frozen=True, slots=True)
class RustPattern:
    """`source` is searched for, not matched as a whole. `prefix`: every match begins with it, at the text's start."""

    source: str
    prefix: str


@dataclass(slots=True)
class _Alternative:
    """One alternative; `literal` is its text while it consists of characters only."""

    source: str = ""
    starts: bool = False
    ends: bool = False
    literal: str = ""
    is_literal: bool = True


def translate(pattern: str) -> RustPattern | None:
    """Return the exact translation; None if there is none or the pattern is invalid."""
    reader = _Reader(_WITHOUT_LOOK_AROUND.get(pattern, pattern))
    try:
        branches = reader.branches(0)
        # The library joins alternatives: one would give U+0000 to another that lost it.
        if reader.place != len(reader.pattern) or (reader.has_null and reader.lost_null):
            return None
    except _NoTranslation:
        return None
    source = "|".join(_anchored(branch) for branch in branches)
    only = branches[0]
    prefix = only.literal if len(branches) == 1 and only.starts else ""
    return RustPattern(source=source, prefix=prefix)


def _anchored(branch: _Alternative) -> str:
    return ("^" if branch.starts else "") + branch.source + ("$" if branch.ends else "")


def _code(character: str) -> str:
    return character if character.isalnum() and character.isascii() else f"\\u{{{ord(character):X}}}"


class _Reader:
    """A recursive-descent parser of one pattern, bounded in depth."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.place = 0
        self.has_null = False
        self.lost_null = False

    def peek(self) -> str:
        return self.pattern[self.place : self.place + 1]

    def take(self) -> str:
        character = self.peek()
        if not character:
            raise _NoTranslation
        self.place += 1
        return character

    def skip(self, text: str) -> bool:
        if not self.pattern.startswith(text, self.place):
            return False
        self.place += len(text)
        return True

    def branches(self, nesting: int) -> list[_Alternative]:
        if nesting > _MAX_NESTING:
            raise _NoTranslation
        found = list(self.branch(nesting))
        while self.skip("|"):
            found.extend(self.branch(nesting))
        return found

    def branch(self, nesting: int) -> list[_Alternative]:
        made = _Alternative()
        while (character := self.peek()) and character not in "|)":
            if made.ends:
                raise _NoTranslation
            if character == "^":
                self.place += 1
                if made.source or made.starts:
                    raise _NoTranslation
                made.starts = True
            elif character == "$":
                self.place += 1
                made.ends = True
            elif character == "(":
                alone = self.group(made, nesting)
                if alone is not None:
                    return alone
            else:
                self.term(made)
        return [made]

    def group(self, made: _Alternative, nesting: int) -> list[_Alternative] | None:
        """Append the group; if it contains anchors and is its whole branch, return its branches instead."""
        self.open_group()
        inner = self.branches(nesting + 1)
        if not self.skip(")"):
            raise _NoTranslation
        if any(branch.starts or branch.ends for branch in inner):
            if made.source or made.starts or (self.peek() and self.peek() not in "|)"):
                raise _NoTranslation
            return inner
        made.source += "(?:" + "|".join(branch.source for branch in inner) + ")" + self.quantifier()
        made.is_literal = False
        return None

    def open_group(self) -> None:
        self.take()
        if not self.skip("?"):
            return
        if self.skip(":"):
            return
        if not self.skip("<") or self.peek() in "=!":
            raise _NoTranslation
        while (character := self.take()) != ">":
            if not (character.isalnum() or character in "_$"):
                raise _NoTranslation

    def term(self, made: _Alternative) -> None:
        character = self.take()
        literal: str | None = None
        if character == ".":
            source = f"[^{_LINE_ENDS}]"
        elif character == "[":
            source = self.character_class()
        elif character == "\\":
            literal, source = self.escape()
        elif character in "*+?{}]":
            raise _NoTranslation
        else:
            literal, source = character, _code(character)
        self.has_null |= literal == "\0"
        self.lost_null |= literal == "\x01"
        repeated = self.quantifier()
        made.source += source + repeated
        made.is_literal = made.is_literal and literal is not None and not repeated
        if made.is_literal and literal is not None:
            made.literal += literal

    def quantifier(self) -> str:
        found = ""
        if self.peek() and self.peek() in "*+?":
            found = self.take()
        elif self.skip("{"):
            found = self.braces()
        if found and self.peek() == "?":
            # Laziness does not change which texts match.
            self.take()
        if found and self.peek() and self.peek() in "*+?{":
            raise _NoTranslation
        return found

    def braces(self) -> str:
        end = self.pattern.find("}", self.place)
        inside = self.pattern[self.place : end] if end >= 0 else ""
        least, comma, most = inside.partition(",")
        if not _is_count(least) or (most and not _is_count(most)) or (most and int(most) < int(least)):
            raise _NoTranslation
        self.place = end + 1
        return "{" + least + comma + most + "}"

    def escape(self) -> tuple[str | None, str]:
        """Read an escape outside of a class: the character that it means, if it is one, and its translation."""
        if self.peek() and self.peek() in "bB123456789k":
            raise _NoTranslation
        members, negated, character = self.escaped()
        if character is not None:
            return character, _code(character)
        return None, self._class(members, negated, _probed(members))

    def _class(self, members: str, negated: bool, held: frozenset[str]) -> str:
        """Return the class of `members`, which hold the probed characters `held`."""
        held = _PROBED - held if negated else held
        self.has_null |= "\0" in held and "\x01" not in held and not _QUOTED <= held
        if _QUOTED <= held or "\x01" not in held:
            return f"[{'^' if negated else ''}{members}]"
        self.lost_null = True
        return rf"[^{members}\u{{0}}]" if negated else rf"[[{members}]&&[^\u{{0}}]]"

    def escaped(self) -> tuple[str, bool, str | None]:
        """Return the members of a class escape and whether they are negated, or one character."""
        letter = self.take()
        classes = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
        if letter.lower() in classes:
            return classes[letter.lower()], letter.isupper(), None
        if letter in "pP":
            return self.category(), letter == "P", None
        if letter in _CONTROLS:
            if letter == "0" and self.peek().isdigit():
                raise _NoTranslation
            return "", False, _CONTROLS[letter]
        if letter == "c" and self.peek().isascii() and self.peek().isalpha():
            return "", False, chr(ord(self.take()) % 32)
        if letter == "x":
            return "", False, chr(self.hexadecimal(2))
        if letter == "u":
            return "", False, self.unicode_escape()
        if letter in _SYNTAX:
            return "", False, letter
        raise _NoTranslation

    def category(self) -> str:
        if not self.skip("{"):
            raise _NoTranslation
        name = ""
        while (character := self.take()) != "}":
            name += character
        if name not in _CATEGORIES:
            raise _NoTranslation
        return f"\\p{{{name}}}"

    def hexadecimal(self, digits: int) -> int:
        text = self.pattern[self.place : self.place + digits]
        if len(text) != digits or any(digit not in "0123456789abcdefABCDEF" for digit in text):
            raise _NoTranslation
        self.place += digits
        return int(text, 16)

    def unicode_escape(self) -> str:
        if self.skip("{"):
            end = self.pattern.find("}", self.place)
            if not 1 <= end - self.place <= 6:
                raise _NoTranslation
            code = self.hexadecimal(end - self.place)
            self.place += 1
        else:
            code = self.hexadecimal(4)
            if 0xD800 <= code < 0xDC00 and self.skip("\\u"):
                low = self.hexadecimal(4)
                if not 0xDC00 <= low < 0xE000:
                    raise _NoTranslation
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise _NoTranslation
        return chr(code)

    def character_class(self) -> str:
        negated = self.skip("^")
        members, held = "", frozenset[str]()
        while not self.skip("]"):
            first = last = self.class_member()
            if self.peek() == "-" and self.pattern[self.place + 1 : self.place + 2] not in ("]", ""):
                self.place += 1
                last = self.class_member()
                if len(first) != 1 or len(last) != 1 or first > last:
                    raise _NoTranslation
            if len(first) == 1:
                members += _code(first) if first == last else f"{_code(first)}-{_code(last)}"
                held |= {each for each in _PROBED if first <= each <= last}
            else:
                members += first
                held |= _probed(first)
        if not members:
            if negated:
                return _ANY
            raise _NoTranslation
        return self._class(members, negated, held)

    def class_member(self) -> str:
        """Return one character, or the members of a class escape (always longer)."""
        character = self.take()
        if character != "\\":
            return character
        if self.skip("b"):
            return "\b"
        members, negated, single = self.escaped()
        if single is not None:
            return single
        return f"[^{members}]" if negated else members


def _probed(members: str) -> frozenset[str]:
    """Return the probed characters in the translation of a class escape."""
    if members.startswith("[^"):
        return _PROBED - _probed(members[2:-1])
    return _QUOTED if members in (r"\p{P}", r"\p{Po}") else frozenset()


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
