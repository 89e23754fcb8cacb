"""One running inference request, from submission to its end: checks the adapter, takes the times, settles the usage.

Invariant: nothing is delivered before the engine has reported the resolved adapter as the one it uses, and before the
reservation is in the journal.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from loraplex.engine.errors import (
    EngineOverloaded,
    EngineUnavailable,
    QueueShareExceeded,
    RequestTimeout,
)
from loraplex.engine.messages import Delta, EngineRequest, Event, Failed, Finished, Scored, Started
from loraplex.engine.sampling_params import SamplingParams
from loraplex.grammar.errors import SchemaNotSatisfied
from loraplex.platform.errors import AdapterMismatch, EngineFailed, GatewayError, RequestRevoked
from loraplex.platform.inference.admission import PendingAdmission
from loraplex.platform.inference.choice_probabilities import ScoredChoices
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.engine_streams import EnginePlaces, EngineStreams
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.resumable_stream import ResumptionPolicy
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.platform.inference.thought import ThoughtTokens
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.tenants.quotas.reservation import Outcome, RequestTimings, SettledUsage

ENFORCEMENT_HEADER = "x-loraplex-schema-enforcement"
RESUMED_HEADER = "x-loraplex-resumed"
OVERLOADED: Final = (EngineOverloaded.code, QueueShareExceeded.code)
STOP_S: Final = 1.0
"""How long an engine that aborts a request, and a client that reads it, may take until it ends without them."""

ChoiceEvent: TypeAlias = Scored | Delta | Finished


class GenerationObserver(Protocol):
    """Sees what a generation delivers, and, once, its end: by `error`, if there is one."""

    def observe(self, choice: int, event: ChoiceEvent) -> None: ...

    def end(self, error: BaseException | None) -> None: ...


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """What a response repeats of its prompts: `echo`, their texts; log-probabilities with so many alternatives, beside the
    echo and as `prompt_logprobs`. None: without.
    """

    echo: list[str] | None = None
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsBehind:
    """The last requests of a generation score behind its prompts, which they repeat.

    `after`: request -> the one before it that computes what they have in common. `sequences`: theirs. `lengths`: the tokens of each
    request that count, of these what they add; empty: those of its prompt. `cacheable`: as in `RequestStats`. `places`: those of all
    sequences of the generation in the engine.
    """

    after: Mapping[int, int] = field(default_factory=dict)
    sequences: int = 0
    lengths: Sequence[int] = ()
    cacheable: int = sys.maxsize
    places: EnginePlaces | None = None


class Generation:
    """One running request: one engine request per prompt, `n` choices each. `close` ends it at any stage.

    Raises what `PoisonMemory.check` raises.

    Choice c of prompt p has the index p * n + c, as in the OpenAI API. `output` is None for plain text.
    `free_slots` frees the places of its sequences. `is_recorded`: its end is, or will be, in the usage ledger. `scored`: the
    requests behind the prompts score these choices. `scores`: what each of `behind` has scored, by its index.
    """

    def __init__(
        self,
        dependencies: GatewayDependencies,
        free_slots: Callable[[], None],
        model: ResolvedModel,
        requests: Sequence[EngineRequest],
        pending: PendingAdmission,
        arrival: float,
        output: ConstrainedOutput | None = None,
        scored: ScoredChoices | None = None,
        prompt_output: PromptOutput = PromptOutput(),
        behind: RowsBehind = RowsBehind(),
    ) -> None:
        self.prompt_output = prompt_output
        self.model = model
        self.output = output
        self.n = requests[0].sampling.n
        self.num_prompts = len(requests) - len(behind.after)
        self.choices = self.num_prompts * self.n
        self._scored = scored
        thought = None if output is None else output.thought
        self._dependencies = dependencies
        self._free_slots = free_slots
        self._pending = pending
        self._requests = requests
        self._num_sequences = self.n * self.num_prompts + behind.sequences
        self._closed = False
        self._stopped: RequestRevoked | None = None
        self._delivering: asyncio.Timeout | None = None
        self._refused = False
        self.is_recorded = True
        self.token_ids: list[list[int]] | None = None
        self.observer: GenerationObserver | None = None
        poison_memory = dependencies.poison_memory
        for request in requests if poison_memory.entries else ():
            poison_memory.check(request, None if output is None else output.param)
        self.stats = RequestStats(
            arrival=arrival,
            n=self.n,
            max_tokens=requests[0].sampling.max_tokens,
            prompt_lengths=behind.lengths or [*map(len, self.prompts)],
            num_prompts=self.num_prompts,
            cacheable=behind.cacheable,
            thought_counter=None
            if thought is None
            else partial(ThoughtTokens, thought, dependencies.token_text),
            submitted=time.monotonic(),
            gateway_phases=pending.record.phases,
            gateway_causes=pending.record.causes,
        )
        pending.record.stats = self.stats
        resumption = ResumptionPolicy(dependencies.config.engine_restart_s, poison_memory.refuses)
        self._streams = EngineStreams(
            dependencies.engine, requests, self.stats, behind.after, resumption, behind.places
        )
        self._started: set[int] = set()
        self.scores: dict[int, list[Scored]] = {}
        # An engine of the last release knows no scores.
        scored_prompts = enumerate(requests[: self.num_prompts])
        self._missing = {index for index, request in scored_prompts if request.scores is not None}
        self._missing.update(behind.after)

    def first_token(self, choice: int) -> int:
        """Return the first token of a choice's prompt, which has no log-probability."""
        return self._requests[choice // self.n].prompt_token_ids[0]

    def echo(self, choice: int) -> str:
        """Return the text of the prompt, where a choice begins with it."""
        texts = self.prompt_output.echo
        return "" if texts is None else texts[choice // self.n]

    def choice_probabilities(self, choice: int) -> dict[str, Any]:
        """Return the field of this name, if the request asks: the allowed choices behind the prompt of a choice."""
        if self._scored is None:
            return {}
        scores = self.scores[self.num_prompts + choice // self.n]
        return {"choice_probabilities": self._scored.probabilities(scores)}

    def keep_token_ids(self) -> None:
        """Keep the token ids of each choice in `token_ids` as they are delivered."""
        self.token_ids = [[] for _ in range(self.choices)]

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt."""
        return [request.prompt_token_ids for request in self._requests[: self.num_prompts]]

    @property
    def sampling(self) -> SamplingParams:
        """How the tokens of each choice are sampled."""
        return self._requests[0].sampling

    def headers(self) -> dict[str, str]:
        """Return the response headers: the adapter, how its schemas are enforced, how often another engine went on so far."""
        headers = dict(self.model.headers())
        enforcement = None if self.output is None else self.output.plan.described_enforcement
        if enforcement is not None:
            headers[ENFORCEMENT_HEADER] = enforcement
        if self.stats.resumed:
            headers[RESUMED_HEADER] = str(self.stats.resumed)
        return headers

    async def start(self) -> None:
        """Wait for the reservation and the engine's first event, which come in any order.

        Raises `EngineFailed`, `AdapterMismatch`, and what `PendingAdmission.reservation` raises.
        """
        try:
            reservation = await self._pending.reservation()
        except Exception:
            self._refused = True
            raise
        self._dependencies.admission_controller.follow(reservation, self._used_so_far)
        prompt, event = await self._streams.next() or (0, None)
        self._on_started(prompt, event)

    async def events(self) -> AsyncGenerator[tuple[int, ChoiceEvent], None]:
        """Yield (choice, event) until every choice has finished. Raises `EngineFailed`, `AdapterMismatch`, `RequestRevoked`."""
        while (received := await self._streams.next()) is not None:
            prompt, event = received
            if prompt not in self._started:
                self._on_started(prompt, event)
                continue
            if prompt >= self.num_prompts and not isinstance(event, Failed):
                if isinstance(event, Scored):
                    self.scores.setdefault(prompt, []).append(event)
            elif isinstance(event, Scored):
                self._missing.discard(prompt)
                for choice in range(prompt * self.n, (prompt + 1) * self.n):
                    yield choice, event
            elif isinstance(event, Delta):
                choice = prompt * self.n + event.choice
                self.stats.deliver(choice, len(event.token_ids), time.monotonic())
                if self.token_ids is not None:
                    self.token_ids[choice] += event.token_ids
                if self.observer is not None:
                    self.observer.observe(choice, event)
                yield choice, event
            elif isinstance(event, Finished) and event.reason != "abort" and prompt not in self._missing:
                choice = prompt * self.n + event.choice
                if self.observer is not None:
                    self.observer.observe(choice, event)
                yield choice, event
            else:
                raise self._failure(event)
        if not self._is_complete():
            raise self._failure(None)

    def stop(self, error: RequestRevoked) -> None:
        """End the request: what the engine computes until it is aborted is still delivered; then `events` raises `error`."""
        self._stopped = error
        self._dependencies.background_tasks.begin(self._streams.abort())
        if self._delivering is not None:
            self._delivering.reschedule(asyncio.get_running_loop().time() + STOP_S)

    @asynccontextmanager
    async def delivering(self) -> AsyncIterator[None]:
        """Run a block that sends the events. Where `stop` does not end it soon, it is cancelled: no reader, and no engine that
        hangs or is awaited, holds a request that was stopped.
        """
        try:
            async with asyncio.timeout(None if self._stopped is None else STOP_S) as self._delivering:
                yield
        except TimeoutError:
            if self._stopped is None:
                raise
            raise self._stopped from None
        finally:
            self._delivering = None

    async def close(
        self, error: BaseException | None = None, *, charged: bool = True, streams: bool = True
    ) -> None:
        """Abort the running engine requests, free the slots, record the stats, and settle the usage.

        Where it is not `charged`, the reservation is cancelled, whatever the engine computed. One that failed before the engine
        computed anything gives its request back. One that a full engine refused has no record, as if the gateway had refused it.
        One that is revoked and does not stream is charged for its prompt alone: nothing of its response was delivered. May be
        repeated. Once begun it runs to its end, also when its caller is cancelled.
        """
        if self._closed:
            return
        self._closed = True
        self._free_slots()
        if self.observer is not None:
            self.observer.end(self._stopped or error)
        self.stats.finished = time.monotonic()
        revoked = isinstance(self._stopped or error, RequestRevoked)
        failed = isinstance(error, Exception) and not revoked
        # Where choices are still open, the engine's last events count too.
        complete = self._is_complete()
        if complete:
            self._record(failed=failed)
        settlement = self._settle(
            "revoked" if revoked else "failed" if failed else "aborted",
            error.code if isinstance(error, EngineFailed) else None,
            charged=charged,
            streams=streams,
            recorded=complete,
            unsatisfied=isinstance(error, SchemaNotSatisfied),
        )
        await self._dependencies.background_tasks.finish(settlement)

    def _record(self, *, failed: bool) -> None:
        if failed:
            self.stats.finish_reason = "error"
        elif not self._is_complete():
            self.stats.finish_reason = "abort"
        if not self._refused:
            self._dependencies.recorder.record(self.stats)

    async def _settle(
        self,
        outcome: Outcome,
        engine_code: str | None,
        *,
        charged: bool,
        streams: bool,
        recorded: bool,
        unsatisfied: bool,
    ) -> None:
        """`outcome`: that of a request that is not complete, with `engine_code` where the engine failed it."""
        try:
            await self._streams.close()
        finally:
            done = self._is_complete()
            if not recorded:
                self._record(failed=outcome == "failed")
            if done:
                self._dependencies.poison_memory.record_finished(self._requests)
            usage = self._used_so_far("completed" if done else outcome, self.stats.timings())
            if unsatisfied:
                usage = replace(usage, unsatisfied=True)
            if usage.outcome == "revoked" and not streams:
                usage = replace(usage, completion_tokens=0, reasoning_tokens=0)
            reservation = await self._pending.reservation_or_none()
            controller = self._dependencies.admission_controller
            charged = charged and (usage.tokens > 0 or engine_code not in OVERLOADED)
            self.is_recorded = charged and reservation is not None
            if reservation is not None and charged:
                # A deadline may be the client's own, and its end no refusal.
                refused = outcome == "failed" and engine_code != RequestTimeout.code
                await controller.settle(reservation, replace(usage, refused=refused and not usage.tokens))
            elif reservation is not None:
                await controller.cancel(reservation, refused=True)

    def _used_so_far(
        self, outcome: Outcome | None = None, timings: RequestTimings | None = None
    ) -> SettledUsage:
        stats = self.stats
        return SettledUsage(
            outcome=outcome,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            completion_tokens=stats.completion_tokens,
            reasoning_tokens=stats.reasoning_tokens,
            system_fingerprint=stats.system_fingerprint,
            timings=timings,
        )

    def _is_complete(self) -> bool:
        return self.stats.finished_choices == self._num_sequences

    def _on_started(self, prompt: int, event: Event | None) -> None:
        if not isinstance(event, Started):
            raise self._failure(event)
        if event.digest != self.model.digest:
            raise AdapterMismatch(f"resolved {self.model.digest}, the engine used {event.digest}")
        self._started.add(prompt)

    def _failure(self, event: Event | None) -> GatewayError:
        if self._stopped is not None:
            return self._stopped
        if not isinstance(event, Failed):
            message = "The engine ended the request before it was complete."
            return EngineFailed(Failed("", EngineUnavailable.code, message))
        return EngineFailed(event)
