"""`Preparer`: the preparing process as the gateway sees it: asked, bounded in time, started again when it died.

Invariants: one task per tenant waits at a time, so that one tenant's tasks keep no other's waiting; a process that missed
its deadline is never asked again.
"""

import asyncio
import os
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from loraplex.grammar.child_process import end_child, spawn_child
from loraplex.grammar.errors import GrammarTooCostly, TrialsUnavailable
from loraplex.platform.errors import InvalidBody
from loraplex.platform.preparation.composed import Composed
from loraplex.platform.preparation.messages import (
    LENGTH_BYTES,
    Answer,
    CheckBody,
    ComposeForm,
    Setup,
    Task,
    decode_answer,
    frame,
    length,
)

MODULE: Final = "loraplex.platform.preparation.process"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparerOptions:
    """`environment` is what the process sees. `deadline_s` bounds one task, `patience_s` the whole wait for it."""

    setup: Setup
    environment: Mapping[str, str]
    deadline_s: float = 20.0
    start_timeout_s: float = 60.0
    patience_s: float = 60.0


class Preparer:
    """Made and used on one event loop."""

    def __init__(self, options: PreparerOptions) -> None:
        self._options = options
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._lock = asyncio.Lock()
        self._process: Process | None = None
        self._log = structlog.get_logger("loraplex.preparation")

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the process before anybody waits for it. Raises `TrialsUnavailable`."""
        async with self._lock:
            await self._ready()

    async def close(self) -> None:
        """End the process; nothing may be asked any more."""
        async with self._lock:
            await self._end()

    async def check_body(self, namespace: bytes, body: bytes) -> None:
        """Raises `InvalidBody` or `InvalidParameter` as `parse_object` does, and `TrialsUnavailable`."""
        answer = await self._ask(namespace, CheckBody(body))
        if answer is None:
            raise InvalidBody("The body could not be read within the time and the memory allowed.")

    async def compose(self, namespace: bytes, packed: bytes) -> Composed:
        """`packed` is what `pack_form` made. Raises `GrammarRefused`, `TrialsUnavailable`."""
        answer = await self._ask(namespace, ComposeForm(packed))
        if answer is None or answer.result is None:
            raise GrammarTooCostly(
                "the schemas of this request take too long, or too much memory, to analyse"
            )
        return answer.result

    async def _ask(self, namespace: bytes, task: Task) -> Answer | None:
        """None when the process did not survive the task. Raises what the request deserves."""
        try:
            async with asyncio.timeout(self._options.patience_s):
                turn = self._turns.setdefault(namespace, asyncio.Lock())
                async with turn, self._lock:
                    asking = asyncio.create_task(self._exchange(task))
                    try:
                        answer = await asyncio.shield(asking)
                    finally:
                        # The process answers in order: who leaves keeps the turn until its answer is there.
                        await asyncio.wait((asking,))
                        asking.exception()
        except TimeoutError:
            raise TrialsUnavailable(
                f"no turn to analyse this request for {self._options.patience_s:g} s"
            ) from None
        if answer is not None and answer.refusal is not None:
            raise answer.refusal.error()
        return answer

    async def _exchange(self, task: Task) -> Answer | None:
        process = await self._ready()
        try:
            async with asyncio.timeout(self._options.deadline_s):
                return await _exchange(process, frame(task))
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
            self._log.error("preparation lost", task=type(task).__name__, reason=repr(error))
            await self._end()
            return None

    async def _ready(self) -> Process:
        """A process that has answered once, so that its start is not counted to a task."""
        process = self._process
        if process is not None and process.returncode is None:
            return process
        try:
            process = self._process = await spawn_child(
                MODULE, str(os.getpid()), environment=self._options.environment
            )
            async with asyncio.timeout(self._options.start_timeout_s):
                await _exchange(process, frame(self._options.setup) + frame(CheckBody(b"{}")))
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
            await self._end()
            raise TrialsUnavailable("requests of this size cannot be analysed now") from error
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await end_child(process)


async def _exchange(process: Process, data: bytes) -> Answer:
    """Raises `OSError` or `EOFError` when the process has ended, `msgspec.DecodeError` for what is no answer."""
    if process.stdin is None or process.stdout is None:
        raise BrokenPipeError("the process has no pipes")
    process.stdin.write(data)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return decode_answer(await process.stdout.readexactly(length(head)))
