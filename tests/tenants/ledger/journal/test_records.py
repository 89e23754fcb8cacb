"""Records are read as they were written, and the end of a request fits into what its admission reserves."""

from dataclasses import replace
from uuid import UUID

import msgspec
import pytest
from tests.tenants.ledger.journal.fixtures import KEY, TENANT, progressed, reservation, used

from loraplex.tenants.errors import JournalUnreadable
from loraplex.tenants.ledger.histograms import BUCKETS
from loraplex.tenants.ledger.journal.file import OPEN_REQUEST_BYTES
from loraplex.tenants.ledger.journal.records import (
    read_reservation,
    read_usage,
    reservation_text,
    usage_text,
)
from loraplex.tenants.ledger.journal.statements import FORMAT
from loraplex.tenants.quotas.limits import BUDGETS, COUNTED, MAX_BUDGET, MAX_INTEGER, QuotaLimits, Subject
from loraplex.tenants.quotas.reservation import LimitAtAdmission, RequestTimings, SettledUsage
from loraplex.tenants.rate_state import Rate, RateState

LARGE = 1 << 40
PHASES = ("queue", "adapter_load", "grammar_compile")
EVERY_LIMIT = tuple(
    LimitAtAdmission(level, name, *[MAX_BUDGET if name in BUDGETS else MAX_INTEGER] * 4)
    for level in ("tenant", "key", "adapter")
    for name in COUNTED
)
LARGEST = SettledUsage(
    outcome="completed",
    prompt_tokens=LARGE,
    cached_tokens=LARGE,
    completion_tokens=LARGE,
    reasoning_tokens=LARGE,
    amount_pico=(1 << 53) * 1000 - 1000,
    system_fingerprint=f"fp_{'f' * 16}",
    timings=RequestTimings(
        ttft_ms=LARGE,
        duration_ms=LARGE,
        phases=dict.fromkeys(
            ("auth", "admission", "schema_check", *PHASES, "prefill", "decode"), (LARGE, LARGE)
        ),
        causes={
            "admission": {
                "limit": "requests_per_minute",
                "level": "adapter",
                "left_percent": 100,
                "renewals": LARGE,
                "degraded": 1,
            },
            "grammar_compile": {"before": LARGE, "compile_ms": LARGE},
            "adapter_load": {"tier": "device", "bytes": LARGE, "loads_before": LARGE},
            "queue": {"before": LARGE, "overtaken_by": LARGE, "limit": "kv_blocks"},
            "prefill": {"computed": LARGE, "cached": LARGE},
        },
        gap_buckets=(LARGE,) * BUCKETS,
    ),
    limits=EVERY_LIMIT,
)

# As a release has written them. The next release must read them, or raise `FORMAT` and bring a reader.
RESERVATION_OF_FORMAT_1 = """
{"request":{"id":"00000000-0000-0000-0000-000000000005","tenant_id":"00000000-0000-0000-0000-000000000001",
"api_key_id":"00000000-0000-0000-0000-000000000002","adapter_id":"00000000-0000-0000-0000-000000000003","adapter_version":3,
"digest":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","request_id":"chatcmpl-0123456789","policy_epoch":0,
"tier":"-","adapter_name":null,"prompt_tokens":100,"completion_tokens":1000,"sequences":1,"subjects":[],
"amount_nano":4503599627370496},"day":"d:2026-11-23","month":"m:2026-11","admitted_at":"2026-11-23T01:02:03.456789Z",
"price":{"id":"00000000-0000-0000-0000-000000000004","currency":"EUR","price":{"prompt":3,"cached_prompt":2,"completion":5}},
"epoch":4,"rate":{"requests":null,"tokens":null},"degraded":false}
"""
USAGE_OF_FORMAT_1 = """
{"outcome":"completed","prompt_tokens":100,"cached_tokens":0,"completion_tokens":5,"amount_pico":0,"timings":null}
"""


def test_texts_of_format_1_are_read() -> None:
    assert FORMAT == 1
    assert read_reservation(RESERVATION_OF_FORMAT_1) == reservation(UUID(int=5))
    assert read_usage(USAGE_OF_FORMAT_1) == used(5)


def test_a_reservation_is_read_as_it_was_written() -> None:
    each = reservation()
    assert read_reservation(reservation_text(each)) == each
    in_session = replace(
        each, request=replace(each.request, session="ses_1", counts_session=True, alias="production")
    )
    assert read_reservation(reservation_text(in_session)) == in_session


def test_a_release_without_sessions_and_reasoning_reads_what_this_one_writes() -> None:
    """It ignores fields that it does not know."""
    each = reservation()
    record = msgspec.json.decode(reservation_text(each))
    record["request"]["not yet"] = record["price"]["price"]["not yet"] = 1
    assert read_reservation(msgspec.json.encode(record).decode()) == each


@pytest.mark.parametrize("usage", [used(3), progressed(4), LARGEST])
def test_usage_is_read_as_it_was_written(usage: SettledUsage) -> None:
    read = read_usage(usage_text(usage))
    assert (read, read.limits) == (usage, usage.limits)
    assert read.system_fingerprint == usage.system_fingerprint
    assert read_usage(usage_text(replace(usage, unsatisfied=True))).unsatisfied and not read.unsatisfied


def test_what_only_an_admission_needs_is_not_written() -> None:
    plain = reservation()
    subjects = (Subject("tenant", TENANT, QuotaLimits(tokens_per_day=5)), Subject("key", KEY))
    whole = replace(
        plain,
        rate=RateState(requests=Rate(limit=1, remaining=1, reset_s=float("inf"))),
        limits=EVERY_LIMIT,
        request=replace(plain.request, subjects=subjects),
    )
    assert reservation_text(whole) == reservation_text(plain)


def test_the_largest_end_and_progress_fit_into_the_reserve() -> None:
    progress = replace(LARGEST, timings=None, limits=())
    assert len(usage_text(LARGEST)) + len(usage_text(progress)) < OPEN_REQUEST_BYTES


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"request": 1}', '{"prompt_tokens": -1, "outcome": null}'])
def test_other_texts_are_unreadable(text: str) -> None:
    with pytest.raises(JournalUnreadable):
        read_reservation(text)
    with pytest.raises(JournalUnreadable):
        read_usage(text)
