"""A step that raises, at any stage: its culprits fail, the other rows go on with the tokens of an undisturbed run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.engine.test_engine import ADAPTERS, Harness, Reference, prompts

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.runner.launched_step import LaunchedStep

LIMITS: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 12}
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("step-failures"))


@pytest.fixture
def harness(model: Reference) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(**config: Any) -> Harness:
        made.append(Harness(model, **config))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.fixture(scope="module")
def undisturbed(model: Reference) -> Iterator[Harness]:
    """What comes out without a fault."""
    engine = Harness(model, scheduler=LIMITS)
    add_all(engine)
    engine.run()
    yield engine
    engine.engine.close()


class Faults:
    """Lets one stage of every step raise in which `is_faulty` finds a row; K and V of the step are written before."""

    def __init__(self, harness: Harness, stage: str, is_faulty: Callable[[Sequence], bool]) -> None:
        self._runner = harness.engine.runner
        self._launch = self._runner.launch
        self._stage, self._is_faulty = stage, is_faulty
        self.raised = 0
        self._runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: StepPlan, rows: list[PlannedRow] | None = None) -> LaunchedStep:
        step = self._launch(plan, rows)
        if any(self._is_faulty(row.sequence) for row in plan.rows):
            if self._stage == "launch":
                self._fail()
            setattr(step, self._stage, self._fail)
        return step

    def _fail(self, *_: Any) -> Any:
        self.raised += 1
        raise RuntimeError("a scripted fault")


def add_all(engine: Harness) -> None:
    names = [None, *ADAPTERS]
    for index, prompt in enumerate(prompts(9, seed=8)):
        engine.add(str(index), prompt, names[index % len(names)], n=1 + (index == 2), **SAMPLING)


def culprit(sequence: Sequence) -> bool:
    return sequence.request_id == "culprit"


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("stage", ["launch", "sample", "collect"])
@pytest.mark.parametrize("after", [0, 5])
def test_the_row_that_causes_it_fails_alone(
    harness: Callable[..., Harness], undisturbed: Harness, stage: str, overlap: str, after: int
) -> None:
    """`after`: the tokens that the culprit has generated. With 0 it fails in the first chunk of its prompt."""
    disturbed = harness(scheduler=LIMITS | {"overlap": overlap})
    faults = Faults(disturbed, stage, lambda s: culprit(s) and s.num_output_tokens >= after)
    disturbed.add("culprit", [5 + index % 90 for index in range(100)], "mlp", ignore_eos=True)
    add_all(disturbed)
    disturbed.run()
    assert disturbed.failures == {"culprit": "engine_error"} and 0 < faults.raised <= 20
    assert len(disturbed.outputs.pop(("culprit", 0), [])) >= after
    assert (disturbed.outputs, disturbed.reasons) == (undisturbed.outputs, undisturbed.reasons)
    disturbed.check_idle()


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("stage", ["launch", "sample", "collect"])
def test_a_fault_that_does_not_return_ends_no_request(
    harness: Callable[..., Harness],
    undisturbed: Harness,
    stage: str,
    overlap: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disturbed = harness(scheduler=LIMITS | {"overlap": overlap})
    steps = iter(range(1000))
    faults = Faults(disturbed, stage, lambda s: s.choice == 0 and s.order == 0 and next(steps) % 4 == 3)
    add_all(disturbed)
    disturbed.run()
    assert faults.raised > 2 and not disturbed.failures
    assert (disturbed.outputs, disturbed.reasons) == (undisturbed.outputs, undisturbed.reasons)
    disturbed.check_idle()
    assert {record.levelname for record in caplog.records} == {"WARNING"}, "no request has ended"


@pytest.mark.parametrize("stage", ["launch", "sample", "collect"])
def test_a_culprit_without_other_rows_does_not_end_the_engine(
    harness: Callable[..., Harness], stage: str
) -> None:
    engine = harness()
    (prompt,) = prompts(1, seed=4)
    engine.add("before", prompt)
    engine.run()
    faults = Faults(engine, stage, culprit)
    for attempt in range(1, 5):
        engine.add("culprit", prompt)
        engine.run()
        assert engine.failures.pop("culprit") == "engine_error" and faults.raised == 2 * attempt
    engine.add("after", prompt)
    engine.run()
    assert engine.outputs["after", 0] == engine.outputs["before", 0]
    engine.check_idle()


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("stage", ["launch", "sample", "collect"])
def test_a_runner_that_always_raises_ends_the_engine(
    harness: Callable[..., Harness], stage: str, overlap: str
) -> None:
    engine = harness(scheduler=LIMITS | {"overlap": overlap})
    faults = Faults(engine, stage, lambda sequence: True)
    add_all(engine)
    with pytest.raises(RuntimeError, match="a scripted fault"):
        engine.run()
    assert faults.raised <= 40


def test_a_defect_of_the_scheduling_ends_the_engine(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = harness()
    add_all(engine)
    engine.step()

    def broken(*_: Any) -> Any:
        raise ValueError("a defect")

    monkeypatch.setattr(engine.engine.scheduler, "complete", broken)
    with pytest.raises(ValueError, match="a defect"):
        engine.step()


def test_checking_the_runner_leaves_the_cache_as_it_was(harness: Callable[..., Harness]) -> None:
    engine = harness()
    add_all(engine)
    engine.run()
    runner = engine.engine.runner
    before = [layer.clone() for layer in runner._kv_cache]
    runner.check()
    assert all(map(torch.equal, before, runner._kv_cache))
    assert before[0][0].any()
