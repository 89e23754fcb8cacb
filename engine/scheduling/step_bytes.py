"""`StepBytes`: what launched steps read of the device's memory, by what it is.

Invariant: counted from plans alone, so that a step costs a pass over its rows and no look at the device. What a kernel reads twice
counts once: the figure is the least that a step must read.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Final

from loraplex.engine.batch.step_plan import StepPlan
from loraplex.engine.messages import AdapterRef

_START: Final = attrgetter("start")
_ADAPTER: Final = attrgetter("adapter")


class StepBytes:
    """Counts `weights`, `kv` and `adapters`. A step reads `step_weights` bytes of weights, `token_kv` for each token of a row's
    context, and each adapter of its rows once, of the size that `adapter_size` tells.
    """

    def __init__(self, step_weights: int, token_kv: int, adapter_size: Callable[[AdapterRef], int]) -> None:
        self._step_weights = step_weights
        self._token_kv = token_kv
        self._adapter_size = adapter_size
        self.weights = self.kv = self.adapters = 0

    def count(self, plan: StepPlan) -> None:
        """Count a step that is launched."""
        self.weights += self._step_weights
        self.kv += self._token_kv * (sum(map(_START, plan.rows)) + plan.num_tokens)
        adapters = set[AdapterRef | None](map(_ADAPTER, plan.rows))
        self.adapters += sum(self._adapter_size(each) for each in adapters if each is not None)
