"""A scripted engine with the interface of a real one, for tests, fault injection and load generators; it loads no model.

Invariant: a request's events are a function of the script, the prompt, the seed and the choice alone.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias

import msgspec

from loraplex.engine.errors import (
    EngineDraining,
    EngineError,
    InvalidRequest,
    NamespaceForgotten,
    PromptTooLong,
)
from loraplex.engine.messages import (
    NO_CAUSES,
    AdapterKey,
    AdapterRef,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    ProbeReport,
    Started,
    WaitCauses,
)
from loraplex.engine.scripted_choice import ScriptedChoice

FaultKind: TypeAlias = Literal["crash", "freeze", "hang", "stall", "nan", "fail"]

CRASH_STATUS = 70
FREEZE_SECONDS = 3600.0
MAX_DRAIN_POLL_S = 0.01
RECORDED = 1000

DEFAULT_INFO = EngineInfo(
    model_digest="0" * 64,
    system_fingerprint="fp_" + "fa4e" * 4,
    model_path="fake",
    architecture="FakeForCausalLM",
    vocab_size=32_000,
    max_model_len=4096,
    num_blocks=1024,
    block_size=16,
    dtype="float32",
)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault in a matching request, after `after_tokens` tokens of its first choice.

    crash ends the process, freeze blocks its event loop, hang stops every request without a step, stall stops this request,
    nan fails it with `non_finite_logits`, fail with `code`. `request_id` and `prompt_token`, one of the prompt's, None match all;
    `times` bounds how many requests are hit. `after_tokens` 0 strikes before `Started`.
    """

    kind: FaultKind
    after_tokens: int = 0
    request_id: str | None = None
    prompt_token: int | None = None
    times: int | None = None
    code: str = "engine_error"
    message: str = "scripted failure"
    field: str | None = None


class FakeScript(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of a `FakeEngine`. Times in seconds.

    `answers[c % len]` has the texts of the tokens of choice c, which then ends with "stop"; without answers text goes on
    until `max_tokens`. `token_ids`: those of such texts; the ids of others are drawn. `digest` "echo" reports the requested adapter;
    any other value is reported as is. `cached_tokens` is capped at the prompt's length, as is `prefilled_tokens`: the computed ones
    of a prompt that is aborted before `Started`.
    `queue_s` and `prefill_s` pass before `Started`, which reports them, `grammar_s`, `adapter_s` and `causes`.
    `stats` overrides numbers of `stats()` by field name, and names the newest `adapter_slots` adapters as those on the device;
    one that was not there before counts as a load. `probe` is the report of a probe, with the digest of the probed
    adapter. The process computes for `load_s` before it serves, or only waits where it is not `loads_busily`.
    """

    info: EngineInfo = DEFAULT_INFO
    load_s: float = 0.0
    loads_busily: bool = True
    start_delay_s: float = 0.0
    token_interval_s: float = 0.0
    tokens_per_delta: int = 1
    answers: tuple[tuple[str, ...], ...] = ()
    token_ids: dict[str, int] = {}
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    grammar_s: float = 0.0
    adapter_s: float = 0.0
    causes: WaitCauses = NO_CAUSES
    digest: str | None = "echo"
    faults: tuple[Fault, ...] = ()
    stats: EngineStats = EngineStats()
    adapter_slots: int = 0
    probe: ProbeReport = ProbeReport(digest="", modules=1, effect=1.0, bound=0.01, generated_tokens=8)


class _Abandoned(Exception):
    """The request was aborted."""


class _InjectedFault(Exception):
    """A scripted failure ends the request."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class FakeEngine:
    """An `EngineClient` that plays a `FakeScript`. Tests read `forgotten`, `aborts`, `running` and the last
    `RECORDED` of `requests` and `probed`.
    """

    def __init__(self, script: FakeScript | None = None) -> None:
        self.script = script or FakeScript()
        self.requests: list[EngineRequest] = []
        self.probed: list[AdapterRef] = []
        self.aborts = 0
        self.forgotten: list[bytes] = []
        self._live: dict[str, asyncio.Event] = {}
        self._adapters: dict[str, str] = {}
        self._namespaces: dict[str, bytes] = {}
        self._resident: dict[AdapterKey, None] = {}
        self._loads = 0
        self._injected = [0] * len(self.script.faults)
        self._draining = False
        self._hung = False
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._tokens = 0
        self._last_step = time.monotonic()

    @property
    def running(self) -> int:
        """Requests that were submitted and have neither ended nor been aborted."""
        return len(self._live)

    def info(self) -> EngineInfo:
        """Return the scripted facts of the model."""
        return self.script.info

    async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """Play the script for one request; see `EngineClient.submit`."""
        self.requests.append(request)
        del self.requests[:-RECORDED]
        try:
            self._check(request)
            with self._registered(request) as aborted:
                async for event in self._play(request, aborted):
                    yield event
        except InvalidRequest as error:
            yield Failed(request.request_id, error.code, str(error), error.field)
        except EngineError as error:
            yield Failed(request.request_id, error.code, str(error))
        except _InjectedFault as injected:
            yield _failure(request.request_id, injected.fault)

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        aborted = self._live.get(request_id)
        if aborted is not None and not aborted.is_set():
            aborted.set()

    async def probe(self, adapter: AdapterRef) -> ProbeReport:
        """Return the scripted report at once. Raises `EngineDraining` while draining."""
        if self._draining:
            raise EngineDraining("the engine is draining")
        self.probed.append(adapter)
        del self.probed[:-RECORDED]
        fingerprint = self.script.info.system_fingerprint
        return msgspec.structs.replace(
            self.script.probe, digest=adapter.digest, system_fingerprint=fingerprint
        )

    async def forget(self, namespace: bytes) -> None:
        """Fail the requests of a tenant. There are no blocks to drop."""
        self.forgotten.append(namespace)
        for request_id in [r for r, owner in self._namespaces.items() if owner == namespace]:
            self._namespaces[request_id] = b""
            await self.abort(request_id)

    async def wait_ready(self) -> None:
        """Return at once."""

    async def stats(self) -> EngineStats:
        """Return the scripted numbers, with live counters where there are any."""
        waits = self.running > 0 or self._hung
        return msgspec.structs.replace(
            self.script.stats,
            running=self.script.stats.running + self.running,
            running_adapters=sorted(set(self._adapters.values())),
            resident_adapters=[digest for _, digest in self._resident] or self.script.stats.resident_adapters,
            device_adapters=list(self._resident) or self.script.stats.device_adapters,
            adapter_loads=self.script.stats.adapter_loads + self._loads,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_tokens,
            generation_tokens=self._tokens,
            aborted_requests=self.aborts,
            steps=self._tokens,
            heartbeat_age_s=time.monotonic() - self._last_step if waits else 0.0,
            draining=self._draining,
        )

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        self._draining = True
        while self._live:
            await asyncio.sleep(MAX_DRAIN_POLL_S)

    def _check(self, request: EngineRequest) -> None:
        if self._draining:
            raise EngineDraining("the engine is draining")
        if request.request_id in self._live:
            raise InvalidRequest("request_id", "`request_id` is in use")
        request.sampling.validate(self.script.info.vocab_size, scores=request.scores is not None)
        limit, prompt = self.script.info.max_model_len, len(request.prompt_token_ids)
        if prompt + request.sampling.max_tokens > limit:
            raise PromptTooLong(limit, prompt, request.sampling.max_tokens)

    @contextmanager
    def _registered(self, request: EngineRequest) -> Iterator[asyncio.Event]:
        if not self._live:
            self._last_step = time.monotonic()
        aborted = self._live[request.request_id] = asyncio.Event()
        self._namespaces[request.request_id] = request.namespace
        if request.adapter is not None:
            self._adapters[request.request_id] = request.adapter.digest
            self._use(request.adapter)
        finished = False
        try:
            yield aborted
            finished = not aborted.is_set()
        except (_InjectedFault, EngineError):
            finished = True
            raise
        finally:
            del self._live[request.request_id]
            self._adapters.pop(request.request_id, None)
            del self._namespaces[request.request_id]
            self.aborts += not finished

    def _use(self, adapter: AdapterRef) -> None:
        if self.script.adapter_slots == 0:
            return
        self._loads += adapter.key not in self._resident
        self._resident.pop(adapter.key, None)
        self._resident[adapter.key] = None
        while len(self._resident) > self.script.adapter_slots:
            del self._resident[next(iter(self._resident))]

    async def _play(self, request: EngineRequest, aborted: asyncio.Event) -> AsyncIterator[Event]:
        choices = [self._choice(request, index) for index in request.open_choices]
        try:
            await self._inject_due(request, 0, aborted)
            script = self.script
            await self._pause(script.start_delay_s + script.queue_s + script.prefill_s, aborted)
            yield self._start(request)
            for choice in choices:
                choice.num_prefilled = len(request.prompt_token_ids)
                for score in choice.score():
                    yield score
                if request.received and request.sampling.max_tokens and choice.reason is not None:
                    yield choice.finish(choice.reason)
            produced = 0
            while any(choice.reason is None for choice in choices):
                await self._pause(self.script.token_interval_s * self.script.tokens_per_delta, aborted)
                produced += self.script.tokens_per_delta
                for choice in choices:
                    for event in choice.step(self.script.tokens_per_delta):
                        yield event
                self._count_step(choices)
                await self._inject_due(request, produced, aborted)
        except _Abandoned:
            if self._namespaces[request.request_id] != request.namespace:
                raise NamespaceForgotten("the tenant of this request was deleted") from None
            for choice in choices:
                if choice.reason is None:
                    yield choice.finish("abort")

    def _choice(self, request: EngineRequest, index: int) -> ScriptedChoice:
        script = self.script
        return ScriptedChoice(
            request,
            index,
            answer=script.answers[index % len(script.answers)] if script.answers else None,
            token_ids=script.token_ids,
            vocab_size=script.info.vocab_size,
            cached_tokens=script.cached_tokens,
            prefilled_tokens=script.prefilled_tokens,
        )

    def _start(self, request: EngineRequest) -> Started:
        cached = min(self.script.cached_tokens, len(request.prompt_token_ids))
        self._prompt_tokens += len(request.prompt_token_ids)
        self._cached_tokens += cached
        digest = request.adapter.digest if request.adapter is not None else None
        script = self.script
        return Started(
            request.request_id,
            digest if script.digest == "echo" else script.digest,
            cached,
            queue_s=script.queue_s,
            prefill_s=script.prefill_s,
            grammar_s=script.grammar_s,
            adapter_s=script.adapter_s,
            causes=script.causes,
            system_fingerprint=script.info.system_fingerprint,
            resumed=bool(request.received),
        )

    def _count_step(self, choices: list[ScriptedChoice]) -> None:
        self._tokens += sum(choice.step_tokens for choice in choices)
        self._last_step = time.monotonic()

    async def _pause(self, seconds: float, aborted: asyncio.Event) -> None:
        """Wait for `seconds`, or for ever when the engine hangs; return at once when aborted."""
        if seconds <= 0.0 and not self._hung:
            await asyncio.sleep(0)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._hung else seconds):
                    await aborted.wait()
        if aborted.is_set():
            raise _Abandoned

    async def _inject_due(self, request: EngineRequest, produced: int, aborted: asyncio.Event) -> None:
        for index, fault in enumerate(self.script.faults):
            before = produced - self.script.tokens_per_delta if produced else -1
            due = before < fault.after_tokens <= produced
            matches = fault.request_id in (None, request.request_id)
            matches = matches and fault.prompt_token in (None, *request.prompt_token_ids)
            if due and matches and (fault.times is None or self._injected[index] < fault.times):
                self._injected[index] += 1
                await self._inject(fault, aborted)

    async def _inject(self, fault: Fault, aborted: asyncio.Event) -> None:
        match fault.kind:
            case "crash":
                os._exit(CRASH_STATUS)
            case "freeze":
                _freeze()
            case "hang":
                self._hung = True
                await self._pause(0.0, aborted)
            case "stall":
                await aborted.wait()
                raise _Abandoned
            case "nan" | "fail":
                raise _InjectedFault(fault)


def _freeze() -> None:
    time.sleep(FREEZE_SECONDS)


def _failure(request_id: str, fault: Fault) -> Failed:
    if fault.kind == "nan":
        return Failed(request_id, "non_finite_logits", "the model produced a non-finite number")
    return Failed(request_id, fault.code, fault.message, fault.field)
