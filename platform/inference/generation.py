"""One running inference request, from submission to its end: checks the adapter, takes the times, settles the usage.

Invariant: nothing is delivered before the engine has reported the resolved adapter as the one it uses, and before the
reservation is in the ledger.
"""

import time
from collections.abc import AsyncGenerator, Callable
from typing import TypeAlias

from loraplex.engine.messages import Delta, EngineRequest, Event, Failed, Finished, Started
from loraplex.platform.errors import AdapterMismatch, EngineFailed
from loraplex.platform.inference.admission import PendingAdmission
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.engine_streams import EngineStreams
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.platform.observability.request_stats import RequestStats, UsageCounter
from loraplex.tenants.quotas.reservation import SettledUsage

ENFORCEMENT_HEADER = "x-loraplex-schema-enforcement"

ChoiceEvent: TypeAlias = Delta | Finished


class Generation:
    """One running request: one engine request per prompt, `n` choices each. `close` ends it at any stage.

    Choice c of prompt p has the index p * n + c, as in the OpenAI API. `output` is None for plain text.
    `free_slots` frees the slots of its prompts.
    """

    def __init__(
        self,
        dependencies: GatewayDependencies,
        free_slots: Callable[[], None],
        model: ResolvedModel,
        requests: list[EngineRequest],
        pending: PendingAdmission,
        arrival: float,
        output: ConstrainedOutput | None = None,
    ) -> None:
        self.model = model
        self.output = output
        self.n = requests[0].sampling.n
        self.choices = len(requests) * self.n
        self.stats = RequestStats(
            arrival=arrival,
            n=self.n,
            max_tokens=requests[0].sampling.max_tokens,
            prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        )
        self._dependencies = dependencies
        self._free_slots = free_slots
        self._pending = pending
        self._usage = UsageCounter([len(request.prompt_token_ids) for request in requests])
        self._streams = EngineStreams(dependencies.engine, requests, self._usage)
        self._started: set[int] = set()
        self._finished = 0
        self._last: dict[int, float] = {}
        self._closed = False
        self._refused = False

    def headers(self) -> dict[str, str]:
        """Return the response headers: the adapter, and how its schemas are enforced."""
        enforcement = None if self.output is None else self.output.plan.enforcement
        if enforcement is None:
            return self.model.headers()
        return {**self.model.headers(), ENFORCEMENT_HEADER: enforcement}

    async def start(self) -> None:
        """Wait for the reservation and the engine's first event, which come in any order.

        Raises `EngineFailed`, `AdapterMismatch`, and what `PendingAdmission.reservation` raises.
        """
        try:
            await self._pending.reservation()
        except Exception:
            self._refused = True
            raise
        prompt, event = await self._streams.next() or (0, None)
        self._on_started(prompt, event)

    async def events(self) -> AsyncGenerator[tuple[int, ChoiceEvent], None]:
        """Yield (choice, event) until every choice has finished. Raises `EngineFailed`, `AdapterMismatch`."""
        while (received := await self._streams.next()) is not None:
            prompt, event = received
            if prompt not in self._started:
                self._on_started(prompt, event)
                continue
            if isinstance(event, Delta):
                choice = prompt * self.n + event.choice
                self._record_delta(choice, len(event.token_ids))
                yield choice, event
            elif isinstance(event, Finished):
                self._on_finished(event)
                yield prompt * self.n + event.choice, event
            else:
                raise _failure(event)
        if self._finished < self.choices:
            raise _failure(None)

    async def close(self, error: BaseException | None = None) -> None:
        """Abort the running engine requests, free the slots, record the stats, and settle the usage.

        May be repeated. Once begun it runs to its end, also when its caller is cancelled.
        """
        if self._closed:
            return
        self._closed = True
        if isinstance(error, Exception):
            self.stats.finish_reason = "error"
        elif self._finished < self.choices:
            self.stats.finish_reason = "abort"
        self._free_slots()
        self.stats.finished = time.monotonic()
        if not self._refused:
            self._dependencies.recorder.record(self.stats)
        await self._dependencies.background_tasks.finish(self._settle(failed=isinstance(error, Exception)))

    async def _settle(self, *, failed: bool) -> None:
        usage_counter = self._usage
        try:
            await self._streams.close()
        finally:
            done = usage_counter.finished == self.choices
            usage = SettledUsage(
                outcome="completed" if done else "failed" if failed else "aborted",
                prompt_tokens=usage_counter.prompt_tokens,
                cached_tokens=usage_counter.cached_tokens,
                completion_tokens=usage_counter.completion_tokens,
            )
            reservation = await self._pending.reservation_or_none()
            if reservation is not None:
                await self._dependencies.admission_controller.settle(reservation, usage)

    def _on_started(self, prompt: int, event: Event | None) -> None:
        if not isinstance(event, Started):
            raise _failure(event)
        if event.digest != self.model.digest:
            raise AdapterMismatch(f"resolved {self.model.digest}, the engine used {event.digest}")
        self._started.add(prompt)
        stats = self.stats
        stats.cached_tokens += event.cached_tokens
        stats.queue_s = max(stats.queue_s or 0.0, event.queue_s)
        stats.prefill_s = max(stats.prefill_s or 0.0, event.prefill_s)

    def _record_delta(self, choice: int, tokens: int) -> None:
        now, stats = time.monotonic(), self.stats
        last = self._last.get(choice)
        if stats.first_token is None:
            stats.first_token = now
        if last is not None and tokens:
            stats.token_gaps.extend([(now - last) / tokens] * tokens)
        self._last[choice] = stats.last_token = now

    def _on_finished(self, event: Finished) -> None:
        if event.reason == "abort":
            raise _failure(None)
        self._finished += 1
        tokens = event.usage.completion_tokens
        self.stats.completion_tokens += tokens
        self.stats.largest_choice = max(self.stats.largest_choice, tokens)
        self.stats.finish_reason = event.reason


def _failure(event: Event | None) -> EngineFailed:
    if isinstance(event, Failed):
        return EngineFailed(event)
    return EngineFailed(
        Failed("", "engine_unavailable", "The engine ended the request before it was complete.")
    )
