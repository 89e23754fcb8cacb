"""Checks suites in worker processes: a file of 64 MiB takes minutes, and each of its schemas may take a third of a second."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from loraplex.platform.evaluations.recorded_suite import RecordedSuite
from loraplex.platform.evaluations.suite import MAX_SUITE_BYTES, SuiteInvalid, SuiteSummary
from loraplex.platform.workers.messages import Done, Refused
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import MIB, Sandbox, TaskSpec

DEADLINE_S: Final = 120.0
SANDBOX: Final = Sandbox(niceness=10, data_bytes=2 << 30)


BOUNDS: Final = f"within {DEADLINE_S:g} s and {SANDBOX.data_bytes} bytes of memory"


class SuiteChecks:
    """Checks suites in the worker pool of a gateway. Each has a process of its own, one at a time for a tenant."""

    def __init__(self, pool: WorkerPool, environment: Mapping[str, str]) -> None:
        """`environment`: that of the processes."""
        self._pool = pool
        self._check: TaskSpec[SuiteSummary] = _task(
            "suite_check", "suite:check_suite", SuiteSummary, 16 * MIB, environment
        )
        self._make: TaskSpec[RecordedSuite] = _task(
            "recorded_suite", "recorded_suite:suite_of", RecordedSuite, MAX_SUITE_BYTES + MIB, environment
        )

    async def check(self, namespace: bytes, content: bytes) -> SuiteSummary:
        """Check a file of a tenant. Raises `SuiteInvalid`, also for one that takes too long; `WorkersUnavailable`."""
        match await self._pool.run(self._check, (content,), namespace):
            case Done(result=summary):
                return summary
            case Refused(message=message, param=param):
                raise SuiteInvalid(message, param)
            case _:
                raise SuiteInvalid(f"The suite cannot be checked {BOUNDS}: divide it.", "suite")

    async def make(self, namespace: bytes, recordings: Sequence[bytes]) -> RecordedSuite:
        """Make a suite of a tenant's recordings, in their order. Raises `SuiteInvalid`, `WorkersUnavailable`."""
        match await self._pool.run(self._make, (recordings,), namespace):
            case Done(result=made) if made.summary.cases:
                return made
            case Done():
                raise SuiteInvalid(f"None of {len(recordings)} recorded requests becomes a case.", "limit")
            case _:
                raise SuiteInvalid(f"The suite cannot be made {BOUNDS}: name fewer requests.", "limit")


def _task(
    name: str, function: str, result: type[Any], max_reply_bytes: int, environment: Mapping[str, str]
) -> TaskSpec[Any]:
    return TaskSpec(
        name=name,
        work="suites",
        unavailable="suites cannot be checked now",
        function=f"loraplex.platform.evaluations.{function}",
        result=result,
        mode="spawn",
        sandbox=SANDBOX,
        environment=environment,
        deadline_s=DEADLINE_S,
        queue_timeout_s=2 * DEADLINE_S,
        refusals=(SuiteInvalid,),
        queued_per_tenant=4,
        max_reply_bytes=max_reply_bytes,
    )
