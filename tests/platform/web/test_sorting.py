"""A cursor returns the position that was stored in it."""

import json
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.web.sorting import KeyT, RowT, SortOrder, by_id, by_number, by_text, by_time

MOMENTS = st.tuples(
    st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7))])), st.uuids()
).filter(lambda moment: 2 < moment[0].year < 9998)


def through_a_cursor(order: SortOrder[RowT, KeyT], row: RowT) -> KeyT:
    """A cursor is JSON."""
    return order.read(tuple(json.loads(json.dumps(order.write(order.key(row))))))


@given(st.text(), st.integers(-(2**63), 2**63), st.uuids(), MOMENTS)
def test_a_position_is_read_as_it_was_written(
    text: str, number: int, identity: UUID, moment: tuple[datetime, UUID]
) -> None:
    texts: SortOrder[str, str] = by_text(lambda row: row)
    numbers: SortOrder[int, int] = by_number(lambda row: row)
    identities: SortOrder[UUID, UUID] = by_id(lambda row: row)
    moments: SortOrder[tuple[datetime, UUID], tuple[datetime, UUID]] = by_time(lambda row: row)
    assert through_a_cursor(texts, text) == text
    assert through_a_cursor(numbers, number) == number
    assert through_a_cursor(identities, identity) == identity
    assert through_a_cursor(moments, moment) == moment
