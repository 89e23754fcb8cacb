"""`CompileWorker`: the compile-check process as the gateway sees it: start, messages, restart.

Invariant: at most one process lives at a time, and `on_lost` is called once for each ready process that ended.
"""

import asyncio
import contextlib
import os
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import structlog

from loraplex.grammar.child_process import spawn_child
from loraplex.grammar.trial.messages import (
    Cancel,
    CompileResult,
    CompileSpawn,
    Ready,
    SandboxLimits,
    StartCheck,
    decode_report,
    encode,
)

MODULE: Final = "loraplex.grammar.trial.process"
FIRST_DELAY_S: Final = 0.1
MAX_DELAY_S: Final = 30.0
DOWN_AFTER_FAILURES: Final = 3
SETTLED_S: Final = 60.0
EXIT_GRACE_S: Final = 2.0
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""A process that forks must have one thread: another thread's lock would stay locked in the child for ever. No device either.

Huge pages halve the cost of a fork, which is most of a small check (measured: 7 to 4 ms, and as much for its end).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileWorkerConfig:
    """`tokenizer` is a model folder or a `tokenizer.json`. `environment` is the process's environment, without
    secrets.
    """

    tokenizer: str
    vocab_size: int
    end_token_ids: tuple[int, ...]
    limits: SandboxLimits
    environment: Mapping[str, str]
    start_timeout_s: float = 120.0


class WorkerListener(Protocol):
    """Receives the process's events on the event loop."""

    def on_ready(self) -> None: ...

    def on_result(self, result: CompileResult) -> None: ...

    def on_lost(self) -> None: ...

    def on_down(self) -> None: ...


class CompileWorker:
    """Supervises one process from `start` to `close`."""

    def __init__(self, options: CompileWorkerConfig, listener: WorkerListener) -> None:
        self._options = options
        self._listener = listener
        self._process: Process | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("loraplex.trials")
        self.ready: Ready | None = None
        self.restarts = 0
        self._failures = 0

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def down(self) -> bool:
        """Whether the process failed repeatedly, so that waiting is useless."""
        return self.ready is None and self._failures >= DOWN_AFTER_FAILURES

    def start(self) -> None:
        """Start the process in the background; `on_ready` reports when it accepts checks."""
        self._supervision = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """End the process and its checks."""
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)

    def send(self, order: StartCheck | Cancel) -> None:
        """Send an order to a ready process; a dying process never replies."""
        if self._process is not None and self._process.stdin is not None and self.ready is not None:
            self._process.stdin.write(encode(order) + b"\n")

    def kill(self) -> None:
        """Kill a process that hangs; it is restarted."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _supervise(self) -> None:
        while True:
            started = asyncio.get_running_loop().time()
            reason = await self._run_process()
            lived_s = asyncio.get_running_loop().time() - started
            self._failures = 1 if lived_s > SETTLED_S else self._failures + 1
            self.restarts += 1
            delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._failures - 1))
            self._log.error("compile-check process lost", reason=reason, restart_in_s=delay_s)
            if self.down:
                self._listener.on_down()
            await asyncio.sleep(delay_s)

    async def _run_process(self) -> str:
        """Run one process from start to end and return why it ended. It is reaped then, also on cancellation."""
        try:
            process = self._process = await self._spawn()
        except OSError as error:
            return str(error)
        try:
            async with asyncio.timeout(self._options.start_timeout_s) as start_timeout:
                while line := await process.stdout.readline() if process.stdout else b"":
                    if self._receive_from(line):
                        start_timeout.reschedule(None)
            return f"it ended with status {await process.wait()}"
        except TimeoutError:
            return f"it was not ready within {self._options.start_timeout_s:g} s"
        except (msgspec.MsgspecError, ValueError) as error:
            return f"it sent something other than a report: {error}"
        finally:
            await self._reap(process)

    async def _spawn(self) -> Process:
        process = await spawn_child(MODULE, environment={**self._options.environment, **ENVIRONMENT})
        spawn = CompileSpawn(
            parent_pid=os.getpid(),
            tokenizer=self._options.tokenizer,
            vocab_size=self._options.vocab_size,
            end_token_ids=self._options.end_token_ids,
            limits=self._options.limits,
        )
        if process.stdin is not None:
            process.stdin.write(encode(spawn) + b"\n")
        return process

    def _receive_from(self, line: bytes) -> bool:
        """Return True when the process has become ready."""
        match decode_report(line):
            case Ready() as ready:
                self.ready = ready
                self._listener.on_ready()
                return True
            case CompileResult() as result:
                self._listener.on_result(result)
                return False

    async def _reap(self, process: Process) -> None:
        """Close its standard input first, so that it can end its children itself, then kill and reap it."""
        was_ready, self.ready = self.ready, None
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_GRACE_S):
                await process.wait()
        self.kill()
        await process.wait()
        if was_ready is not None:
            self._listener.on_lost()
