"""The count of launches on a model of two layers."""

from tests.benchmarks.steps import StepsShape, measure_steps


def test_a_replayed_step_is_a_few_launches_whatever_is_in_it() -> None:
    report = measure_steps(StepsShape(shape="tiny", rows=16, tokens=256, repeats=1))
    figures = {case.name: case.figure for case in report.cases}
    assert figures.keys() == {
        f"{step}, {kind}"
        for step in ("decodes", "forced tokens", "mixed")
        for kind in ("base", "16 adapters")
    }
    assert {case.shape["step_tokens"] for case in report.cases} == {16, 16 + 2 * 7, 256}
    for kind in ("base", "16 adapters"):
        assert figures[f"mixed, {kind}"]["replayed_launches"] < 25
        assert figures[f"decodes, {kind}"]["replayed_launches"] < 15
    assert figures["mixed, 16 adapters"]["eager_launches"] > figures["mixed, base"]["eager_launches"]
    assert all(figure["eager_launches"] > 2 * figure["replayed_launches"] for figure in figures.values())
