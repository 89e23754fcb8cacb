"""The measured rate is a rate of this device, also where there is next to nothing to read."""

import pytest
import torch

from loraplex.engine.capacity.memory_rate import memory_rate


@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
def test_a_rate_is_measured(num_bytes: int) -> None:
    assert memory_rate(torch.device("cpu"), num_bytes) > 0
