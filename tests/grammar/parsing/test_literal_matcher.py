"""Literals and markers in text that comes in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.parsing.literal_matcher import LiteralMatcher, MarkerFinder
from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of

MARKER = "<tool_call>"


@given(st.lists(st.sampled_from(["<", "<tool_", "call>", MARKER, " ", "\n", "a"]), max_size=12))
def test_finds_the_first_marker_and_drops_the_blanks_before_it(deltas: list[str]) -> None:
    text = "".join(deltas)
    finder = MarkerFinder(MARKER)
    passed, read = "", 0
    for delta in deltas:
        if finder.found:
            break
        content, position = finder.find(delta, 0)
        passed += content
        read += position
    before, marker, _ = text.partition(MARKER)
    assert finder.found == bool(marker)
    if marker:
        assert passed == before.rstrip(" \n") and read == len(before) + len(marker)
    else:
        assert passed + finder.flush() == text


def test_a_literal_follows_or_does_not() -> None:
    literal = LiteralMatcher("abc")
    assert literal.match("xab", 1) == 3 and not literal.complete and literal.matched_text == "ab"
    assert literal.match("d", 0) == 0 and not literal.complete
    assert literal.match("cd", 0) == 1 and literal.complete


@pytest.mark.parametrize("style", ToolStyle)
@pytest.mark.parametrize("beside_json", [False, True])
def test_the_markers_are_such_as_the_finder_needs(style: ToolStyle, beside_json: bool) -> None:
    syntax = syntax_of(style, beside_json=beside_json)
    if syntax.marker is not None:
        assert syntax.beginning.startswith(syntax.marker)
        assert syntax.marker.count(syntax.marker[0]) == 1 and not syntax.marker[0].isspace()
