"""`ValidationProcesses`: validates each uploaded folder in its own process, which can be killed.

Invariant: whatever the files do to that process, its caller gets a result, and other tenants are not delayed. The
process gets two descriptors for reading and an empty environment.
"""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

from loraplex.adapters.confinement import DEFAULT_VALIDATION_LIMITS, SandboxLimits
from loraplex.adapters.errors import FolderRejected, ValidationUnavailable
from loraplex.adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.result import Rejected, ValidationResult, refused, refused_by
from loraplex.adapters.validation.upload_files import UploadFiles, open_upload
from loraplex.adapters.validation_child import Reply, Unconfined, ValidationJob, decode_reply, encode
from loraplex.grammar.child_process import end_child, python_command
from loraplex.grammar.trial.fair_queue import TenantFairQueue

MODULE: Final = "loraplex.adapters.validation_child"
MAX_REPLY_BYTES: Final = 16 << 20
MIB: Final = 1 << 20
SUBJECT: Final = "the upload"
ENTRY_POINT: Final = """\
import os, runpy, sys
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
sys.path[:0] = sys.argv[2:]
runpy.run_module(sys.argv[1], run_name="__main__")
"""
"""Runs a module whose folders are arguments. A system-call filter applies to one thread, so there must be no other."""


@dataclass(eq=False, slots=True)
class _Turn:
    """A waiting caller; `has_come` is set when it may start."""

    namespace: bytes
    has_come: asyncio.Event


class ValidationProcesses:
    """Of `environment` only PYTHONPATH is used: it locates the code of the processes, whose environment is empty."""

    def __init__(
        self,
        modules: Iterable[AdaptableModule],
        base_model_digest: str,
        *,
        environment: Mapping[str, str],
        limits: SandboxLimits = DEFAULT_VALIDATION_LIMITS,
        adapter_limits: AdapterLimits = DEFAULT_LIMITS,
        module: str = MODULE,
    ) -> None:
        """`module` is what a process runs; tests pass one that fails."""
        self._modules = tuple(modules)
        self._base_model_digest = base_model_digest
        self._path = tuple(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
        self._limits = limits
        self._adapter_limits = adapter_limits
        self._module = module
        self._queue: TenantFairQueue[_Turn] = TenantFairQueue(limits.concurrent, limits.concurrent_per_tenant)

    @property
    def waiting(self) -> int:
        """Folders that wait for a process."""
        return len(self._queue)

    async def validate(self, tenant_id: UUID, folder: Path) -> ValidationResult:
        """Validate a folder that no other process changes. Cancelling kills the process.

        Raises `ValidationUnavailable` when too many wait, or when no process can be started and confined here.
        """
        async with self._turn(tenant_id.bytes):
            return await self._run(folder)

    @asynccontextmanager
    async def _turn(self, namespace: bytes) -> AsyncIterator[None]:
        limits = self._limits
        if self._queue.waiting(namespace) >= limits.queued_per_tenant:
            raise ValidationUnavailable(f"{limits.queued_per_tenant} uploads of this tenant wait already")
        if len(self._queue) >= limits.queued:
            raise ValidationUnavailable(f"{limits.queued} uploads wait already")
        turn = _Turn(namespace, asyncio.Event())
        self._queue.put(turn)
        self._dispatch()
        try:
            await turn.has_come.wait()
            yield
        finally:
            if turn.has_come.is_set():
                self._queue.done(namespace)
            else:
                self._queue.remove(turn)
            self._dispatch()

    def _dispatch(self) -> None:
        while (turn := self._queue.take()) is not None:
            turn.has_come.set()

    async def _run(self, folder: Path) -> ValidationResult:
        with ExitStack() as stack:
            try:
                files = await on_thread(stack.enter_context, open_upload(folder, self._adapter_limits))
            except FolderRejected as error:
                return refused_by(error)
            return await self._validate(files)

    async def _validate(self, files: UploadFiles) -> ValidationResult:
        try:
            process = await self._spawn(files)
        except OSError as error:
            raise ValidationUnavailable(f"no process could be started: {error.strerror}") from error
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                output = await self._exchange(process, files)
                status = await process.wait()
        except TimeoutError:
            return refused(
                "deadline", SUBJECT, f"was not read to its end within {self._limits.deadline_s:g} s"
            )
        finally:
            await end_child(process)
        return self._result_of(output, status)

    async def _spawn(self, files: UploadFiles) -> Process:
        return await asyncio.create_subprocess_exec(
            *python_command("-c", ENTRY_POINT, self._module, *self._path),
            stdin=PIPE,
            stdout=PIPE,
            env={},
            pass_fds=(files.config.descriptor, files.weights.descriptor),
            preexec_fn=os.setpgrp,  # as in `spawn_child`
        )

    async def _exchange(self, process: Process, files: UploadFiles) -> bytes:
        if process.stdin is None or process.stdout is None:
            raise ValidationUnavailable("the process has no standard streams")
        job = ValidationJob(
            parent_pid=os.getpid(),
            files=files,
            modules=self._modules,
            base_model_digest=self._base_model_digest,
            adapter_limits=self._adapter_limits,
            limits=self._limits,
        )
        with suppress(ConnectionError):
            process.stdin.write(encode(job))
            await process.stdin.drain()
            process.stdin.close()
        output = bytearray()
        while len(output) <= MAX_REPLY_BYTES and (part := await process.stdout.read(MIB)):
            output += part
        if len(output) > MAX_REPLY_BYTES:
            # Kill once only: a second signal may find the process ended and take its status from the waiting task.
            process.kill()
            while await process.stdout.read(MIB):
                pass
        return bytes(output)

    def _result_of(self, output: bytes, status: int) -> ValidationResult:
        if status != 0:
            return self._result_of_exit(status)
        try:
            reply: Reply = decode_reply(output)
        except msgspec.DecodeError:
            return refused("process", SUBJECT, "the process that read it gave no result")
        if isinstance(reply, Unconfined):
            raise ValidationUnavailable(f"a validation cannot be confined here: {reply.reason}")
        return reply

    def _result_of_exit(self, status: int) -> Rejected:
        limits = self._limits
        match -status:
            case signal.SIGXCPU:
                return refused("cpu", SUBJECT, f"takes more than {limits.cpu_s} s of CPU time to read")
            case signal.SIGKILL:
                return refused(
                    "memory", SUBJECT, "the process that read it was killed, as happens when memory runs out"
                )
            case number if number > 0:
                return refused("process", SUBJECT, f"the process that read it was ended by signal {number}")
            case _:
                return refused("process", SUBJECT, "the process that read it crashed")
