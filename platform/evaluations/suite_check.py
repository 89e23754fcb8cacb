"""Checks suites in worker processes: a file of 64 MiB takes minutes, and each of its schemas may take a third of a second."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from loraplex.platform.evaluations.recorded_suite import RecordedSuite
from loraplex.platform.evaluations.suite import MAX_SUITE_BYTES, SuiteInvalid, SuiteSummary
from loraplex.platform.workers.messages import Done, Refused
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import MIB, Sandbox, TaskSpec

DEADLINE_S: Final = 120.0
SANDBOX: Final = Sandbox(niceness=10, data_bytes=2 << 30)


def suite_check_task(environment: Mapping[str, str]) -> TaskSpec[SuiteSummary]:
    """Return the task. Each suite has a process of its own, one at a time for a tenant."""
    return TaskSpec(
        name="suite_check",
        work="suites",
        unavailable="suites cannot be checked now",
        function="loraplex.platform.evaluations.suite:check_suite",
        result=SuiteSummary,
        mode="spawn",
        sandbox=SANDBOX,
        environment=environment,
        deadline_s=DEADLINE_S,
        queue_timeout_s=2 * DEADLINE_S,
        refusals=(SuiteInvalid,),
        queued_per_tenant=4,
    )


class SuiteChecks:
    """Checks suites in the worker pool of a gateway."""

    def __init__(self, pool: WorkerPool, task: TaskSpec[SuiteSummary]) -> None:
        self._pool = pool
        self._task = task
        recorded: Any = replace(
            task,
            name="recorded_suite",
            function="loraplex.platform.evaluations.recorded_suite:suite_of",
            result=RecordedSuite,
            max_reply_bytes=MAX_SUITE_BYTES + MIB,
        )
        self._recorded: TaskSpec[RecordedSuite] = recorded

    async def check(self, namespace: bytes, content: bytes) -> SuiteSummary:
        """Check a file of a tenant. Raises `SuiteInvalid`, also for one that takes too long; `WorkersUnavailable`."""
        match await self._pool.run(self._task, (content,), namespace):
            case Done(result=summary):
                return summary
            case Refused(message=message, param=param):
                raise SuiteInvalid(message, param)
            case _:
                bounds = f"{DEADLINE_S:g} s and {SANDBOX.data_bytes} bytes of memory"
                raise SuiteInvalid(f"The suite cannot be checked within {bounds}: divide it.", "suite")

    async def make(self, namespace: bytes, recordings: Sequence[bytes]) -> RecordedSuite:
        """Make a suite of a tenant's recordings, in their order. Raises `SuiteInvalid`, `WorkersUnavailable`."""
        match await self._pool.run(self._recorded, (recordings,), namespace):
            case Done(result=made) if made.summary.cases:
                return made
            case Done():
                raise SuiteInvalid(f"None of {len(recordings)} recorded requests becomes a case.", "limit")
            case _:
                bounds = f"{DEADLINE_S:g} s and {SANDBOX.data_bytes} bytes of memory"
                raise SuiteInvalid(f"The suite cannot be made within {bounds}: name fewer requests.", "limit")
