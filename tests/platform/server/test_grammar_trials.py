"""Trials of a gateway: what is told of each, and a real process that says yes, no, and nothing after its end."""

import asyncio
from typing import Any

import msgspec
import pytest

from loraplex.engine.fake_engine import DEFAULT_INFO
from loraplex.grammar.builder.output_plan import plan_output
from loraplex.grammar.constraints import OutputConstraints, Regex, SchemaLimits
from loraplex.grammar.errors import GrammarError, GrammarInvalid, GrammarTooCostly, WorkersUnavailable
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.config import Settings
from loraplex.platform.errors import UnsupportedParameter
from loraplex.platform.inference.structured_output.compile_cache import RecordedCompileChecks
from loraplex.platform.server.components import open_trials, trial_limits

SPEC = GrammarSpec(backend="llguidance", source="start: /a/")
TENANT = b"n" * 32


class Recorder:
    def __init__(self) -> None:
        self.results: list[str] = []

    def record_trial(self, result: str, seconds: float) -> None:
        assert seconds >= 0
        self.results.append(result)


class Scripted:
    """Trials that raise what they are given, or hang."""

    def __init__(self, error: GrammarError | None, hang: bool = False) -> None:
        self._error, self._hang = error, hang

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        if self._hang:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "accepted"),
        (GrammarInvalid("no"), "invalid"),
        (GrammarTooCostly("slow"), "too_costly"),
        (WorkersUnavailable("busy"), "unavailable"),
    ],
)
async def test_every_check_is_told_with_its_result(error: GrammarError | None, result: str) -> None:
    recorder = Recorder()
    trials = RecordedCompileChecks(Scripted(error), recorder)
    if error is None:
        await trials.check(TENANT, SPEC)
    else:
        with pytest.raises(type(error)):
            await trials.check(TENANT, SPEC)
    assert recorder.results == [result]


async def test_a_client_that_leaves_is_told_too() -> None:
    recorder = Recorder()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await RecordedCompileChecks(Scripted(None, hang=True), recorder).check(TENANT, SPEC)
    assert recorder.results == ["abandoned"]


@pytest.mark.parametrize("deadline_s", [0.1, 5.0, 60.0])
def test_who_waits_hears_the_verdict_of_the_longest_trial(deadline_s: float) -> None:
    limits = trial_limits(Settings(grammar_deadline_s=deadline_s))
    assert limits.deadline_s == deadline_s and limits.cpu_s >= 1
    assert limits.queue_timeout_s > limits.deadline_s + limits.hang_grace_s


async def test_a_model_without_an_end_token_has_no_grammars() -> None:
    recorder = Recorder()
    async with open_trials(Settings(), DEFAULT_INFO, "{}", recorder) as trials:
        with pytest.raises(UnsupportedParameter, match="no end token") as refused:
            await trials.check(TENANT, SPEC, param="tools")
    assert refused.value.param == "tools"


async def test_a_real_process_judges_and_ends_with_the_gateway(chat_tokenizer: Any) -> None:
    recorder = Recorder()
    ends = [chat_tokenizer.eos_token_id]
    info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=512, eos_token_ids=ends)
    tokenizer_json = chat_tokenizer.backend_tokenizer.to_str()
    good, bad = (
        plan_output(OutputConstraints(format=Regex(regex)), ToolStyle.GENERIC, limits=SchemaLimits()).spec
        for regex in ("a+", "(a")
    )
    assert good is not None and bad is not None
    async with open_trials(Settings(), info, tokenizer_json, recorder) as trials:
        await trials.check(TENANT, good, param="structured_outputs.regex")
        with pytest.raises(GrammarInvalid) as refused:
            await trials.check(TENANT, bad, param="structured_outputs.regex")
        assert refused.value.param == "structured_outputs.regex"
    with pytest.raises(WorkersUnavailable):
        await trials.check(TENANT, SPEC)
    assert recorder.results == ["accepted", "invalid", "unavailable"]
