"""Amounts, counts, durations, sizes and times, as DESIGN tables write them, and at the edges of each unit."""

from datetime import UTC, datetime, timedelta

import pytest

from loraplex.platform.web.console import formatting

NOW = datetime(2026, 11, 20, 14, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("micro", "currency", "text"),
    [
        (20_820_000, "USD", "$20.82"),
        (20_825_000, "USD", "$20.83"),
        (0, "USD", "$0.00"),
        (4_999, "USD", "<$0.01"),
        (-4_999, "USD", "−<$0.01"),
        (-5_000_000, "EUR", "−€5.00"),
        (20_820_000, "CHF", "CHF\u00a020.82"),
        (1_234_567_000_000, "JPY", "JPY\u00a01,234,567"),
        (1_500, "KWD", "KWD\u00a00.002"),
        (None, "USD", "–"),
    ],
)
def test_totals_have_the_digits_of_their_currency(micro: int | None, currency: str, text: str) -> None:
    assert formatting.money_total(micro, currency) == text


def test_amounts_of_sums_and_requests() -> None:
    assert formatting.money_sum(1_299_149_999_999, "USD") == "$1.2991"
    assert formatting.money_sum(1_299_150_000_000, "USD") == "$1.2992"
    assert formatting.money_sum(1_299_150_000_000, "USD", 6) == "$1.299150"
    assert formatting.money_request(59_400_000, "USD") == "$0.000059"
    assert formatting.money_request(1, "USD") == "<$0.000001"
    assert formatting.money_exact(22_800_000, "USD") == "$0.0000228"
    assert formatting.money_exact(2_000_000_000_000, "USD") == "$2.00"
    assert formatting.money_exact(1, "JPY") == "JPY\u00a00.000000000001"
    assert formatting.money_exact(3 * 10**12, "JPY") == "JPY\u00a03"
    assert formatting.rate(100_000, "USD") == "$0.100"
    assert formatting.rate(1, "USD") == "$0.000001"
    assert formatting.rate(12_345_600, "USD") == "$12.3456"


def test_amounts_beyond_what_a_float_holds() -> None:
    assert formatting.money_exact(9_007_199_254_740_993_000_000_000_001, "USD") == (
        "$9,007,199,254,740,993.000000000001"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1.00\u00a0k"),
        (1_005, "1.01\u00a0k"),
        (31_654_825, "31.7\u00a0M"),
        (999_499, "999\u00a0k"),
        (999_500, "1.00\u00a0M"),
        (-31_654_825, "−31.7\u00a0M"),
        (2_000_000_000, "2.00\u00a0G"),
        (None, "–"),
    ],
)
def test_compact_numbers_have_three_digits(number: int | None, text: str) -> None:
    assert formatting.compact(number) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0.04, "0.0 ms"),
        (46.0, "46.0 ms"),
        (99.94, "99.9 ms"),
        (99.96, "100 ms"),
        (462.4, "462 ms"),
        (999.6, "1.00 s"),
        (2_410, "2.41 s"),
        (59_999, "1 min"),
        (61_000, "1 min 1 s"),
        (34_080_000, "9 h 28 min"),
        (90_000_000, "1 d 1 h"),
        (None, "–"),
    ],
)
def test_durations(milliseconds: float | None, text: str) -> None:
    assert formatting.duration(milliseconds).replace("\u00a0", " ") == text


def test_shares() -> None:
    assert formatting.share(381, 1000) == "38.1\u00a0%"
    assert formatting.share(41, 10_000) == "0.41\u00a0%"
    assert formatting.share(1, 10_000_000) == "<0.01\u00a0%"
    assert formatting.share(0, 10) == "0.0\u00a0%"
    assert formatting.share(10, 10) == "100.0\u00a0%"
    assert formatting.share(1, 0) == "–"


def test_sizes() -> None:
    assert formatting.file_size(58_400_000) == "58.4\u00a0MB"
    assert formatting.file_size(312) == "312\u00a0B"
    assert formatting.memory_size(512 << 20) == "512\u00a0MiB"
    assert formatting.memory_size(3 << 29) == "1.5\u00a0GiB"
    assert formatting.count(31_654_825) == "31,654,825"
    assert formatting.count(-5) == "−5"


def test_times() -> None:
    def ago(**distance: float) -> str:
        return formatting.ago(NOW - timedelta(**distance), NOW).replace("\u00a0", " ")

    assert [ago(seconds=0.2), ago(seconds=59), ago(minutes=2), ago(hours=3), ago(days=6)] == [
        "now",
        "59 s ago",
        "2 min ago",
        "3 h ago",
        "6 d ago",
    ]
    assert ago(days=16) == "4 Nov"
    assert ago(days=400) == "16 Oct 2025"
    assert ago(hours=-2) == "in 2 h"
    moment = datetime(2026, 11, 20, 15, 28, 7, 412_900, tzinfo=UTC)
    assert formatting.exact_time(moment) == "2026-11-20 15:28:07.412 UTC"
    assert formatting.machine_time(moment) == "2026-11-20T15:28:07.412Z"


def test_identities() -> None:
    assert formatting.short_digest("4cc234558fdd0123") == "4cc234558fdd…"
    assert formatting.short_id("7f3c9e2a-1111") == "7f3c9e2a…"
    assert formatting.short_id("short") == "short"
    assert formatting.short_id(None) == "–"


def test_browsers() -> None:
    browser = formatting.browser
    like = "Mozilla/5.0 ({}) AppleWebKit/537.36 (KHTML, like Gecko)"
    assert browser(f"{like.format('X11; Linux x86_64')} Chrome/150.0.0.0 Safari/537.36") == "Chrome on Linux"
    assert (
        browser(f"{like.format('Windows NT 10.0')} Chrome/150.0 Safari/537.36 Edg/150.0") == "Edge on Windows"
    )
    assert browser(f"{like.format('iPhone; like Mac OS X')} Version/26.0 Safari/605.1") == "Safari on iPhone"
    assert (browser("Firefox/145"), browser("agent of <b>"), browser(None)) == (
        "Firefox",
        "agent of <b>",
        "–",
    )


@pytest.mark.parametrize(
    ("micro", "digits"),
    [([], 4), ([None, 0, 100, 100], 4), ([0, 1], 4), ([100, 140], 5), ([1, 2], 6), ([99_999, 100_000], 6)],
)
def test_different_sums_of_a_column_look_different(micro: list[int | None], digits: int) -> None:
    column = [None if each is None else each * 10**6 for each in micro]
    assert formatting.sum_digits(column) == digits
    assert len({formatting.money_sum(each, "USD", digits) for each in column}) == len(set(column))


def test_sums_that_differ_below_a_micro_unit_have_six_decimals() -> None:
    assert formatting.sum_digits([10**6, 10**6 + 1]) == 6
