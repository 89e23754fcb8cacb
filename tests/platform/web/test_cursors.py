"""Keyset pages: no row is lost or repeated under insertions and deletions, and no cursor can be forged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.platform.web.hand_made_requests import request

from loraplex.platform.errors import InvalidParameter, UnknownParameter
from loraplex.platform.web.cursors import Cursors, Page, page_of
from loraplex.platform.web.sorting import SortOrder, by_number
from loraplex.platform.web.usage.usage_report import BY_GROUP
from loraplex.tenants.models import NO_ID

CURSORS = Cursors(b"k" * 32, b"tenant /things")
BY_NUMBER: SortOrder[int, int] = by_number(lambda row: row)


def page(query: str = "", cursors: Cursors = CURSORS) -> Page[int, int]:
    return page_of(request(query=query), cursors, BY_NUMBER, ("colour",))


def rows_of(asked: Page[int, int], stored: set[int]) -> list[int]:
    """What a repository reads: behind `after`, `fetch` at most."""
    after = -1 if asked.after is None else asked.after
    return sorted(row for row in stored if row > after)[: asked.fetch]


@given(
    st.sets(st.integers(0, 60)),
    st.integers(1, 7),
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 60), max_size=5)), max_size=70),
)
def test_no_row_is_lost_or_repeated(
    stored: set[int], limit: int, changes: list[tuple[bool, set[int]]]
) -> None:
    stored = set(stored)
    kept, seen, cursor = set(stored), list[int](), ""
    steps = iter(changes)
    while True:
        asked = page(f"limit={limit}{cursor}")
        listing = asked.listing(rows_of(asked, stored))
        assert len(listing.data) <= limit
        seen += listing.data
        if listing.next_cursor is None:
            break
        inserted, rows = next(steps, (True, set()))
        stored = stored | rows if inserted else stored - rows
        kept &= stored
        cursor = f"&cursor={listing.next_cursor}"
    assert seen == sorted(set(seen)) and kept <= set(seen)


def test_a_cursor_carries_its_filters() -> None:
    asked = page("colour=red")
    assert (asked.limit, asked.after, asked.filters) == (20, None, {"colour": "red"})
    cursor = asked.cursors.encode(asked.filters, (7,))
    for query in (f"cursor={cursor}", f"cursor={cursor}&colour=red&limit=3"):
        again = page(query)
        assert (again.after, again.filters) == (7, {"colour": "red"})
    with pytest.raises(InvalidParameter) as refused:
        page(f"cursor={cursor}&colour=blue")
    assert refused.value.param == "colour"


def test_a_cursor_is_valid_for_one_listing_caller_and_server() -> None:
    cursor = CURSORS.encode({}, ("a",))
    for other in (Cursors(b"x" * 32, CURSORS.scope), Cursors(CURSORS.key, b"rival /things")):
        with pytest.raises(InvalidParameter, match="cursor"):
            other.decode(cursor)


@pytest.mark.parametrize("position", [(), ("2026-11-23T00:00:00+00:00", *[str(NO_ID)] * 3, 0), ("x", 1)])
def test_a_position_of_another_release_is_refused(position: tuple[str | int, ...]) -> None:
    """A row of usage had no currency in its position; that of a number is one."""
    asked = request(query=f"cursor={CURSORS.encode({}, position)}")
    with pytest.raises(InvalidParameter, match="`cursor`"):
        page_of(asked, CURSORS, BY_GROUP)
    with pytest.raises(InvalidParameter, match="`cursor`"):
        page_of(asked, CURSORS, BY_NUMBER)


@given(st.data())
def test_a_changed_cursor_is_refused(data: st.DataObject) -> None:
    cursor = CURSORS.encode({"colour": "red"}, ("name", 3))
    # The last character holds bits that belong to no byte.
    place = data.draw(st.integers(0, len(cursor) - 2))
    letter = data.draw(st.sampled_from("Aq7-_").filter(lambda each: each != cursor[place]))
    with pytest.raises(InvalidParameter):
        CURSORS.decode(cursor[:place] + letter + cursor[place + 1 :])


@given(st.text(max_size=80))
def test_any_text_as_a_cursor(text: str) -> None:
    with pytest.raises(InvalidParameter):
        CURSORS.decode(text)


@pytest.mark.parametrize(
    ("query", "error", "param"),
    [
        ("limit=0", InvalidParameter, "limit"),
        ("limit=101", InvalidParameter, "limit"),
        ("limit=1.5", InvalidParameter, "limit"),
        ("limit=%D9%A3", InvalidParameter, "limit"),
        ("limit=1&limit=2", InvalidParameter, "limit"),
        ("cursor=", InvalidParameter, "cursor"),
        ("cursor=" + "A" * 5000, InvalidParameter, "cursor"),
        ("colour=", InvalidParameter, "colour"),
        ("colour=a%00", InvalidParameter, "colour"),
        ("colour=%ED%A0%80%0A", InvalidParameter, "colour"),
        ("page=2", UnknownParameter, "page"),
    ],
)
def test_queries_that_are_refused(query: str, error: type[Exception], param: str) -> None:
    with pytest.raises(error) as refused:
        page(query)
    assert getattr(refused.value, "param", None) == param
