"""How fast a device reads its memory: the bound of a decode step, which reads every weight once."""

import time
from typing import Final

import torch

MAX_BYTES: Final = 256 << 20
GPU_READS: Final = 8
"""In a row: they hide how long a GPU takes to begin one."""
ROUNDS: Final = 12


def memory_rate(device: torch.device, num_bytes: int) -> float:
    """Return the bytes per second at which `device` reads `num_bytes`, of which at most `MAX_BYTES` are tried.

    The best of some rounds counts, since other processes only slow a read down. So few bytes that a cache keeps them are read at
    its rate, as the weights of such a model are.
    """
    numbers = torch.ones(max(1, min(num_bytes, MAX_BYTES) // 4), device=device)
    reads = GPU_READS if device.type == "cuda" else 1
    return numbers.nbytes * reads / min(_seconds(numbers, reads) for _ in range(ROUNDS))


def _seconds(numbers: torch.Tensor, reads: int) -> float:
    began = time.perf_counter()
    for _ in range(reads):
        numbers.sum()
    if numbers.device.type == "cuda":
        torch.cuda.synchronize(numbers.device)
    return time.perf_counter() - began
