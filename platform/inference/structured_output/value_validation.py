"""Validates finished values in worker processes, off the event loop.

One validation cannot be bounded from inside: `anyOf` of references to `anyOf` doubles its work with each line and holds the
interpreter's lock. Invariant: one validation per tenant at a time, each within a deadline.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import structlog

from loraplex.grammar.errors import GrammarInvalid, SchemaNotSatisfied
from loraplex.platform.workers.messages import Done, Ended, Failed, Refused
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import Sandbox, TaskSpec

SANDBOX: Final = Sandbox(niceness=10, data_bytes=1 << 30)


def value_validation_task(
    environment: Mapping[str, str], *, deadline_s: float = 2.0, queue_timeout_s: float = 60.0
) -> TaskSpec[None]:
    """Return the task. At most two processes run, started on demand."""
    return TaskSpec(
        name="value_validation",
        work="finished values",
        unavailable="values cannot be validated now",
        function="loraplex.grammar.json_schema.validator:validate_text",
        result=None,
        mode="reuse",
        sandbox=SANDBOX,
        environment=environment,
        deadline_s=deadline_s,
        queue_timeout_s=queue_timeout_s,
        refusals=(SchemaNotSatisfied, GrammarInvalid),
        concurrent=2,
    )


class ValueValidation:
    """Validates finished values in the worker pool of a gateway."""

    def __init__(self, pool: WorkerPool, task: TaskSpec[None]) -> None:
        self._pool = pool
        self._task = task
        self._failures: Counter[str] = Counter()
        self._log = structlog.get_logger("loraplex.validation")

    async def validate(self, namespace: bytes, schema: str, value: str) -> None:
        """Validate `value` against `schema`, both JSON texts. One that could not be validated in time does not satisfy it either.

        Raises `SchemaNotSatisfied`, `WorkersUnavailable`.
        """
        match await self._pool.run(self._task, (schema, value), namespace):
            case Done():
                return
            case Refused(message=violation):
                raise SchemaNotSatisfied(violation)
            case Failed(error=error):
                self._failures[error] += 1
                self._log.error("validation failed", error=error, count=self._failures[error])
                raise SchemaNotSatisfied("the value could not be validated")
            case Ended(how="deadline"):
                raise SchemaNotSatisfied(
                    f"the value could not be validated within {self._task.deadline_s:g} s"
                )
            case Ended():
                raise SchemaNotSatisfied("the value could not be validated within the memory allowed")
