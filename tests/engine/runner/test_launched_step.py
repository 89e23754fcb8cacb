"""Which masks a step starts while the step before is still in flight: those that wait for none of its tokens."""

from collections.abc import Collection
from typing import Any, cast

import pytest
import torch
from tests.engine.conftest import ScriptedMask

from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import UNKNOWN_TOKEN, PlannedRow, StepPlan
from loraplex.engine.messages import EngineRequest
from loraplex.engine.runner.launched_step import LaunchedStep
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.sampling.step_logits import StepLogits
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.structured_output.bitmask_filling import BitmaskFiller, Masks

VOCAB = 64
CPU = torch.device("cpu")


class Begun:
    """A filler that notes what it is asked to begin, call by call, and fills all of it before it is collected."""

    def __init__(self) -> None:
        self.calls: list[list[Sequence]] = []
        self._filler = BitmaskFiller(VOCAB, timeout_s=60.0)

    def begin(self, sequences: Collection[Sequence]) -> None:
        self.calls.append(list(sequences))
        self._filler.begin(sequences)

    def collect(self, sequences: Collection[Sequence], timeout_s: float) -> Masks:
        return self._filler.collect(sequences, max(timeout_s, 60.0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._filler, name)


def row(family: object, *, token: int = 3, unknown: int = 0, samples: bool = True) -> PlannedRow:
    request = EngineRequest(
        request_id="r",
        namespace=b"",
        prompt_token_ids=[3],
        sampling=SamplingParams(max_tokens=9, temperature=0.0),
    )
    sequence = Sequence(request, 0, 0.0, 0, [3], num_unknown=unknown)
    if family is not None:
        sequence.token_mask = ScriptedMask([(5, 6)], family=family)
    return PlannedRow(sequence, 0, (token,), (0,), None, samples)


@pytest.fixture
def begun() -> Begun:
    return Begun()


def step_of(rows: list[PlannedRow], begun: Begun) -> LaunchedStep:
    masks = cast("BitmaskFiller", begun)
    step = LaunchedStep(StepPlan(tuple(rows)), Sampler(VOCAB), masks, HostTransfers(CPU))
    step.computed(StepLogits(torch.zeros(sum(row.samples for row in rows), VOCAB)))
    return step


def test_masks_that_wait_for_no_token_begin_before_the_step_before_lands(begun: Begun) -> None:
    before = row("shared")
    waits = row("own", token=UNKNOWN_TOKEN, unknown=1)
    first, of_its_family, plain, chunk = row("new"), row("shared"), row(None), row("later", samples=False)
    step = step_of([waits, first, of_its_family, plain, chunk], begun)
    step.begin_known_masks([before.sequence])
    assert begun.calls == [[first.sequence]]
    sampled = [waits, first, of_its_family, plain]
    assert step.sample(sampled) == []
    tokens = {sequence: token.token_id for sequence, token in step.collect().items()}
    assert tokens == {waits.sequence: 5, first.sequence: 5, of_its_family.sequence: 5, plain.sequence: 0}
    begun.close()


def test_a_row_that_ended_meanwhile_is_not_sampled(begun: Begun) -> None:
    ended, stays = row("ended"), row("stays")
    step = step_of([ended, stays], begun)
    step.begin_known_masks([])
    assert begun.calls == [[ended.sequence, stays.sequence]]
    assert step.sample([stays]) == []
    assert step.collect().keys() == {stays.sequence}
    begun.close()
