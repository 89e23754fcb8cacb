"""`ValueValidators`: validates finished values in worker processes, off the event loop.

One validation cannot be bounded from inside: `anyOf` of references to `anyOf` doubles its work with each line and
holds the interpreter's lock. Invariant: one validation per tenant at a time, each within a deadline; a process that
missed it is killed.
"""

import asyncio
import os
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from loraplex.grammar.child_process import end_child, spawn_child
from loraplex.grammar.errors import SchemaNotSatisfied, WorkersUnavailable
from loraplex.grammar.judge.messages import ValidationRequest, decode_result, encode

MODULE: Final = "loraplex.grammar.judge.process"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorPoolConfig:
    """`environment` is the processes' environment. At most `processes` are started, on demand.

    `deadline_s` bounds one validation, `queue_timeout_s` the whole wait for it.
    """

    environment: Mapping[str, str]
    processes: int = 2
    deadline_s: float = 2.0
    start_timeout_s: float = 30.0
    queue_timeout_s: float = 60.0


class ValueValidators:
    """Created and used on one event loop."""

    def __init__(self, options: ValidatorPoolConfig) -> None:
        self._options = options
        self._slots = asyncio.Semaphore(options.processes)
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._idle: list[Process] = []
        self._failures: Counter[str] = Counter()
        self._log = structlog.get_logger("loraplex.validation")

    async def validate(self, namespace: bytes, schema: str, value: str) -> None:
        """Validate `value` against `schema`, both JSON texts.

        Raises `SchemaNotSatisfied`, also for a value that could not be validated in time, and `WorkersUnavailable`
        without a process.
        """
        try:
            async with asyncio.timeout(self._options.queue_timeout_s):
                violation = await self._validate_in_turn(namespace, ValidationRequest(schema, value))
        except TimeoutError:
            queue_timeout_s = self._options.queue_timeout_s
            raise WorkersUnavailable(f"no value could be validated for {queue_timeout_s:g} s") from None
        if violation is not None:
            raise SchemaNotSatisfied(violation)

    async def close(self) -> None:
        """End the idle processes; the validators must not be used afterwards."""
        for process in self._idle:
            await end_child(process)
        self._idle.clear()

    async def _validate_in_turn(self, namespace: bytes, request: ValidationRequest) -> str | None:
        turn = self._turns.setdefault(namespace, asyncio.Lock())
        async with turn, self._slots:
            return await self._ask(self._take_idle() or await self._start(), request)

    def _take_idle(self) -> Process | None:
        """Return an idle process that still lives; one that was killed says nothing about a value."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    async def _ask(self, process: Process, request: ValidationRequest) -> str | None:
        is_answered = False
        try:
            async with asyncio.timeout(self._options.deadline_s):
                line = await _exchange(process, encode(request) + b"\n")
            result = decode_result(line)
            is_answered = True
        except TimeoutError:
            return f"the value could not be validated within {self._options.deadline_s:g} s"
        except (OSError, ValueError, msgspec.DecodeError):
            return "the value could not be validated within the memory allowed"
        finally:
            if is_answered:
                self._idle.append(process)
            else:
                await end_child(process)
        if result.broken is not None:
            self._failures[result.broken] += 1
            self._log.error("validation failed", error=result.broken, count=self._failures[result.broken])
        return result.violation

    async def _start(self) -> Process:
        """Start a process and wait for a first reply, so that its start does not count towards a deadline."""
        try:
            process = await spawn_child(MODULE, str(os.getpid()), environment=self._options.environment)
        except OSError as error:
            raise WorkersUnavailable("values cannot be validated now") from error
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                decode_result(await _exchange(process, encode(ValidationRequest("true", "0")) + b"\n"))
        except BaseException as error:
            await end_child(process)
            if isinstance(error, TimeoutError | OSError | msgspec.DecodeError):
                raise WorkersUnavailable("values cannot be validated now") from error
            raise
        return process


async def _exchange(process: Process, line: bytes) -> bytes:
    """Raises `OSError` when the process has ended."""
    if process.stdin is None or process.stdout is None:
        raise BrokenPipeError("the process has no pipes")
    process.stdin.write(line)
    await process.stdin.drain()
    return await process.stdout.readline()
