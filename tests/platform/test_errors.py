"""What a client sees of errors whose message is its own affair or the server's."""

import pytest

from loraplex.platform.errors import describe
from loraplex.tenants.errors import JournalFull, JournalUnavailable, StoreUnavailable


def test_a_full_journal_is_named() -> None:
    seen = describe(JournalFull("this server's usage journal has reached 5 bytes; try again later"))
    assert (seen.row.status, seen.row.code) == (507, "storage_full")
    assert seen.row.retry_after_s == 60
    assert seen.message == "this server's usage journal has reached 5 bytes; try again later"


@pytest.mark.parametrize("kind", [StoreUnavailable, JournalUnavailable])
def test_details_of_a_store_that_fails_are_not_shown(kind: type[StoreUnavailable]) -> None:
    seen = describe(kind("disk I/O error in /var/lib/loraplex"))
    assert (seen.row.status, seen.row.code) == (503, "store_unavailable")
    assert "/var/lib" not in seen.message
