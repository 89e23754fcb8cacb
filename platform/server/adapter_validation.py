"""`AdapterValidation`: validates each uploaded folder in a worker process of its own.

Invariant: whatever the files do to that process, the caller gets a result. The process gets the two open files, for reading
only, and an empty environment; where the system does not confine it, nothing is read.
"""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Final
from uuid import UUID

import structlog

from loraplex.adapters.errors import FolderRejected, ValidationUnavailable
from loraplex.adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.target_modules import BaseModel
from loraplex.adapters.validation.result import Rejected, ValidationResult, refused, refused_by
from loraplex.adapters.validation.upload_files import UploadFiles, open_upload
from loraplex.platform.errors import ShareExceeded, WorkersUnavailable
from loraplex.platform.processes.environment import code_environment
from loraplex.platform.workers.messages import Done, Ended, Failed, Refused, Reply
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import MIB, Sandbox, TaskSpec

CPU_S: Final = 120
"""Enough to read the largest adapter several times."""
SUBJECT: Final = "the upload"
CRASHED: Final = "the process that read it crashed"
LOG: Final = structlog.get_logger("loraplex.lifecycle")


def validation_task() -> TaskSpec[ValidationResult]:
    """The task of one upload: a new process with the strictest sandbox."""
    return TaskSpec(
        name="adapter-validation",
        work="uploads",
        unavailable="no process can validate uploads now",
        function="loraplex.adapters.validation.validate:validate_files",
        result=ValidationResult,
        mode="spawn",
        sandbox=Sandbox(
            niceness=19,
            cpu_s=CPU_S,
            address_space_bytes=256 * MIB,
            max_descriptors=16,
            filter_system_calls=True,
        ),
        environment=code_environment(),
        # At the lowest priority, beside engines that use every core.
        deadline_s=900.0,
        concurrent=2,
        queued=256,
        queued_per_tenant=16,
        queue_timeout_s=None,
    )


class AdapterValidation:
    """`limits` bound one upload."""

    def __init__(
        self,
        pool: WorkerPool,
        base: BaseModel,
        limits: AdapterLimits = DEFAULT_LIMITS,
        task: TaskSpec[ValidationResult] | None = None,
    ) -> None:
        self._pool = pool
        self._arguments = (base, limits)
        self._limits = limits
        self.task = task or validation_task()

    async def validate(self, tenant_id: UUID, folder: Path) -> ValidationResult:
        """Validate a folder that no other process changes. Cancelling kills the process.

        Raises `ValidationUnavailable` when too many wait, when the gateway has too many files open, or when no process can be
        started and confined here.
        """
        try:
            reply = await self._pool.run(self.task, self._arguments, tenant_id, files=self._open(folder))
        except FolderRejected as error:
            return refused_by(error)
        except (WorkersUnavailable, ShareExceeded) as error:
            raise ValidationUnavailable(str(error)) from error
        return _result_of(reply, self.task)

    @asynccontextmanager
    async def _open(self, folder: Path) -> AsyncIterator[UploadFiles]:
        with ExitStack() as stack:
            try:
                files = await on_thread(stack.enter_context, open_upload(folder, self._limits))
            except OSError as error:
                raise ValidationUnavailable(f"the files cannot be opened now: {error.strerror}") from error
            yield files


def _result_of(reply: Reply[ValidationResult], task: TaskSpec[ValidationResult]) -> ValidationResult:
    match reply:
        case Done(result):
            return result
        case Ended():
            return _result_of_end(reply, task)
        case Failed(error) | Refused(error):
            # A defect of the validation itself, such as an import that the sandbox refuses.
            LOG.error("validation of an upload failed", error=error)
            return refused("process", SUBJECT, CRASHED)


def _result_of_end(ended: Ended, task: TaskSpec[ValidationResult]) -> Rejected:
    killed = "the process that read it was killed, as happens when memory runs out"
    match ended.how, ended.exit_code:
        case "cpu", _:
            return refused("cpu", SUBJECT, f"takes more than {task.sandbox.cpu_s} s of CPU time to read")
        case "deadline", _:
            return refused("deadline", SUBJECT, f"was not read to its end within {task.deadline_s:g} s")
        case "memory", _:
            return refused("memory", SUBJECT, killed)
        case _, 0:
            return refused("process", SUBJECT, "the process that read it gave no result")
        case _, code if code < 0:
            return refused("process", SUBJECT, f"the process that read it was ended by signal {-code}")
        case _:
            return refused("process", SUBJECT, CRASHED)
