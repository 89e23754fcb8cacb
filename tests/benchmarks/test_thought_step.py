"""Steps with and without thought, and masks, measured on a tiny model."""

from pathlib import Path

from tests.benchmarks.thought_step import ThoughtJob, measure_thought
from tests.end_to_end.thinking_model import save_thinking_model


def test_steps_and_masks_are_measured(tmp_path: Path) -> None:
    save_thinking_model(tmp_path)
    report = measure_thought(ThoughtJob(str(tmp_path), "float32", rows=2, steps=2, tokens=20))
    steps, *masks = report.cases
    assert steps.figure["step_ms"] > 0 and steps.figure["thinking_step_ms"] > 0
    assert len(masks) == 4 and all(case.figure["fill_us"] > 0 for case in masks)
    assert [ratio.required for ratio in report.ratios] == [1.05, 1.5, None]
