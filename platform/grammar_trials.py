"""Trial compilations of a gateway: their process with its budget, and what they tell the metrics."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from loraplex.engine.messages import EngineInfo
from loraplex.grammar.errors import GrammarRefused, GrammarTooCostly, TrialsUnavailable
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.trial_messages import TrialLimits
from loraplex.grammar.trial_worker import TrialWorkerOptions
from loraplex.grammar.trials import Trials
from loraplex.platform.config import Settings, foreign_environment
from loraplex.platform.services import GrammarTrials


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


@asynccontextmanager
async def open_trials(
    settings: Settings, info: EngineInfo, recorder: TrialRecorder
) -> AsyncIterator[GrammarTrials]:
    """Trials for the model an engine serves. Their process starts meanwhile; checks wait for it."""
    limits = TrialLimits(deadline_s=settings.grammar_deadline_s, memory_bytes=settings.grammar_memory_bytes)
    options = TrialWorkerOptions(
        tokenizer=info.model_path,
        vocab_size=info.vocab_size,
        end_token_ids=tuple(info.eos_token_ids),
        limits=limits,
        environment=foreign_environment(),
    )
    trials = Trials(options)
    await trials.start()
    try:
        yield MeasuredTrials(trials, recorder)
    finally:
        await trials.close()
