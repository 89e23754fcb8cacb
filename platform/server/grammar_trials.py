"""Trial compilations of a gateway: their process with its budget, and what they tell the metrics."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

from loraplex.engine.messages import EngineInfo
from loraplex.grammar.errors import GrammarRefused, GrammarTooCostly, TrialsUnavailable
from loraplex.grammar.judge.judges import JudgeOptions, Judges
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.trial.messages import TrialLimits
from loraplex.grammar.trial.trials import Trials
from loraplex.grammar.trial.worker import TrialWorkerOptions
from loraplex.platform.config import Settings, foreign_environment
from loraplex.platform.errors import UnsupportedParameter
from loraplex.platform.inference.dependencies import AnswerJudges, GrammarTrials, RequestPreparation
from loraplex.platform.preparation.messages import Setup
from loraplex.platform.preparation.preparer import Preparer, PreparerOptions

# Less processor time than time: a trial that had its share and failed is the grammar's fault, not a busy machine's.
CPU_SHARE: Final = 0.8
PATIENCE_IN_DEADLINES: Final = 3
LEAST_PATIENCE_S: Final = 30.0


class TrialRecorder(Protocol):
    """Told of every check: `accepted`, `invalid`, `too_costly`, `unavailable` or `abandoned`, and its seconds."""

    def record_trial(self, result: str, seconds: float) -> None: ...


class MeasuredTrials:
    """`GrammarTrials` that are told to a recorder. A remembered verdict counts as well."""

    def __init__(self, trials: GrammarTrials, recorder: TrialRecorder) -> None:
        self._trials = trials
        self._recorder = recorder

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        """See `GrammarTrials.check`."""
        begun, result = time.monotonic(), "abandoned"
        try:
            await self._trials.check(namespace, spec, param=param)
            result = "accepted"
        except GrammarTooCostly:
            result = "too_costly"
            raise
        except GrammarRefused:
            result = "invalid"
            raise
        except TrialsUnavailable:
            result = "unavailable"
            raise
        finally:
            self._recorder.record_trial(result, time.monotonic() - begun)


class NoTrials:
    """For a model without an end token, whose documents could never end."""

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        """Refuses every grammar."""
        raise UnsupportedParameter(f"`{param}` is not supported: the model has no end token.", param=param)


def trial_limits(settings: Settings) -> TrialLimits:
    """The operator's budget. Who waits has the patience for a trial behind another one."""
    deadline_s = settings.grammar_deadline_s
    return TrialLimits(
        deadline_s=deadline_s,
        cpu_s=max(1, int(CPU_SHARE * deadline_s)),
        memory_bytes=settings.grammar_memory_bytes,
        patience_s=max(LEAST_PATIENCE_S, PATIENCE_IN_DEADLINES * deadline_s),
    )


@asynccontextmanager
async def open_trials(
    settings: Settings, info: EngineInfo, tokenizer_json: str, recorder: TrialRecorder
) -> AsyncIterator[GrammarTrials]:
    """Trials for the model an engine serves. Their process starts meanwhile; checks wait for it.

    `tokenizer_json` is the tokenizer as the engine has it too, for models that come without such a file.
    """
    if not info.eos_token_ids:
        yield NoTrials()
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        await asyncio.to_thread(file.write_text, tokenizer_json, "utf-8")
        options = TrialWorkerOptions(
            tokenizer=str(file),
            vocab_size=info.vocab_size,
            end_token_ids=tuple(info.eos_token_ids),
            limits=trial_limits(settings),
            environment=foreign_environment(),
        )
        trials = Trials(options)
        await trials.start()
        try:
            yield MeasuredTrials(trials, recorder)
        finally:
            await trials.close()


@asynccontextmanager
async def open_preparation(setup: Setup) -> AsyncIterator[RequestPreparation]:
    """The preparing process of a gateway. It starts meanwhile; who needs it waits for that."""
    preparer = Preparer(PreparerOptions(setup=setup, environment=foreign_environment()))
    starting = asyncio.create_task(preparer.start())
    try:
        yield preparer
    finally:
        starting.cancel()
        # A start that failed was told to the log.
        await asyncio.gather(starting, return_exceptions=True)
        await preparer.close()


@asynccontextmanager
async def open_judges() -> AsyncIterator[AnswerJudges]:
    """Judges of finished values. Their processes start when there is something to judge."""
    judges = Judges(JudgeOptions(environment=foreign_environment()))
    try:
        yield judges
    finally:
        await judges.close()
