"""`LocalEngine` as a gateway uses it: streams, aborts at every stage, stop strings, drain, and a step loop that dies."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine import local_engine
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from loraplex.engine.engine import Engine, StepResult
from loraplex.engine.errors import AdapterLoadFailed, EngineLost, EngineUnavailable
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.lora.weights import LoraWeights
from loraplex.engine.messages import (
    AdapterRef,
    Delta,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    Finished,
    Started,
    Usage,
)
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.runner.launched_step import LaunchedStep
from loraplex.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask

VOCAB = 128
NAMESPACE = bytes(32)


class Source:
    """Knows no adapter. A load waits for `gate`, so that a test can look at a request while it waits."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked = threading.Event()

    def load(self, adapter: AdapterRef) -> LoraWeights:
        self.asked.set()
        self.gate.wait(60)
        raise AdapterLoadFailed(f"no adapter {adapter.digest}")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("local-engine")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    # One word per token, joined without spaces, so that a stop string may span tokens.
    tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    cache = CacheConfig(block_size=8, num_blocks=600)
    return EngineConfig(model=str(folder), dtype="float32", device="cpu", cache=cache)


@pytest.fixture(scope="module")
def model(settings: EngineConfig) -> LoadedModel:
    return load_model(settings)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture(params=["off", "on"])
def core(
    request: pytest.FixtureRequest, model: LoadedModel, settings: EngineConfig, source: Source
) -> Engine:
    """With a step ahead of the results, and without."""
    return Engine(model, replace(settings, scheduler=SchedulerConfig(overlap=request.param)), source)


@pytest.fixture
async def engine(core: Engine, source: Source) -> AsyncIterator[LocalEngine]:
    local = LocalEngine(core)
    yield local
    source.gate.set()
    await local.close()


def request(
    request_id: str = "r", *, adapter: str | None = None, grammar: bytes | None = None, **sampling: Any
) -> EngineRequest:
    settings = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | sampling
    return EngineRequest(
        request_id=request_id,
        namespace=NAMESPACE,
        prompt_token_ids=[5, 9, 17],
        sampling=SamplingParams(**settings),
        adapter=AdapterRef(namespace=NAMESPACE, digest=adapter, blob_path="") if adapter else None,
        grammar=grammar,
    )


def replace_namespace(wanted: EngineRequest, namespace: bytes) -> EngineRequest:
    return msgspec.structs.replace(wanted, namespace=namespace)


async def collect(engine: LocalEngine, wanted: EngineRequest) -> list[Event]:
    return [event async for event in engine.submit(wanted)]


def text(events: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.choice == choice)


def tokens(events: list[Event], choice: int = 0) -> list[int]:
    return [i for e in events if isinstance(e, Delta) and e.choice == choice for i in e.token_ids]


def finished(events: list[Event]) -> list[Finished]:
    return [event for event in events if isinstance(event, Finished)]


async def idle(core: Engine) -> EngineStats:
    """The engine's numbers once it holds nothing, which must come to pass without further ado."""
    async with asyncio.timeout(60):
        while core.has_unfinished:
            await asyncio.sleep(0.005)
    stats = core.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert core.adapters.num_pinned == 0
    return stats


async def test_a_stream_starts_runs_and_ends_once(engine: LocalEngine) -> None:
    events = await collect(engine, request())
    started = events[0]
    assert isinstance(started, Started)
    assert (started.request_id, started.digest, started.cached_tokens) == ("r", None, 0)
    assert started.queue_s > 0 and started.prefill_s > 0
    assert len(tokens(events)) == 12
    (end,) = finished(events)
    assert end is events[-1] and end.reason == "length"
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 12)
    assert text(events) == "".join(f"<{i}>" for i in tokens(events))


async def test_streams_run_together_and_alike(engine: LocalEngine) -> None:
    async with asyncio.timeout(60):
        all_events = await asyncio.gather(*(collect(engine, request(f"r{i}")) for i in range(20)))
    assert len({text(events) for events in all_events}) == 1
    assert all(event.request_id == f"r{i}" for i, events in enumerate(all_events) for event in events)


async def test_a_step_in_flight_is_completed_before_the_loop_waits(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sends anything more: an adapter that the step reads would stay pinned for as long."""
    monkeypatch.setattr(local_engine, "IDLE_WAIT_S", 600.0)
    stop = tokens(await collect(engine, request()))[4]
    await collect(engine, request(stop_token_ids=(stop,)))
    await idle(core)


async def test_each_choice_finishes_once(engine: LocalEngine) -> None:
    events = await collect(engine, request(n=3, temperature=1.0, seed=3))
    assert sorted(end.choice for end in finished(events)) == [0, 1, 2]
    assert len({tuple(tokens(events, choice)) for choice in range(3)}) == 3
    assert sum(isinstance(event, Started) for event in events) == 1


async def test_a_stop_string_across_tokens_ends_the_sequence(engine: LocalEngine, core: Engine) -> None:
    whole = text(await collect(engine, request("whole", max_tokens=40)))
    words = whole.split(">")
    stop = f"{words[3][-1]}>{words[4][:2]}"
    events = await collect(engine, request("stopped", max_tokens=3000, stop=(stop,)))
    (end,) = finished(events)
    assert (end.reason, end.stop) == ("stop", stop)
    assert text(events) == whole[: whole.index(stop)]
    assert end.usage.completion_tokens < 40
    assert (await idle(core)).generation_tokens < 3000


async def test_a_stop_string_ends_one_choice_of_many(engine: LocalEngine) -> None:
    sampling: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 5, "max_tokens": 30}
    whole = await collect(engine, request("whole", **sampling))
    stop = "".join(f"<{i}>" for i in tokens(whole, 2)[4:6])
    events = await collect(engine, request("stopped", stop=(stop,), **sampling))
    reasons = {end.choice: end.reason for end in finished(events)}
    assert reasons[2] == "stop" and "length" in reasons.values()
    for choice in range(4):
        assert text(events, choice) == text(whole, choice).partition(stop)[0]


async def test_abort_before_the_first_token(engine: LocalEngine, core: Engine, source: Source) -> None:
    stream = engine.submit(request(adapter="slow"))
    first = asyncio.ensure_future(anext(stream))
    assert await asyncio.to_thread(source.asked.wait, 60)
    assert not first.done()
    await engine.abort("r")
    aborted = await first
    assert isinstance(aborted, Finished) and aborted.reason == "abort"
    await idle(core)


@pytest.mark.parametrize("end", ["abort", "deadline"])
@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_the_computed_part_of_a_prompt_is_reported(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch, steps: int, end: str
) -> None:
    """A step computes 256 tokens of a prompt of 700. One that is launched ahead counts."""
    wanted, reached, step, taken = request(), threading.Event(), core.step, 0

    def limited_step() -> StepResult:
        nonlocal taken
        if core.scheduler.has_unfinished and taken < steps:
            taken += 1
            return step()
        reached.set()
        if end == "abort":
            return StepResult([], [], ran=False)
        time.sleep(0.2)
        return step()

    monkeypatch.setattr(core, "step", limited_step)
    prompt_ids = [index % 100 + 3 for index in range(700)]
    timeout_s = 0.1 if end == "deadline" else None
    wanted = msgspec.structs.replace(wanted, prompt_token_ids=prompt_ids, total_timeout_s=timeout_s)
    task = asyncio.ensure_future(collect(engine, wanted))
    assert await asyncio.to_thread(reached.wait, 60)
    if end == "abort":
        await engine.abort("r")
    async with asyncio.timeout(60):
        (last,) = await task
    used = Usage(256 * steps, 0, 0)
    if end == "abort":
        assert last == Finished("r", 0, "abort", used)
    else:
        assert isinstance(last, Failed) and (last.code, last.usage) == ("timeout", {0: used})
    monkeypatch.setattr(core, "step", step)
    await idle(core)


async def test_abort_while_it_streams(engine: LocalEngine, core: Engine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    async with asyncio.timeout(60):
        assert isinstance(await anext(stream), Started)
        assert isinstance(await anext(stream), Delta)
        await engine.abort("r")
        rest = [event async for event in stream]
    assert isinstance(rest[-1], Finished) and rest[-1].reason == "abort"
    assert (await idle(core)).aborted_requests == 1


async def test_a_forgotten_tenant_ends_and_leaves_no_block(engine: LocalEngine, core: Engine) -> None:
    other = replace_namespace(request("other", max_tokens=40), b"o" * 32)
    kept = asyncio.ensure_future(collect(engine, other))
    stream = engine.submit(request(max_tokens=3000))
    async with asyncio.timeout(60):
        assert isinstance(await anext(stream), Started)
        await engine.forget(NAMESPACE)
        rest = [event async for event in stream]
        assert isinstance(rest[-1], Failed) and rest[-1].code == "namespace_forgotten"
        assert rest[-1].usage == {}
        assert finished(await kept)
    cached = (await idle(core)).cached_blocks
    assert cached > 0
    # Only the other tenant's blocks were left: forgetting it as well leaves none.
    await engine.forget(NAMESPACE)
    assert (await idle(core)).cached_blocks == cached
    await engine.forget(other.namespace)
    assert (await idle(core)).cached_blocks == 0


async def test_abort_is_idempotent_and_ignores_unknown_requests(engine: LocalEngine) -> None:
    await engine.abort("never seen")
    events = await collect(engine, request())
    await engine.abort("r")
    await engine.abort("r")
    assert finished(events)
    assert (await engine.stats()).aborted_requests == 0


async def test_an_id_may_be_used_again_after_an_abort(engine: LocalEngine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    await anext(stream)
    await engine.abort("r")
    assert [event async for event in stream]
    events = await collect(engine, request())
    assert len(tokens(events)) == 12 and finished(events)


async def test_closing_the_iterator_frees_the_engine(engine: LocalEngine, core: Engine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await idle(core)).generation_tokens < 3000


async def test_an_unknown_adapter_fails_alone(engine: LocalEngine, source: Source) -> None:
    source.gate.set()
    bad, good = await asyncio.gather(
        collect(engine, request("bad", adapter="unknown")), collect(engine, request("good"))
    )
    assert bad == [Failed("bad", "adapter_load_failed", "no adapter unknown")]
    assert finished(good)
    assert (await engine.stats()).adapter_load_failures == 1


async def test_invalid_requests_fail_with_their_field(engine: LocalEngine) -> None:
    (failed,) = await collect(engine, request(max_tokens=100_000))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == ("context_length_exceeded", "prompt")


async def test_an_id_in_use_is_refused(engine: LocalEngine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    await anext(stream)
    (failed,) = await collect(engine, request())
    assert isinstance(failed, Failed) and failed.field == "request_id"
    assert isinstance(await anext(stream), Delta)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_stats_count(engine: LocalEngine) -> None:
    await collect(engine, request("one"))
    await collect(engine, request("two"))
    stats = await engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (6, 24)
    assert stats.steps >= 24 and stats.step_seconds > 0
    assert stats.heartbeat_age_s < 60 and not stats.draining
    assert engine.info().vocab_size == VOCAB and engine.info().dtype == "float32"


async def test_drain_waits_for_the_running_and_refuses_the_new(engine: LocalEngine) -> None:
    running = engine.submit(request("running", max_tokens=600))
    assert isinstance(await anext(running), Started)
    drained = asyncio.ensure_future(engine.drain())
    await asyncio.sleep(0)
    (refused,) = await collect(engine, request("late"))
    assert isinstance(refused, Failed) and refused.code == "engine_unavailable"
    assert not drained.done()
    async with asyncio.timeout(60):
        assert len(tokens([event async for event in running])) == 600
        await drained
    assert (await engine.stats()).draining


async def test_a_dead_step_loop_fails_all_requests(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [engine.submit(request(f"r{i}", max_tokens=3000)) for i in range(3)]
    for stream in streams:
        assert isinstance(await anext(stream), Started)

    def crash() -> StepResult:
        raise RuntimeError("a defect")

    monkeypatch.setattr(core, "step", crash)
    async with asyncio.timeout(60):
        for stream in streams:
            events = [event async for event in stream]
            assert isinstance(events[-1], Failed) and events[-1].code == EngineLost.code
        (refused,) = await collect(engine, request("late"))
        assert isinstance(refused, Failed) and refused.code == EngineUnavailable.code
        with pytest.raises(EngineUnavailable):
            await engine.stats()
        await engine.abort("r0")
        await engine.drain()


async def test_a_request_that_makes_its_steps_raise_fails_alone(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = core.runner.launch

    def launch_or_raise(plan: StepPlan, rows: list[PlannedRow] | None = None) -> LaunchedStep:
        if any(row.sequence.request_id == "bad" for row in plan.rows):
            raise RuntimeError("a defect")
        return launch(plan, rows)

    monkeypatch.setattr(core.runner, "launch", launch_or_raise)
    async with asyncio.timeout(60):
        bad, good = await asyncio.gather(*(collect(engine, request(name)) for name in ("bad", "good")))
    assert bad == [Failed("bad", "engine_error", "the computation of this request failed")]
    assert finished(good)[0].reason == "length"
    await idle(core)


async def test_an_abort_on_its_way_to_a_dying_loop_returns(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()

    def crash() -> StepResult:
        entered.set()
        gate.wait(60)
        raise RuntimeError("a defect")

    monkeypatch.setattr(core, "step", crash)
    running = asyncio.ensure_future(collect(engine, request()))
    assert await asyncio.to_thread(entered.wait, 60)
    abort = asyncio.ensure_future(engine.abort("r"))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(abort, 60)
    assert isinstance((await asyncio.wait_for(running, 60))[-1], Failed)


async def test_a_cancelled_abort_harms_no_other_request(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate, step = threading.Event(), threading.Event(), core.step

    def slow_step() -> StepResult:
        entered.set()
        gate.wait(60)
        return step()

    monkeypatch.setattr(core, "step", slow_step)
    running = asyncio.ensure_future(collect(engine, request("running")))
    assert await asyncio.to_thread(entered.wait, 60)
    abort = asyncio.ensure_future(engine.abort("another"))
    await asyncio.sleep(0)
    abort.cancel()
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(60):
        assert finished(await running)
        await engine.abort("another")
    await engine.stats()


async def test_close_ends_every_stream_and_what_comes_later_is_refused(engine: LocalEngine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    assert isinstance(await anext(stream), Started)
    async with asyncio.timeout(60):
        await engine.close()
        last = [event async for event in stream][-1]
        assert last == Failed("r", EngineUnavailable.code, "the engine is closed")
        assert isinstance((await collect(engine, request("late")))[0], Failed)
        await engine.abort("r")
        await engine.drain()
        with pytest.raises(EngineUnavailable, match="closed"):
            await engine.stats()
        await engine.close()


async def test_a_dead_output_thread_fails_all_requests(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(wanted: EngineRequest) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(engine._processor, "start", crash)
    async with asyncio.timeout(60):
        (failed,) = await collect(engine, request())
        assert failed == Failed("r", EngineLost.code, "the engine failed")
        with pytest.raises(EngineUnavailable):
            await engine.stats()


async def test_an_abort_does_not_finish_a_stopped_choice_again(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 7}
    whole = await collect(engine, request("whole", max_tokens=30, **sampling))
    stop = "".join(f"<{i}>" for i in tokens(whole, 0)[4:6])
    # The step thread learns of the stop string late: never.
    monkeypatch.setattr(core, "finish", lambda sequence, reason: None)
    stream = engine.submit(request(max_tokens=3000, stop=(stop,), **sampling))
    events: list[Event] = []
    async with asyncio.timeout(60):
        async for event in stream:
            events.append(event)
            if isinstance(event, Finished) and event.reason == "stop":
                await engine.abort("r")
    assert [(end.choice, end.reason) for end in finished(events)] == [(0, "stop"), (1, "abort")]


class Grammars:
    """Hands out masks of one document, `FORCED` after two choices, as soon as `gate` is open."""

    def __init__(self, scripted_mask: "type[ScriptedMask]") -> None:
        self._mask = scripted_mask
        self.asked, self.gate = threading.Event(), threading.Event()

    def __call__(self, namespace: bytes, grammar: bytes) -> "ScriptedMask":
        self.asked.set()
        assert self.gate.wait(60)
        return self._mask([(first, *FORCED) for first in (20, 21)], fast_forward=True)


FORCED = (30, 31, 32, 33)


@pytest.fixture
async def grammars(
    model: LoadedModel, settings: EngineConfig, source: Source, scripted_mask: "type[ScriptedMask]"
) -> AsyncIterator[tuple[Grammars, LocalEngine]]:
    factory = Grammars(scripted_mask)
    local = LocalEngine(Engine(model, settings, source, mask_factory=factory))
    yield factory, local
    factory.gate.set()
    source.gate.set()
    await local.close()


async def test_forced_tokens_come_in_one_delta(grammars: tuple[Grammars, LocalEngine]) -> None:
    factory, engine = grammars
    factory.gate.set()
    events = await collect(engine, request(grammar=b"{}"))
    assert tokens(events)[1:] == list(FORCED) and tokens(events)[0] in (20, 21)
    assert sum(isinstance(event, Delta) for event in events) == 1
    (end,) = finished(events)
    assert (end.reason, end.stop, end.usage.completion_tokens) == ("stop", None, 5)
    assert text(events).endswith("<30><31><32><33>")


async def test_a_stop_string_among_forced_tokens_cuts_the_rest(
    grammars: tuple[Grammars, LocalEngine],
) -> None:
    factory, engine = grammars
    factory.gate.set()
    events = await collect(engine, request(grammar=b"{}", stop=("<31>",)))
    (end,) = finished(events)
    assert (end.reason, end.stop, end.usage.completion_tokens) == ("stop", "<31>", 3)
    assert text(events).endswith("<30>")


async def test_an_abort_while_the_grammar_is_compiled(grammars: tuple[Grammars, LocalEngine]) -> None:
    factory, engine = grammars
    first = asyncio.ensure_future(anext(engine.submit(request("waits", grammar=b"{}"))))
    assert await asyncio.to_thread(factory.asked.wait, 60)
    assert len(tokens(await collect(engine, request("free")))) == 12
    await engine.abort("waits")
    aborted = await first
    assert isinstance(aborted, Finished) and aborted.reason == "abort"
    factory.gate.set()
    assert finished(await collect(engine, request("next", grammar=b"{}")))[0].reason == "stop"
    assert (await engine.stats()).waiting_for_grammar == 0
