"""The comparison of placements on one host: the product hits at least as often as the others, and every request is served."""

from tests.benchmarks.several_engines import EnginesShape, measure_several_engines


async def test_the_product_hits_at_least_as_often_as_the_others() -> None:
    shape = EnginesShape(adapters=60, slots=12, requests=400, rows=8)
    report = await measure_several_engines([shape], None, 1, lambda _: None)
    assert len(report.cases) == 3 and [ratio.holds for ratio in report.ratios] == [True, True]
