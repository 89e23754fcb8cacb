"""The situations of the operator's page by the name of their section there."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from tests.runbooks import answers, engines, load
from tests.runbooks.provoked import Provoked

SITUATIONS: Final[dict[str, Callable[[Path, Path], AbstractContextManager[Provoked]]]] = {
    "wrong-output": answers.wrong_output,
    "queue-high-processor-idle": load.idle_with_queue,
    "busy-but-slow": load.busy_but_slow,
    "prefix-cache-without-gain": load.no_prefix_gain,
    "slow-first-token": load.slow_first_token,
    "slow-stream": engines.slow_stream,
    "an-upgrade-that-regressed": answers.upgrade,
    "a-tenant-that-hurts-others": load.hurting_tenant,
    "bills-that-differ": answers.bills_differ,
    "an-engine-that-dies-again-and-again": engines.dying_engine,
}
"""Each takes an empty folder for its installation, and the demo model's."""
