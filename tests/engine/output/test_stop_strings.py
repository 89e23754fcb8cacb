"""Stop strings against a naive scan of the whole text, for any cut of it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.output.stop_strings import StopMatcher, StopStrings, ThoughtPassage

TEXTS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str], include: bool, may_stop_from: int = 0) -> tuple[str, str | None]:
    for end in range(may_stop_from + 1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(TEXTS, STOPS, st.lists(st.integers(0, 100)), st.booleans())
def test_equals_a_naive_scan_however_the_text_is_cut(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include)
    shown, found = "", None
    for chunk in cut(text, places):
        fresh, found = matcher.push(chunk)
        shown += fresh
        if found is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, found) == naive(text, stops, include)


@given(TEXTS, STOPS)
def test_holds_back_exactly_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    """No part of a possible stop is sent, and no text that cannot begin a stop is withheld."""
    matcher = StopMatcher(StopStrings(stops))
    shown, _ = matcher.push(text, may_stop=False)
    suffixes = [text[i:] for i in range(len(text) + 1)]
    longest = next(s for s in suffixes if any(stop.startswith(s) and s != stop for stop in stops))
    assert shown == text[: len(text) - len(longest)]
    assert matcher.flush() == longest


@given(TEXTS, TEXTS, STOPS, st.booleans())
def test_a_stop_completed_too_early_is_text_and_one_across_the_border_counts(
    early: str, late: str, stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include)
    before, nothing = matcher.push(early, may_stop=False)
    after, found = matcher.push(late)
    shown = before + after + (matcher.flush() if found is None else "")
    expected, stop = naive(early + late, stops, include, may_stop_from=len(early))
    assert nothing is None
    assert (shown, found) == (expected, stop)


@given(
    st.sampled_from(["", "<t>", "<", "<t", "a<t>"]),
    TEXTS,
    TEXTS,
    STOPS,
    st.lists(st.integers(0, 100)),
    st.booleans(),
)
def test_stops_count_behind_a_thought(
    opening: str, thought: str, answer: str, stops: list[str], places: list[int], has_begun: bool
) -> None:
    text = f"{opening}{thought}</t>{answer}"
    if has_begun or text.startswith("<t>"):
        behind = text.index("</t>") + len("</t>")
    else:
        behind = 0
    stops = [*stops, "</t>", "<t>"]
    matcher = StopMatcher(StopStrings(stops), thought=ThoughtPassage("" if has_begun else "<t>", "</t>"))
    shown, found = "", None
    for chunk in cut(text, places):
        fresh, found = matcher.push(chunk)
        shown += fresh
        if found is not None:
            break
    else:
        shown += matcher.flush()
    expected, stop = naive(text[behind:], stops, include=False)
    assert (shown, found) == (text[:behind] + expected, stop)


def test_the_longest_of_the_stops_completed_together_wins() -> None:
    assert StopMatcher(StopStrings(["c", "abc", "bc"])).push("xabcd") == ("x", "abc")


def test_a_long_stop_string_over_a_long_text_is_linear() -> None:
    stop = "a" * 5000 + "b"
    matcher = StopMatcher(StopStrings([stop]))
    shown, found = matcher.push("a" * 100_000)
    assert (len(shown), found) == (95_000, None)
    assert matcher.push("b") == ("", stop)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
