"""Requests that another engine began: they go on behind every delta of it as if nothing had happened."""

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.engine.local_engine.conftest import Source
from tests.engine.local_engine.engine_requests import collect, finished, idle, request, text, tokens

from loraplex.engine.config import EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.messages import Delta, EngineRequest, Event, Failed, Finished, Started
from loraplex.engine.model_loading import LoadedModel

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask

DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 40}
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 40},
    "drawn": DRAWN,
    "choices": {**DRAWN, "n": 3},
    "log-probabilities": {**DRAWN, "logprobs": 3},
    "penalties": {**DRAWN, **PENALTIES},
    "a minimum": {**DRAWN, "min_tokens": 20, "stop_token_ids": tuple(range(3, 60))},
    "stop tokens": {**DRAWN, "stop_token_ids": (7, 9, 40, 41, 90), "include_stop_str_in_output": True},
    "stop strings": {**DRAWN, "stop": ("1><", "77", "3><5"), "min_tokens": 10},
}


def behind(wanted: EngineRequest, events: list[Event]) -> EngineRequest:
    """The request as a gateway sends it to the next engine after these events."""
    open_choices = {*range(wanted.sampling.n)} - {end.choice for end in finished(events)}
    received = {choice: tokens(events, choice) for choice in open_choices}
    return msgspec.structs.replace(wanted, received=received)


async def check_resumed(engine: LocalEngine, wanted: EngineRequest) -> list[Event]:
    """Cut behind each event; text, tokens and ends of both parts together are those of the whole. Returns the whole's events."""
    whole = await collect(engine, wanted)
    choices = range(wanted.sampling.n)
    for cut in range(1, len(whole)):
        before = whole[:cut]
        after = await collect(engine, behind(wanted, before))
        assert all(event.resumed for event in after if isinstance(event, Started) and len(before) > 1)
        parts = [*before, *after]
        for choice in choices:
            assert text(parts, choice) == text(whole, choice), cut
            assert tokens(parts, choice) == tokens(whole, choice), cut
        ends = {end.choice: (end.reason, end.stop, end.usage.completion_tokens) for end in finished(parts)}
        assert len(finished(parts)) == len(choices)
        assert ends == {
            end.choice: (end.reason, end.stop, end.usage.completion_tokens) for end in finished(whole)
        }
    return whole


@pytest.mark.parametrize("kind", KINDS)
async def test_what_follows_is_what_would_have_followed(engine: LocalEngine, core: Engine, kind: str) -> None:
    whole = await check_resumed(engine, request(**KINDS[kind]))
    assert len(whole) > 5
    await idle(core)


async def test_log_probabilities_go_on(engine: LocalEngine) -> None:
    wanted = request(**KINDS["log-probabilities"])
    whole = await collect(engine, wanted)
    before = whole[:9]
    after = await collect(engine, behind(wanted, before))

    def logprobs(events: list[Event]) -> list[Any]:
        return [entry for event in events if isinstance(event, Delta) for entry in event.logprobs or ()]

    found, expected = logprobs([*before, *after]), logprobs(whole)
    assert [each.token_id for each in found] == [each.token_id for each in expected]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-4)


async def test_a_choice_that_had_all_but_its_end_only_ends(engine: LocalEngine) -> None:
    wanted = request(n=2, **DRAWN)
    events = await collect(engine, wanted)
    all_sent = msgspec.structs.replace(wanted, received={0: tokens(events, 0), 1: tokens(events, 1)})
    rest = await collect(engine, all_sent)
    assert not [event for event in rest if isinstance(event, Delta)]
    assert {(end.choice, end.reason, end.usage.completion_tokens) for end in finished(rest)} == {
        (0, "length", 40),
        (1, "length", 40),
    }


@pytest.mark.parametrize("cut", [1, 4])
async def test_choices_go_on_behind_one_that_only_has_to_end(engine: LocalEngine, cut: int) -> None:
    wanted = request(n=3, **{**DRAWN, "max_tokens": 400})
    whole = await collect(engine, wanted)
    first = tokens(whole, 0)
    wanted = msgspec.structs.replace(
        request(n=3, **{**DRAWN, "max_tokens": 400, "stop_token_ids": (first[9],)}), first_token_timeout_s=0.2
    )
    whole = await collect(engine, wanted)
    assert len(tokens(whole, 0)) <= 10 and max(len(tokens(whole, choice)) for choice in (1, 2)) > 100
    received = {choice: tokens(whole, choice)[: 400 if choice == 0 else cut] for choice in range(3)}
    rest = await collect(engine, msgspec.structs.replace(wanted, received=received))
    for choice in range(3):
        assert received[choice] + tokens(rest, choice) == tokens(whole, choice)
    assert sorted(end.choice for end in finished(rest)) == [0, 1, 2]


async def test_what_is_cached_of_the_response_is_no_cached_prompt(engine: LocalEngine) -> None:
    wanted = request(max_tokens=60)
    whole = await collect(engine, wanted)
    rest = await collect(
        engine, msgspec.structs.replace(wanted, request_id="again", received={0: tokens(whole)[:50]})
    )
    (started,) = [event for event in rest if isinstance(event, Started)]
    (end,) = finished(rest)
    assert started.cached_tokens <= 3 and end.usage.cached_tokens <= end.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    "received",
    [{1: [3]}, {0: [3] * 13}, {0: [128]}],
    ids=["no such choice", "more than max_tokens", "no token of the vocabulary"],
)
async def test_a_response_that_cannot_be_is_refused(
    engine: LocalEngine, received: dict[int, list[int]]
) -> None:
    (refused,) = await collect(engine, msgspec.structs.replace(request(), received=received))
    assert isinstance(refused, Failed) and (refused.code, refused.field) == ("invalid_request", "received")


DOCUMENTS = [
    (20, *middle, last) for middle in ((30, 31), (30, 32, 33), (35,), (36, 37, 38, 39)) for last in (21, 22)
]


@pytest.mark.parametrize("options", [{}, {"fast_forward": True}, {"closes": True}], ids=str)
@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2}, {"n": 3}, {"max_tokens": 4}], ids=str)
async def test_a_grammar_goes_on(
    model: LoadedModel,
    settings: EngineConfig,
    source: Source,
    scripted_mask: "type[ScriptedMask]",
    options: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    def compiled(namespace: bytes, grammar: bytes) -> "ScriptedMask":
        return scripted_mask(DOCUMENTS, **options)

    local = LocalEngine(Engine(model, settings, source, mask_factory=compiled))
    try:
        for seed in range(4):
            wanted = request(grammar=b"{}", **{**DRAWN, "seed": seed, "ignore_eos": False, **sampling})
            whole = await check_resumed(local, wanted)
            assert all(isinstance(event, Started | Delta | Finished) for event in whole)
    finally:
        source.gate.set()
        await local.close()


async def test_a_response_outside_its_grammar_fails_alone(
    model: LoadedModel, settings: EngineConfig, source: Source, scripted_mask: "type[ScriptedMask]"
) -> None:
    local = LocalEngine(
        Engine(model, settings, source, mask_factory=lambda namespace, grammar: scripted_mask(DOCUMENTS))
    )
    try:
        wanted = msgspec.structs.replace(request(grammar=b"{}"), received={0: [99]})
        (failed,) = await collect(local, wanted)
        assert isinstance(failed, Failed) and failed.code == "grammar_failed"
        assert tokens(await collect(local, request("good", grammar=b"{}")))
    finally:
        source.gate.set()
        await local.close()
