"""`LocalEngine`: an `EngineClient` in this process, with the step loop and the output processor each on a thread.

Invariant: only the step thread touches the `Engine`. It takes commands from an inbox between steps and waits for no other
thread.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

import msgspec
import structlog

from loraplex.engine.adapter_probe.probe import probe_adapter
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.engine import Engine, StepResult
from loraplex.engine.errors import (
    EngineDraining,
    EngineError,
    EngineLost,
    EngineUnavailable,
    InvalidRequest,
)
from loraplex.engine.messages import (
    AdapterRef,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    Finished,
    ProbeReport,
    Usage,
)
from loraplex.engine.output.output_processor import ChoiceKey, OutputProcessor, ProcessedOutputs
from loraplex.engine.sampling_params import MAX_CHOICES
from loraplex.engine.threads import StepThread

IDLE_WAIT_S = 0.2
STATS_INTERVAL_S = 0.05


class _Add(msgspec.Struct, frozen=True):
    request: EngineRequest


class _Abort(msgspec.Struct, frozen=True):
    request_id: str
    done: Future[None]


class _Probe(msgspec.Struct, frozen=True):
    adapter: AdapterRef
    done: Future[ProbeReport]


class _Forget(msgspec.Struct, frozen=True):
    namespace: bytes
    done: Future[None]


class _Stop(msgspec.Struct, frozen=True):
    choices: list[ChoiceKey]


class _Started(msgspec.Struct, frozen=True):
    request: EngineRequest


class _Aborted(msgspec.Struct, frozen=True):
    request_id: str
    choices: list[Finished]


class _Broken(msgspec.Struct, frozen=True):
    request_id: str
    error: EngineError
    choices: list[Finished]


_Command: TypeAlias = _Add | _Abort | _Forget | _Probe | _Stop | None
_Output: TypeAlias = _Started | _Aborted | _Broken | StepResult | Failed | None


class LocalEngine:
    """An engine in this process, created on a running event loop; `close` ends both threads."""

    def __init__(self, engine: Engine, steps: StepThread | None = None) -> None:
        """`steps` is the thread that created `engine`; without it the loop gets a thread of its own."""
        self._engine = engine
        self._info = engine.info()
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._outputs: SimpleQueue[_Output] = SimpleQueue()
        self._streams: dict[str, asyncio.Queue[Event]] = {}
        self._sequences: dict[ChoiceKey, Sequence] = {}
        self._stats = engine.stats()
        self._stats_at = self._heartbeat = time.monotonic()
        self._stalled = False
        self._draining = False
        self._output_failed = False
        self._ended: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._log = structlog.get_logger("loraplex.engine")
        self._processor = OutputProcessor(
            engine.model.tokenizer, engine.model.config.eos_token_ids, self._info.system_fingerprint
        )
        self._output_thread = threading.Thread(target=self._run_outputs, name="engine-outputs", daemon=True)
        self._output_thread.start()
        self._steps = (steps or StepThread()).submit(self._run_steps)
        self._watching = asyncio.create_task(self._watch_steps())

    def info(self) -> EngineInfo:
        return self._info

    async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """See `EngineClient.submit`."""
        refusal = self._refusal(request)
        if refusal is not None:
            yield refusal
            return
        request_id = request.request_id
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._streams[request_id] = events
        self._idle.clear()
        self._inbox.put(_Add(request))
        unfinished = len(request.open_choices)
        try:
            while unfinished:
                event = await events.get()
                unfinished = 0 if isinstance(event, Failed) else unfinished - isinstance(event, Finished)
                yield event
        finally:
            if unfinished:
                self._inbox.put(_Abort(request_id, Future()))
            self._end_stream(request_id)

    async def abort(self, request_id: str) -> None:
        done: Future[None] = Future()
        await self._carried_out(_Abort(request_id, done))

    async def forget(self, namespace: bytes) -> None:
        """See `EngineClient.forget`."""
        done: Future[None] = Future()
        await self._carried_out(_Forget(namespace, done))

    async def _carried_out(self, command: _Abort | _Forget) -> None:
        self._inbox.put(command)
        # The step thread sets `_ended` before it empties the inbox, so this command is acknowledged or not needed.
        if self._ended is None:
            await asyncio.wrap_future(command.done)

    async def probe(self, adapter: AdapterRef) -> ProbeReport:
        """See `EngineClient.probe`."""
        report = await probe_adapter(adapter, self._info.vocab_size, self.submit, self._probe_modules)
        return msgspec.structs.replace(report, system_fingerprint=self._info.system_fingerprint)

    async def _probe_modules(self, adapter: AdapterRef) -> ProbeReport:
        done: Future[ProbeReport] = Future()
        self._inbox.put(_Probe(adapter, done))
        if self._ended is not None:
            raise EngineUnavailable(self._ended)
        return await asyncio.wrap_future(done)

    async def wait_ready(self) -> None:
        """Return at once: this engine is ready from its creation on."""

    async def stats(self) -> EngineStats:
        """Return the latest snapshot, at most `STATS_INTERVAL_S` older than the last step."""
        if self._ended is not None:
            raise EngineUnavailable(self._ended)
        return msgspec.structs.replace(
            self._stats,
            heartbeat_age_s=time.monotonic() - self._heartbeat,
            slow_steps=self._engine.step_watch.num_slow,
            draining=self._draining,
        )

    async def drain(self) -> None:
        self._draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """End the threads. Running requests fail, and later requests are refused. Idempotent."""
        self._inbox.put(None)
        await asyncio.wrap_future(self._steps)
        self._watching.cancel()
        await asyncio.to_thread(self._output_thread.join)
        self._engine.close()

    async def _watch_steps(self) -> None:
        """Log each slow step while it runs."""
        watch = self._engine.step_watch
        while True:
            await asyncio.sleep(min(1.0, watch.limit_s / 4))
            slow = watch.check()
            if slow is not None:
                self._log.warning("a step is slow", seconds=slow.seconds, step=slow.step, stacks=slow.stacks)

    def _refusal(self, request: EngineRequest) -> Failed | None:
        if self._ended is not None:
            return Failed(request.request_id, EngineUnavailable.code, self._ended)
        if self._draining:
            return Failed(request.request_id, EngineDraining.code, "the engine is draining")
        if request.request_id in self._streams:
            return Failed(request.request_id, InvalidRequest.code, "`request_id` is in use", "request_id")
        return None

    def _end_stream(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _run_steps(self) -> None:
        failed = False
        try:
            self._step_until_closed()
        except Exception:  # noqa: BLE001 - reported, and the engine is declared broken
            # A defect of the engine, not of a request: the stats stop, so the supervisor of this engine restarts
            # it.
            self._log.exception("the step loop ended")
            failed = True
        failed = failed or self._output_failed
        self._ended = "the engine failed" if failed else "the engine is closed"
        self._engine.numeric_check.close(self._ended)
        self._acknowledge_all()
        if not self._loop.is_closed():
            code = EngineLost.code if failed else EngineUnavailable.code
            self._loop.call_soon_threadsafe(self._fail_all, code, self._ended)
        self._outputs.put(None)

    def _acknowledge_all(self) -> None:
        with suppress(Empty):
            while True:
                command = self._inbox.get_nowait()
                if isinstance(command, _Abort | _Forget):
                    _acknowledge(command.done)
                elif isinstance(command, _Probe) and command.done.set_running_or_notify_cancel():
                    command.done.set_exception(EngineUnavailable(self._ended or "the engine is closed"))

    def _fail_all(self, code: str, reason: str) -> None:
        for request_id, stream in self._streams.items():
            stream.put_nowait(Failed(request_id, code, reason))

    def _step_until_closed(self) -> None:
        while self._run_commands():
            result = self._engine.step()
            now = time.monotonic()
            self._heartbeat = now
            self._stalled = not result.ran
            # Update the stats before any event is sent: a client that sees its request end finds it counted.
            idle = not result.ran or not self._engine.scheduler.has_unfinished
            if idle or now - self._stats_at > STATS_INTERVAL_S:
                self._stats, self._stats_at = self._engine.stats(), now
            if result.outputs or result.failures:
                self._hand_over(result)

    def _run_commands(self) -> bool:
        """Run the commands of the inbox, waiting for one while nothing can run. False at the end."""
        command: _Command
        while True:
            try:
                command = (
                    self._inbox.get(timeout=self._command_timeout_s())
                    if self._command_timeout_s()
                    else self._inbox.get_nowait()
                )
            except Empty:
                return True
            if command is None:
                return False
            self._run_command(command)

    def _command_timeout_s(self) -> float:
        """Seconds to wait for a command: 0 while sequences run, short while only adapters or masks are pending."""
        scheduler = self._engine.scheduler
        if (scheduler.num_running or self._engine.is_ahead) and not self._stalled:
            return 0.0
        return 0.002 if scheduler.has_unfinished or self._engine.numeric_check.is_busy else IDLE_WAIT_S

    def _run_command(self, command: _Add | _Abort | _Forget | _Probe | _Stop) -> None:
        match command:
            case _Add(request):
                self._add(request)
            case _Abort(request_id, done):
                choices = [_aborted(sequence) for sequence in self._engine.abort(request_id)]
                self._forget(request_id)
                self._outputs.put(_Aborted(request_id, choices))
                self._stats = self._engine.stats()
                _acknowledge(done)
            case _Probe(adapter, done):
                self._engine.numeric_check.start(adapter, done)
            case _Forget(namespace, done):
                self._engine.forget(namespace)
                self._stats = self._engine.stats()
                _acknowledge(done)
            case _Stop(choices):
                for key in choices:
                    sequence = self._sequences.pop(key, None)
                    if sequence is not None:
                        self._engine.finish(sequence, "stop")

    def _add(self, request: EngineRequest) -> None:
        try:
            sequences = self._engine.add(request)
        except EngineError as error:
            self._outputs.put(_failed(request.request_id, error))
            return
        for sequence in sequences:
            self._sequences[request.request_id, sequence.choice] = sequence
        self._outputs.put(_Started(request))

    def _hand_over(self, result: StepResult) -> None:
        for output in result.outputs:
            if output.finish_reason is not None:
                self._sequences.pop((output.sequence.request_id, output.sequence.choice), None)
        self._outputs.put(result)
        for sequence, error in result.failures:
            choices = [_aborted(each) for each in self._forget(sequence.request_id)]
            self._outputs.put(_Broken(sequence.request_id, error, choices))

    def _forget(self, request_id: str) -> list[Sequence]:
        """Remove and return the choices of a request that have not ended."""
        choices = (self._sequences.pop((request_id, choice), None) for choice in range(MAX_CHOICES))
        return [sequence for sequence in choices if sequence is not None]

    def _run_outputs(self) -> None:
        try:
            self._process_until_closed()
        except Exception:  # noqa: BLE001 - reported, and the step thread ends
            self._log.exception("the output processor ended")
            self._output_failed = True
            self._inbox.put(None)

    def _process_until_closed(self) -> None:
        while True:
            items = [self._outputs.get()]
            with suppress(Empty):
                while True:
                    items.append(self._outputs.get_nowait())
            events: list[Event] = []
            for item in items:
                if item is None:
                    return
                self._process(item, events)
            if events:
                self._loop.call_soon_threadsafe(self._deliver, events)

    def _process(
        self, item: _Started | _Aborted | _Broken | StepResult | Failed, events: list[Event]
    ) -> None:
        match item:
            case _Started(request):
                self._take_processed(self._processor.start(request), events)
            case _Aborted(request_id, choices):
                events.extend(self._unfinished(request_id, choices))
            case _Broken(request_id, error, choices):
                unfinished = self._unfinished(request_id, choices)
                usage = {each.choice: each.usage for each in unfinished} if error.is_due_to_request else {}
                events.append(_failed(request_id, error, usage))
            case Failed():
                events.append(item)
            case StepResult():
                self._take_processed(self._processor.process(item.outputs), events)

    def _take_processed(self, processed: ProcessedOutputs, events: list[Event]) -> None:
        events.extend(processed.events)
        if processed.stopped:
            self._inbox.put(_Stop(processed.stopped))

    def _unfinished(self, request_id: str, choices: list[Finished]) -> list[Finished]:
        """Forget a request; return those of `choices` that have not ended. The step thread considers a choice that a stop
        string has ended running for a while.
        """
        unfinished = self._processor.drop(request_id)
        return [choice for choice in choices if choice.choice in unfinished]

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.put_nowait(event)


def _acknowledge(done: Future[None]) -> None:
    """Acknowledge a command. Its future may be cancelled already, and then takes no result."""
    if done.set_running_or_notify_cancel():
        done.set_result(None)


def _aborted(sequence: Sequence) -> Finished:
    prefilled = sequence.num_prefilled_tokens
    usage = Usage(prefilled, min(sequence.num_cached_tokens, prefilled), sequence.num_output_tokens)
    return Finished(sequence.request_id, sequence.choice, "abort", usage)


def _failed(request_id: str, error: EngineError, usage: dict[int, Usage] | None = None) -> Failed:
    field = error.field if isinstance(error, InvalidRequest) else None
    return Failed(request_id, error.code, str(error), field, usage or {})
