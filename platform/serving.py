"""The way of one inference request, without any web framework: resolve once, check, render, submit, verify, deliver.

Invariant: nothing of an answer is delivered before the engine has named the adapter it used and it is the resolved one.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeAlias
from uuid import uuid4

from loraplex.engine.messages import AdapterRef, Delta, EngineRequest, Event, Failed, Finished, Started
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.auth import Caller
from loraplex.platform.errors import (
    AdapterMismatch,
    ContextTooLong,
    EngineFailed,
    InvalidParameter,
    Overloaded,
    UnsupportedParameter,
)
from loraplex.platform.model_names import ResolvedModel, resolve_model
from loraplex.platform.parameters import Endpoint, Values, sampling_fields
from loraplex.platform.prompts_parameter import Prompt
from loraplex.platform.services import GatewayServices
from loraplex.platform.timings import RequestTimings

INLINE_CHARACTERS = 8_192
QUEUED_EVENTS = 256

ChoiceEvent: TypeAlias = Delta | Finished


class InFlight:
    """Counts prompts between acceptance and end; refuses beyond `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def enter(self, prompts: int) -> None:
        """Raises `Overloaded`."""
        if self.count + prompts > self._limit:
            raise Overloaded(f"More than {self._limit} prompts are in flight; try again.")
        self.count += prompts

    def leave(self, prompts: int) -> None:
        self.count -= prompts


class Inference:
    """Turns checked parameters into a running `Generation`."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self.in_flight = InFlight(services.limits.max_in_flight)

    async def begin(self, caller: Caller, endpoint: Endpoint, values: Values) -> "Generation":
        """A generation whose first event has arrived. The owner must `close` it. Raises what the request deserves."""
        arrival = time.monotonic()
        prompts = len(values["prompt"]) if endpoint == "completions" else 1
        self.in_flight.enter(prompts)
        try:
            model = await resolve_model(self._services, caller, values["model"])
            requests = await self._engine_requests(caller, endpoint, values, model)
        except BaseException:
            self.in_flight.leave(prompts)
            raise
        generation = Generation(self._services, self.in_flight, model, requests, arrival)
        try:
            await generation.start()
        except BaseException as error:
            await generation.close(error)
            raise
        return generation

    async def prompt_ids(self, values: Values) -> list[list[int]]:
        """Ids of `messages` or of every `prompt`; large ones are encoded on a thread."""
        size = _characters(values)
        limit = self._services.limits.max_prompt_characters
        if size > limit:
            raise ContextTooLong(
                f"The prompt has {size} characters; at most {limit} are read.", _prompt_name(values)
            )
        if size <= INLINE_CHARACTERS:
            return self._encode(values)
        return await asyncio.to_thread(self._encode, values)

    def _encode(self, values: Values) -> list[list[int]]:
        prompts = self._services.prompts
        if values.get("messages") is None:
            return [prompts.text_ids(each) if isinstance(each, str) else each for each in values["prompt"]]
        effort = values.get("reasoning_effort")
        if effort is not None and not prompts.knows("reasoning_effort"):
            message = "`reasoning_effort` is not supported: the model's chat template does not know it."
            raise UnsupportedParameter(message, param="reasoning_effort")
        return [prompts.chat_ids(values["messages"], {} if effort is None else {"reasoning_effort": effort})]

    async def _engine_requests(
        self, caller: Caller, endpoint: Endpoint, values: Values, model: ResolvedModel
    ) -> list[EngineRequest]:
        prompts = await self.prompt_ids(values)
        name = _prompt_name(values)
        budgets = [self._max_tokens(ids, values, name) for ids in prompts]
        self._check_product(sum(budgets) * values["n"])
        fields = sampling_fields(endpoint, values)
        namespace = self._services.namespace_of(caller.tenant_id)
        adapter = self._adapter_ref(caller, model, namespace)
        limits, salt, run = self._services.limits, (values["cache_salt"] or "").encode(), uuid4().hex
        requests = []
        for index, (ids, budget) in enumerate(zip(prompts, budgets, strict=True)):
            sampling = SamplingParams(max_tokens=budget, **fields)
            sampling.validate(self._services.engine.info().vocab_size)
            requests.append(
                EngineRequest(
                    request_id=f"{run}-{index}",
                    namespace=namespace,
                    prompt_token_ids=ids,
                    sampling=sampling,
                    weight=caller.weight,
                    adapter=adapter,
                    cache_salt=salt,
                    queue_timeout_s=limits.queue_timeout_s,
                    total_timeout_s=limits.total_timeout_s,
                )
            )
        return requests

    def _adapter_ref(self, caller: Caller, model: ResolvedModel, namespace: bytes) -> AdapterRef | None:
        if model.digest is None:
            return None
        path = self._services.adapter_path(caller.tenant_id, model.digest)
        return AdapterRef(namespace=namespace, digest=model.digest, blob_path=path)

    def _max_tokens(self, ids: list[int], values: Values, name: str) -> int:
        info = self._services.engine.info()
        if not ids:
            raise InvalidParameter(f"`{name}` holds no token.", param=name)
        if max(ids) >= info.vocab_size:
            raise InvalidParameter(f"`{name}` must hold token ids in 0..{info.vocab_size - 1}.", param=name)
        left = info.max_model_len - len(ids)
        asked = values["max_tokens"] or values.get("max_completion_tokens")
        if left < 1 or (asked or 1) > left:
            raise ContextTooLong(
                f"The context holds {info.max_model_len} tokens; the prompt has {len(ids)} and {asked or 1} more were asked.",
                name,
            )
        return asked or min(self._services.limits.default_max_tokens, left)

    def _check_product(self, tokens: int) -> None:
        limit = self._services.limits.max_completion_tokens
        if tokens > limit:
            raise InvalidParameter(
                f"prompts x `n` x `max_tokens` is {tokens}, but must be at most {limit}.", param="max_tokens"
            )


class Generation:
    """One answer in the making: one engine request per prompt, `n` choices each. `close` ends it at any stage.

    Choice c of prompt p has the index p * n + c, as in the OpenAI API.
    """

    def __init__(
        self,
        services: GatewayServices,
        in_flight: InFlight,
        model: ResolvedModel,
        requests: list[EngineRequest],
        arrival: float,
    ) -> None:
        self.model = model
        self.n = requests[0].sampling.n
        self.choices = len(requests) * self.n
        self.timings = RequestTimings(
            arrival=arrival,
            n=self.n,
            max_tokens=requests[0].sampling.max_tokens,
            prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        )
        self._services = services
        self._in_flight = in_flight
        self._requests = requests
        self._streams = [services.engine.submit(request) for request in requests]
        self._merged = self._merge() if len(requests) > 1 else self._single()
        self._started: set[int] = set()
        self._finished = 0
        self._last: dict[int, float] = {}
        self._closed = False

    async def start(self) -> None:
        """Wait for the first event of the engine. Raises `EngineFailed`, `AdapterMismatch`."""
        prompt, event = await anext(self._merged, (0, None))
        self._begin(prompt, event)

    async def events(self) -> AsyncGenerator[tuple[int, ChoiceEvent], None]:
        """(choice, event) until every choice has finished. Raises `EngineFailed`, `AdapterMismatch`."""
        async for prompt, event in self._merged:
            if prompt not in self._started:
                self._begin(prompt, event)
                continue
            if isinstance(event, Delta):
                choice = prompt * self.n + event.choice
                self._time(choice, len(event.token_ids))
                yield choice, event
            elif isinstance(event, Finished):
                self._finish(event)
                yield prompt * self.n + event.choice, event
            else:
                raise _failure(event)
        if self._finished < self.choices:
            raise _failure(None)

    async def close(self, error: BaseException | None = None) -> None:
        """Abort what still runs, give the slots back and record the timings; harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        if isinstance(error, Exception):
            self.timings.finish_reason = "error"
        elif self._finished < self.choices:
            self.timings.finish_reason = "abort"
        try:
            await asyncio.shield(self._release())
        finally:
            self._in_flight.leave(len(self._requests))
            self.timings.finished = time.monotonic()
            self._services.recorder.record(self.timings)

    async def _release(self) -> None:
        await self._merged.aclose()
        for request, stream in zip(self._requests, self._streams, strict=True):
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
            else:
                await self._services.engine.abort(request.request_id)

    def _begin(self, prompt: int, event: Event | None) -> None:
        if not isinstance(event, Started):
            raise _failure(event)
        if event.digest != self.model.digest:
            raise AdapterMismatch(f"resolved {self.model.digest}, the engine used {event.digest}")
        self._started.add(prompt)
        self.timings.cached_tokens += event.cached_tokens

    def _time(self, choice: int, tokens: int) -> None:
        now, timings = time.monotonic(), self.timings
        last = self._last.get(choice)
        if timings.first_token is None:
            timings.first_token = now
        if last is not None and tokens:
            timings.token_gaps.extend([(now - last) / tokens] * tokens)
        self._last[choice] = timings.last_token = now

    def _finish(self, event: Finished) -> None:
        if event.reason == "abort":
            raise _failure(None)
        self._finished += 1
        self.timings.completion_tokens += event.usage.completion_tokens
        self.timings.finish_reason = event.reason

    async def _single(self) -> AsyncGenerator[tuple[int, Event], None]:
        async for event in self._streams[0]:
            yield 0, event

    async def _merge(self) -> AsyncGenerator[tuple[int, Event], None]:
        queue: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue(QUEUED_EVENTS)
        tasks = [asyncio.create_task(_forward(i, stream, queue)) for i, stream in enumerate(self._streams)]
        running = len(tasks)
        try:
            while running:
                prompt, event = await queue.get()
                if event is None:
                    running -= 1
                else:
                    yield prompt, event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    prompt: int, stream: AsyncIterator[Event], queue: asyncio.Queue[tuple[int, Event | None]]
) -> None:
    try:
        async for event in stream:
            await queue.put((prompt, event))
    except Exception:
        await queue.put((prompt, None))
        raise
    await queue.put((prompt, None))


def _failure(event: Event | None) -> EngineFailed:
    if isinstance(event, Failed):
        return EngineFailed(event)
    return EngineFailed(
        Failed("", "engine_unavailable", "The engine ended the request before it was complete.")
    )


def _prompt_name(values: Values) -> str:
    return "messages" if values.get("messages") is not None else "prompt"


def _characters(values: Values) -> int:
    if values.get("messages") is not None:
        return sum(len(message.content) for message in values["messages"])
    return sum(map(_length, values["prompt"]))


def _length(prompt: Prompt) -> int:
    return len(prompt)
