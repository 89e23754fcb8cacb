"""`StaticGroups`: groups the rows of a captured step by adapter on the device, from the slots at the time of the replay.

Invariant: rows get the chunks and the kernels that `AdapterPath.group` gives them when the step is not captured.
"""

from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.kernels.group_rows import group_on_device
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import FEW_ADAPTERS, LoraPath
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKind


class StaticGroups:
    """Groups in memory of the capture, which replays write again."""

    def __init__(self, path: AdapterPath, max_adapters: int) -> None:
        """`max_adapters`: the most distinct adapters of a step."""
        self._path = path
        self._many = max(max_adapters, FEW_ADAPTERS + 1)

    def __call__(self, row_slots: Tensor, kind: AdapterKind, is_mixed: bool) -> LoraBatch | None:
        """Group `row_slots` int32 [rows] as steps of this kind require."""
        adapters = FEW_ADAPTERS if kind is AdapterKind.FEW else self._many
        path = LoraPath.of(adapters, is_mixed=is_mixed, deterministic=self._path.deterministic)
        return group_on_device(row_slots, path, adapters, is_static=True, workspace=self._path.workspace)
