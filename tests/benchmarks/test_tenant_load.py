"""A tenant's process offers at its rate, whatever the answers are, and says what became of them."""

import asyncio

import pytest
from tests.benchmarks.attacks import run_stub
from tests.benchmarks.tenant_load import OfferJob, begin_offer, end_offer

from loraplex.platform.bench.report import BenchFailed


def job(base_url: str, seconds: float) -> OfferJob:
    return OfferJob(
        base_url=base_url,
        api_key="key",
        models=["m"],
        pool=list(range(100)),
        input_len=4,
        output_len=2,
        rate=50.0,
        seconds=seconds,
        seed=1,
    )


async def test_it_offers_until_it_is_ended_and_counts_every_request() -> None:
    async with run_stub() as address:
        offering = await begin_offer(job(address, 60.0))
        await asyncio.sleep(1.0)
        offered = await end_offer(offering)
    assert offered.sent > 10
    assert offered.answered + offered.unanswered + sum(offered.failed.values()) == offered.sent
    assert offered.rate == pytest.approx(50.0, rel=0.8)


async def test_an_offer_that_ends_on_its_own_gives_no_figure() -> None:
    async with run_stub() as address:
        offering = await begin_offer(job(address, 0.2))
        await asyncio.sleep(2.0)
        with pytest.raises(BenchFailed, match="ended before"):
            await end_offer(offering)
