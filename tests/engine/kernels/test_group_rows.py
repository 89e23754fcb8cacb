"""Where a step's rows are grouped: on the host for the CPU backend."""

import torch

from loraplex.engine.kernels.group_rows import group_rows
from loraplex.engine.lora.batch import HostLoraBatch

CPU = torch.device("cpu")


def test_a_cpus_rows_are_grouped_on_the_host() -> None:
    batch = group_rows([3, -1, 3, 0], CPU, 3)
    assert isinstance(batch, HostLoraBatch)
    assert batch.decodes is not None and batch.decodes.host_slots == (3,)
    assert batch.chunks is not None and batch.chunks.host_slots == (0,)


def test_a_step_without_adapters_has_none() -> None:
    assert group_rows([-1, -1], CPU) is None
