"""Translations match what ECMA-262 matches, by hand and against Python's engine; what differs has no translation."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.grammar.grammar_walks import Walks

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.pattern import translate


@pytest.fixture(scope="module")
def walks() -> Walks:
    return Walks(byte_vocabulary())


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("^a|b$", ["a", "ax", "xb"], ["xa", "bx"]),
        ("^(?:a|b)$", ["a", "b"], ["ab", ""]),
        ("(^a|b$)", ["ax", "xb"], ["xa"]),
        ("^.$", ["a", "\x85", "\u2027"], ["", "\n", "\r", "\u2028", "\u2029", "ab"]),
        (r"^\d\D\w\W$", ["1aa-", "1a_é"], ["٣aa-", "11a-", "1aé-"]),
        (r"^\s\S$", ["\ufeffa", "\u2028\x85", "\u3000b"], ["\x85a", "aa"]),
        (r"^[^\s\d]$", ["a"], [" ", "1"]),
        (r"^[\w.-]+@[a-c]{2,3}?$", ["a.b-c@abc"], ["@ab", "a@abcd"]),
        (r"^\u0041\x42\cJ\t\/\-$", ["AB\n\t/-"], ["ab"]),
        (r"^\u{1F600}\uD83D\uDE00$", ["😀😀"], ["😀"]),
        (r"^(?<year>[0-9]{4})-(?:[0-9]{2})$", ["2024-01"], ["2024-1"]),
        (r"^[\]\\^&&\[~~]$", ["]", "\\", "^", "&", "[", "~"], ["a", "--"]),
        (r"^[a-]$", ["a", "-"], ["b"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\p{Lu}\P{L}$", ["É1"], ["é1", "ÉA"]),
        ("^[^]$", ["\n", "a"], ["", "ab"]),
        ("", ["", "x"], []),
        ("^$", [""], ["x"]),
        ("a||b", ["", "x"], []),
    ],
)
def test_translations(walks: Walks, pattern: str, matching: list[str], others: list[str]) -> None:
    found = translate(pattern)
    assert found is not None
    start = walks.start({"type": "string", "pattern": found.source}, "llguidance")
    assert [text for text in matching if not walks.accepts(start, _quoted(text))] == []
    assert [text for text in others if walks.accepts(start, _quoted(text))] == []


def _quoted(text: str) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f", "\\": "\\\\", '"': '\\"'}
    return '"' + "".join(short.get(letter, letter) for letter in text) + '"'


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "(?!a)", "(?<=a)", "(?<!a)", r"\bfoo", r"\B", r"(a)\1", r"(?<n>a)\k<n>"),
        *(
            "a^",
            "$a",
            "(^a)b",
            "a(b$)",
            "^*",
            "(?:^a)*",
            "(",
            ")",
            "a)",
            "[a",
            "[]",
            "a**",
            "a{2,1}",
            "a{,3}",
        ),
        *("{", "}", "]", r"\p{Script=Greek}", r"\u{110000}", r"\uD800", r"\8", r"\a", r"\_", "\\", "(?i)a"),
        *("[z-a]", r"[\d-z]", "a{1e3}", "((((" * 20 + "a" + "))))" * 20, r"\01", "(?#x)"),
    ],
)
def test_no_translation(pattern: str) -> None:
    assert translate(pattern) is None


def test_prefixes() -> None:
    prefixes = {
        "^abc": "abc",
        "^ab*": "a",
        "^a|b": "",
        "abc": "",
        r"^x-\d": "x-",
        "^": "",
        "^a$": "a",
        "^(a)b": "",
    }
    for pattern, prefix in prefixes.items():
        found = translate(pattern)
        assert found is not None and found.prefix == prefix


ATOMS = st.sampled_from(["a", "b", "-", r"\d", "[ab]", "[^a]", r"[a-c\-]", "(?:a|bc)", "(b|)", r"\.", "x"])
PIECES = st.tuples(ATOMS, st.sampled_from(["", "*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])).map("".join)
BRANCHES = st.tuples(
    st.sampled_from(["", "^"]), st.lists(PIECES, max_size=4).map("".join), st.sampled_from(["", "$"])
).map("".join)
PATTERNS = st.lists(BRANCHES, min_size=1, max_size=3).map("|".join)


@given(PATTERNS, st.text("abcx-.1", max_size=6))
def test_a_translation_is_the_pattern_as_another_engine_reads_it(pattern: str, text: str) -> None:
    found = translate(pattern)
    assert found is not None
    spelled = re.sub(r"\\u\{([0-9A-F]+)\}", lambda code: re.escape(chr(int(code[1], 16))), found.source)
    assert bool(re.search(spelled, text)) == bool(re.search(pattern, text))
    if re.search(pattern, text):
        assert text.startswith(found.prefix)


@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(pattern: str) -> None:
    translate(pattern)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8))
def test_literals(text: str) -> None:
    spelled = "".join(f"\\u{{{ord(character):X}}}" for character in text)
    found = translate(f"^{spelled}$")
    assert found is not None and found.prefix == text


def test_a_pattern_without_translation_is_no_pattern_of_the_backend(walks: Walks) -> None:
    with pytest.raises(GrammarInvalid):
        walks.start({"pattern": "(?=a)"}, "llguidance")
