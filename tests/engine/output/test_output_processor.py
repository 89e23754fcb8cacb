"""Events for the gateway from sampled tokens, over a tokenizer of single characters and a few words."""

import logging

import pytest
from tokenizers import Tokenizer, decoders, models

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import NO_TOKEN, StepOutput
from loraplex.engine.messages import (
    AdapterRef,
    Delta,
    EngineRequest,
    Event,
    Failed,
    Finished,
    FinishReason,
    Started,
    TokenLogprob,
    Usage,
    WaitCauses,
)
from loraplex.engine.output.output_processor import OutputProcessor, ProcessedOutputs
from loraplex.engine.sampling_params import SamplingParams

EOS = 0
WORDS = ["<eos>", "a", "b", "c", "STOP", "ð", "Ł", "ĺ", "Ģ", "xSTO", "Px"]
"""`ð Ł ĺ Ģ` are the four bytes of an emoji in the byte-level alphabet."""
A, B, C, STOP, E1, E2, E3, E4, X_STO, P_X = range(1, 11)


CAUSES = WaitCauses(queued_before=3, limit="rows")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE({word: index for index, word in enumerate(WORDS)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


@pytest.fixture
def processor(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer, [EOS])


def request(adapter: AdapterRef | None = None, **sampling: object) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    return EngineRequest(
        request_id="r", namespace=bytes(32), prompt_token_ids=[A, B], sampling=params, adapter=adapter
    )


def token(
    token_id: int | None,
    finish: FinishReason | None = None,
    stopped_by: int | None = None,
    choice: int = 0,
    logprob: TokenLogprob | None = None,
) -> StepOutput:
    sequence = Sequence(
        request(), choice, arrival=0.0, seed=0, token_ids=[], num_cached_tokens=2, causes=CAUSES
    )
    sequence.stopped_by = stopped_by
    return StepOutput(sequence, NO_TOKEN if token_id is None else token_id, logprob, finish, first=False)


def run(processor: OutputProcessor, outputs: list[StepOutput], at_once: bool = False) -> ProcessedOutputs:
    if at_once:
        return processor.process(outputs)
    steps = [processor.process([output]) for output in outputs]
    return ProcessedOutputs(
        [event for step in steps for event in step.events], [key for step in steps for key in step.stopped]
    )


def text(events: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.choice == choice)


def token_ids(events: list[Event], choice: int = 0) -> list[int]:
    return [t for e in events if isinstance(e, Delta) and e.choice == choice for t in e.token_ids]


def finished(events: list[Event], choice: int = 0) -> Finished:
    return next(e for e in events if isinstance(e, Finished) and e.choice == choice)


def test_the_events_of_a_plain_request(processor: OutputProcessor) -> None:
    processor.start(request(AdapterRef(namespace=bytes(32), digest="d" * 64, blob_path="/blob")))
    events, stopped = run(processor, [token(A), token(B, "length")])
    assert events == [
        Started("r", "d" * 64, 2, causes=CAUSES),
        Delta("r", 0, [A], "a"),
        Delta("r", 0, [B], "b"),
        Finished("r", 0, "length", Usage(2, 2, 2)),
    ]
    assert stopped == []
    assert len(processor) == 0


def test_one_call_gives_one_delta_per_choice(processor: OutputProcessor) -> None:
    processor.start(request(n=2))
    outputs = [token(A), token(B, choice=1), token(C), token(B, "length", choice=1)]
    assert processor.process(outputs).events == [
        Started("r", None, 2, causes=CAUSES),
        Delta("r", 0, [A, C], "ac"),
        Delta("r", 1, [B, B], "bb"),
        Finished("r", 1, "length", Usage(2, 2, 2)),
    ]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stop_string_ends_the_choice_whenever_the_engine_notices(
    processor: OutputProcessor, at_once: bool
) -> None:
    processor.start(request(stop=("STOP",)))
    outputs = [token(A), token(X_STO), token(P_X), token(B), token(C, "length")]
    events, stopped = run(processor, outputs, at_once)
    assert text(events) == "ax"
    assert token_ids(events) == [A, X_STO, P_X]
    assert finished(events) == Finished("r", 0, "stop", Usage(2, 2, 3), "STOP")
    assert sum(isinstance(event, Finished) for event in events) == 1
    assert stopped == [("r", 0)]
    assert len(processor) == 0


def test_the_stop_string_is_included_if_requested_and_nothing_after_it(processor: OutputProcessor) -> None:
    processor.start(request(stop=("STOP",), include_stop_str_in_output=True))
    assert text(run(processor, [token(X_STO), token(P_X)]).events) == "xSTOP"


def test_a_stop_string_in_the_last_token_needs_no_stopping(processor: OutputProcessor) -> None:
    processor.start(request(stop=("STOP",)))
    events, stopped = run(processor, [token(A), token(STOP, "length")])
    assert finished(events).stop == "STOP"
    assert finished(events).reason == "stop"
    assert stopped == []


def test_held_back_text_comes_out_at_the_end(processor: OutputProcessor) -> None:
    processor.start(request(stop=("STOP",)))
    events, _ = run(processor, [token(X_STO), token(E1, "length")])
    assert text(events) == "xSTO\ufffd"
    assert token_ids(events) == [X_STO, E1]


def test_min_tokens_holds_off_stop_strings(processor: OutputProcessor) -> None:
    processor.start(request(stop=("STOP",), min_tokens=2))
    events, _ = run(processor, [token(A), token(STOP), token(STOP)])
    assert text(events) == "aSTOP"
    assert finished(events).usage.completion_tokens == 3


@pytest.mark.parametrize(("stopped_by", "last"), [(B, B), (None, EOS), (EOS, EOS)])
def test_the_text_of_a_stop_token_is_left_out(
    processor: OutputProcessor, stopped_by: int | None, last: int
) -> None:
    processor.start(request(stop_token_ids=(B,), skip_special_tokens=False))
    events, _ = run(processor, [token(A), token(last, "stop", stopped_by)])
    assert text(events) == "a"
    assert token_ids(events) == [A, last]
    assert finished(events) == Finished("r", 0, "stop", Usage(2, 2, 2), stopped_by)


def test_the_text_of_a_stop_token_is_included_if_requested(processor: OutputProcessor) -> None:
    processor.start(request(stop_token_ids=(B,), include_stop_str_in_output=True))
    assert text(run(processor, [token(A), token(B, "stop", B)]).events) == "ab"


def test_the_last_token_of_a_finished_grammar_is_text(processor: OutputProcessor) -> None:
    processor.start(request())
    assert text(run(processor, [token(A), token(B, "stop")]).events) == "ab"


def test_no_empty_deltas_and_no_lost_ids(processor: OutputProcessor) -> None:
    processor.start(request())
    events, _ = run(processor, [token(E1), token(E2), token(E3), token(E4), token(EOS, "stop", EOS)])
    assert [e for e in events if isinstance(e, Delta)] == [
        Delta("r", 0, [E1, E2, E3, E4], "😀"),
        Delta("r", 0, [EOS], ""),
    ]


def test_log_probabilities_are_not_held_back(processor: OutputProcessor) -> None:
    processor.start(request(logprobs=0))
    logprobs = [TokenLogprob(E1, -0.5), TokenLogprob(E2, -0.25)]
    events, _ = run(processor, [token(E1, logprob=logprobs[0]), token(E2, "length", logprob=logprobs[1])])
    assert [e for e in events if isinstance(e, Delta)] == [
        Delta("r", 0, [E1], "", [logprobs[0]]),
        Delta("r", 0, [E2], "\ufffd", [logprobs[1]]),
    ]


def test_an_abort_without_a_token_finishes_with_what_there_is(processor: OutputProcessor) -> None:
    processor.start(request(stop=("STOP",)))
    events, _ = run(processor, [token(X_STO), token(None, "abort")])
    assert text(events) == "xSTO"
    assert finished(events) == Finished("r", 0, "abort", Usage(2, 2, 1))


def test_a_dropped_request_is_silent(processor: OutputProcessor) -> None:
    processor.start(request())
    processor.drop("r")
    processor.drop("r")
    assert processor.process([token(A)]) == ([], [])


def test_a_running_id_is_refused(processor: OutputProcessor) -> None:
    processor.start(request())
    with pytest.raises(ValueError, match="already running"):
        processor.start(request())


class _BrokenDecoder:
    """Decodes every token but one."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if 7 in ids:
            raise RuntimeError("broken")
        return "x" * len(ids)

    def id_to_token(self, id: int) -> str | None:
        return "x"

    def token_to_id(self, token: str) -> int | None:
        return None


def test_a_request_that_cannot_be_decoded_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    processor = OutputProcessor(_BrokenDecoder())
    sampling = SamplingParams(max_tokens=9, n=2)
    bad, good = (
        EngineRequest(request_id=request_id, namespace=bytes(32), prompt_token_ids=[], sampling=sampling)
        for request_id in ("bad", "good")
    )
    processor.start(bad)
    processor.start(good)
    with caplog.at_level(logging.CRITICAL, logger="loraplex.engine.output.output_processor"):
        events, stopped = processor.process(
            [
                StepOutput(Sequence(each, choice, 0.0, 0, []), token_id, None, None, first=False)
                for each, choice, token_id in ((bad, 1, 1), (bad, 0, 7), (good, 0, 1))
            ]
        )
    assert [event for event in events if isinstance(event, Failed)] == [
        Failed("bad", "engine_error", "the output could not be turned into text: RuntimeError")
    ]
    assert [event for event in events if isinstance(event, Delta)] == [Delta("good", 0, [1], "x")]
    assert stopped == [("bad", 0), ("bad", 1)]
