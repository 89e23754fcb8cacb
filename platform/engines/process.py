"""`EngineProcess` supervises an engine that runs as a child of this process; requests go through its `client`.

Invariant: at most one child lives at a time. When it dies or hangs, open requests fail within seconds, and it is restarted
with backoff. Supervision ends only with `stop`, or in a crash loop if the policy has one.
"""

import asyncio
import contextlib
import math
import os
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import structlog

from loraplex.engine.config import EngineConfig
from loraplex.engine.fake_engine import FakeScript
from loraplex.engine.messages import EngineStats
from loraplex.platform.engines import spawn_messages, wire
from loraplex.platform.engines.engine_places import WHOLE_MACHINE, EnginePlace
from loraplex.platform.engines.remote_client import OnDeath, RemoteEngine, ignore_death
from loraplex.platform.engines.spawn_messages import (
    Broken,
    Described,
    Drained,
    Progress,
    Ready,
    Report,
    SpawnRequest,
    Stage,
)
from loraplex.platform.processes.child_process import module_command
from loraplex.platform.processes.environment import engine_environment
from loraplex.platform.processes.restart_budget import RestartBudget, RestartPolicy
from loraplex.platform.startup_errors import EngineStartFailed

STOP_GRACE_S = 5.0
RESTART_FACTOR = 5.0
MIN_RESTART_S = 60.0
"""A restart on a busy machine may take so long, however short the first start was."""
FIRST_STAGE = "starting Python and importing its modules"
MODULE = "loraplex.platform.engines.main"


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    """A child that answers no ping for `unresponsive_s`, or has work and completes no step for `hang_s`, is killed."""

    unresponsive_s: float = 30.0
    hang_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcessOptions:
    """Configuration of one engine child. `drain_s` bounds its shutdown, `start_timeout_s` its start, `start_silence_s` the time in
    which a start neither computes nor reads. A restart is bounded by `RESTART_FACTOR` times what the first start took, too.
    """

    address: str
    config: EngineConfig
    fake: FakeScript | None = None
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    start_timeout_s: float = 1800.0
    start_silence_s: float = 60.0
    drain_s: float = 30.0
    log_level: str = "info"
    data_dir: str | None = None
    place: EnginePlace = WHOLE_MACHINE


class EngineProcess:
    """Owns an engine process. `on_stage` receives each stage of a start as text for people.

    `client` serves requests, also while a lost engine restarts: then it refuses them. Its `restarts` and `failure` are set here.
    `described` is set once its `info` is known, which several engines may share. Supervision ends with `crash_loop`, or with
    `drained`: the child ended because it was asked to drain.
    """

    def __init__(
        self,
        options: EngineProcessOptions,
        on_stage: Callable[[str], None] | None = None,
        on_death: OnDeath = ignore_death,
        described: asyncio.Event | None = None,
    ) -> None:
        self._options = options
        self._on_stage = on_stage or (lambda text: None)
        self.client = RemoteEngine(options.address, silence_s=math.inf, on_death=on_death)
        self.client.device = options.place.device
        self._budget = RestartBudget(options.restart)
        self._process: Process | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._reports: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("loraplex.engine_process")
        self._stage = FIRST_STAGE
        self._start_limit_s = options.start_timeout_s
        self.described = described or asyncio.Event()
        self.crash_loop = asyncio.Event()
        self.drained = asyncio.Event()
        self._retires = False

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is no child."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def place(self) -> EnginePlace:
        """What the child has for itself."""
        return self._options.place

    def drain(self, grace_s: float) -> None:
        """Let the child drain and end, and start no other one. Raises `EngineUnavailable`."""
        self.client.request_drain(grace_s)
        self._retires = True

    async def start(self) -> None:
        """Spawn the child and wait until it takes requests. Raises `EngineStartFailed`; then no process is left running."""
        wire.private_folder(wire.socket_path(self._options.address).parent)
        self.client.start()
        began = time.monotonic()
        try:
            await self._spawn_until_ready()
        except BaseException:
            await self.client.close()
            raise
        often_enough_s = max(MIN_RESTART_S, RESTART_FACTOR * (time.monotonic() - began))
        self._start_limit_s = min(self._start_limit_s, often_enough_s)
        self._supervision = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """End the child: SIGTERM, its drain time, then SIGKILL."""
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        await self._terminate(self._options.drain_s + STOP_GRACE_S)
        await self.client.close()

    async def _spawn_until_ready(self) -> None:
        self._stage = FIRST_STAGE
        environment = engine_environment() | self._options.place.environment
        process = self._process = await asyncio.create_subprocess_exec(
            *module_command(MODULE), stdin=PIPE, stdout=PIPE, env=environment, preexec_fn=os.setpgrp
        )
        try:
            async with asyncio.timeout(self._start_limit_s):
                await self._send_spawn_request(process)
                await self._until_ready(process)
                await self._until_connected(process)
        except TimeoutError:
            await self._kill()
            raise EngineStartFailed(
                f"the engine was not ready within {self._start_limit_s:g} s; it stopped at: {self._stage}"
            ) from None
        except BaseException:
            await self._kill()
            raise
        self._reports = asyncio.create_task(self._read_reports(process))

    async def _send_spawn_request(self, process: Process) -> None:
        """Write the spawn request. Standard input stays open: its end shows the child that this process has died."""
        spawn = SpawnRequest(
            address=self._options.address,
            parent_pid=os.getpid(),
            config=self._options.config,
            fake=self._options.fake,
            processors=self._options.place.processors,
            drain_s=self._options.drain_s,
            log_level=self._options.log_level,
            data_dir=self._options.data_dir,
        )
        if process.stdin is None:
            raise EngineStartFailed("the engine process has no standard input")
        if process.stdin.is_closing():
            # uvloop raises a `RuntimeError` for a write to a child that has ended.
            raise self._ended_early(await process.wait())
        process.stdin.write(spawn_messages.encode(spawn) + b"\n")
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()

    async def _until_ready(self, process: Process) -> None:
        while (report := await self._report_in_time(process)) is not None:
            match report:
                case Progress():
                    pass
                case Stage(text):
                    self._stage = text
                    self._on_stage(text)
                case Described(info):
                    self.client.describe(info)
                    self.described.set()
                case Broken(reason):
                    raise EngineStartFailed(f"the engine did not start: {reason}")
                case Ready():
                    self._stage = "connecting to its socket"
                    return
        raise self._ended_early(await process.wait())

    async def _report_in_time(self, process: Process) -> Report | None:
        """Raises `EngineStartFailed` for a child that reports nothing, not even that its start goes on."""
        silence_s = self._options.start_silence_s
        try:
            async with asyncio.timeout(silence_s):
                return await _next_report(process)
        except TimeoutError:
            raise EngineStartFailed(
                f"the engine's start neither computed nor read anything for {silence_s:g} s; it stopped at: {self._stage}"
            ) from None

    async def _until_connected(self, process: Process) -> None:
        """Wait for the client's connection. Raises `EngineStartFailed` when the child ends before."""
        ended = asyncio.create_task(process.wait())
        connected = asyncio.create_task(self.client.wait_ready())
        try:
            await asyncio.wait({ended, connected}, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                raise self._ended_early(ended.result())
            await connected
        finally:
            ended.cancel()
            connected.cancel()

    def _ended_early(self, status: int) -> EngineStartFailed:
        return EngineStartFailed(
            f"the engine ended with status {status} before it was ready, at: {self._stage}"
        )

    async def _read_reports(self, process: Process) -> None:
        while (report := await _next_report(process)) is not None:
            if isinstance(report, Stage):
                self._on_stage(report.text)
            self._retires |= isinstance(report, Drained)

    async def _supervise(self) -> None:
        while not self.crash_loop.is_set():
            reason = await self._wait_for_failure()
            if self._reports is not None and self.pid is None:
                await asyncio.wait({self._reports}, timeout=STOP_GRACE_S)
            if self._retires:
                # Of one that said so before it ended, nothing died.
                self.client.bury("it was drained")
                self.drained.set()
                return
            self._log.error("engine lost", reason=reason, pid=self.pid)
            self.client.failure = f"the engine was lost: {reason}"
            self.client.bury(reason)
            await self._kill()
            await self._restart(reason)

    async def _wait_for_failure(self) -> str:
        """Wait until the child has ended or must be killed, and return the reason."""
        process = self._process
        if process is None:
            return "it is not running"
        ended = asyncio.create_task(process.wait())
        try:
            while True:
                done, _ = await asyncio.wait({ended}, timeout=wire.PING_INTERVAL_S)
                if done:
                    return f"it ended with status {ended.result()}"
                reason = self._kill_reason()
                if reason is not None:
                    return reason
        finally:
            ended.cancel()

    def _kill_reason(self) -> str | None:
        stats = self.client.last_stats or EngineStats()
        busy = stats.running + stats.waiting > 0
        return kill_reason(self._options.watchdog, self.client.silent_for(), busy, stats.heartbeat_age_s)

    async def _restart(self, reason: str) -> None:
        """Restart the child until it is ready or in a crash loop."""
        while (delay := self._budget.next_delay(time.monotonic())) is not None:
            self.client.restarts = self._budget.restarts
            self._on_stage(f"engine lost ({reason}); restarting it in {delay:.1f} s")
            await asyncio.sleep(delay)
            try:
                await self._spawn_until_ready()
            except Exception as error:  # noqa: BLE001 - reported; no error of one start may end the supervision
                reason = str(error)
                self.client.failure = f"the engine does not restart: {reason}"
                self._log.error("engine did not restart", reason=reason)
            else:
                self.client.failure = None
                self._on_stage("engine ready again")
                return
        self.client.failure = f"the engine keeps failing and is not restarted: {reason}"
        self.crash_loop.set()

    async def _terminate(self, grace_s: float) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
        await self._kill()

    async def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if self._reports is not None:
            self._reports.cancel()
            await asyncio.gather(self._reports, return_exceptions=True)


async def _next_report(process: Process) -> Report | None:
    """Read the child's next report; None at the end of its output. Lines that are no report are skipped."""
    if process.stdout is None:
        return None
    while line := await process.stdout.readline():
        with contextlib.suppress(msgspec.MsgspecError):
            return spawn_messages.decode_report(line)
    return None


def kill_reason(limits: WatchdogConfig, silent_s: float, busy: bool, since_step_s: float) -> str | None:
    """Why the child must be killed; None while it is healthy."""
    if silent_s > limits.unresponsive_s:
        return f"it answered nothing for {silent_s:.1f} s"
    if busy and since_step_s > limits.hang_s:
        return f"it has work and completed no step for {since_step_s:.1f} s"
    return None
