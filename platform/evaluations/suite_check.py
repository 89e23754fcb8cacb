"""Checks suites in worker processes: a file of 64 MiB takes minutes, and each of its schemas may take a third of a second."""

from collections.abc import Mapping
from typing import Final

from loraplex.platform.evaluations.suite import SuiteInvalid, SuiteSummary
from loraplex.platform.workers.messages import Done, Refused
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import Sandbox, TaskSpec

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
