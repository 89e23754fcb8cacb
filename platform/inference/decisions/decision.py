"""A decision in progress: the generations of its adapters, their answers and what they used.

Invariant: a token of the input counts once for each adapter, however many rows read it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from loraplex.engine.messages import Scored
from loraplex.platform.errors import EngineFailed
from loraplex.platform.inference.decisions.answers import OptionProbabilities, answer_of, probabilities_of
from loraplex.platform.inference.decisions.option_readers import OptionReader
from loraplex.platform.inference.decisions.question_encoding import QuestionEncoding
from loraplex.platform.inference.engine_streams import EnginePlaces
from loraplex.platform.inference.generation import Generation
from loraplex.platform.observability.request_stats import RequestRecorder
from loraplex.platform.parameters.decision_request import DecisionRequest, Question

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """The questions that one adapter answers, by their index, while its generation runs.

    `rows`: the engine requests of each, as numbers of those of the generation. `temperatures`: by type of question, of its
    calibration. `cacheable_tokens`: of the full blocks that the input fills.
    """

    name: str
    readers: Mapping[int, OptionReader]
    rows: Mapping[int, Sequence[int]]
    temperatures: Mapping[str, float]
    cacheable_tokens: int
    generation: Generation

    async def read(self, questions: Sequence[Question]) -> dict[int, OptionProbabilities]:
        """Wait for the scores of all rows. Raises what `Generation.events` raises."""
        first: dict[int, Scored] = {}
        with naming(self.name):
            async with self.generation.delivering():
                async for _, event in self.generation.events():
                    if isinstance(event, Scored):
                        first[event.choice] = event
        scored = {0: [*first.values()], **self.generation.scores}
        return {
            index: probabilities_of(
                reader.logprobs([scored[row] for row in self.rows[index]]),
                self.temperatures.get(questions[index].type, 1.0),
            )
            for index, reader in self.readers.items()
        }


@dataclass(frozen=True, slots=True)
class DecisionUsage:
    """Tokens. `cached` were in the cache before the decision; `written`: those of the input's blocks that it has added."""

    input: int
    cached: int
    written: int


@dataclass(slots=True)
class Decision:
    """`parts`, by the name of their model, are added as they are admitted: one that is admitted again replaces the first. `close` ends
    it at any stage. `admitted`: where the parts wait until none of them can be refused.
    """

    values: DecisionRequest
    encoding: QuestionEncoding
    places: EnginePlaces
    admitted: asyncio.Barrier
    recorder: RequestRecorder
    parts: dict[str, AdapterPart] = field(default_factory=dict)
    arrival: float = field(default_factory=time.monotonic)

    async def answers(self) -> tuple[list[Mapping[str, Any]], float]:
        """Wait for all answers, in the order of the questions, and the least mass of all options of one."""
        found: dict[int, OptionProbabilities] = {}
        questions = self.values.questions
        for each in await gather_or_cancel([part.read(questions) for part in self.parts.values()]):
            found |= each
        kinds = Counter(question.type for question in questions)
        self.recorder.record_decision(kinds, time.monotonic() - self.arrival)
        answers = [answer_of(question, found[i].probabilities) for i, question in enumerate(questions)]
        return answers, min(each.mass for each in found.values())

    @property
    def usage(self) -> DecisionUsage:
        """What was used so far."""
        used = [(part.generation.stats, part.cacheable_tokens) for part in self.parts.values()]
        return DecisionUsage(
            sum(stats.prompt_tokens for stats, _ in used),
            sum(stats.cached_tokens for stats, _ in used),
            sum(max(0, cacheable - stats.cached_tokens) for stats, cacheable in used),
        )

    async def close(self, error: BaseException | None = None) -> None:
        """End what runs, and settle what was used. May be repeated."""
        await asyncio.gather(*(part.generation.close(error, streams=False) for part in self.parts.values()))


@contextmanager
def naming(model: str) -> Iterator[None]:
    """Let what the engine says of one of several adapters begin with its name."""
    try:
        yield
    except EngineFailed as error:
        error.args = (f"`{model}`: {error}",)
        raise


async def gather_or_cancel(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all to their ends; the first error cancels the others, and is raised once they have ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
