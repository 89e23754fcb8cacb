"""What each of several engines of one host has for itself: a GPU, or cores. Torch is not imported: gateways ask this.

Invariant: two places of one list share no GPU, and no physical core while there is one for each.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Final

import structlog

from loraplex.platform.startup_errors import SettingsError

VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
DEVICES: Final = Path("/dev")
TOPOLOGY: Final = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """A GPU as `CUDA_VISIBLE_DEVICES` names it, or physical cores, each as its logical processors; with neither, all."""

    gpu: str | None = None
    cores: tuple[tuple[int, ...], ...] = ()

    @property
    def device(self) -> str | None:
        """The place as people read it; None for the whole machine."""
        if self.gpu is not None:
            return f"GPU {self.gpu}"
        return f"cores {', '.join(str(core[0]) for core in self.cores)}" if self.cores else None

    @property
    def processors(self) -> frozenset[int]:
        """The logical processors of the cores."""
        return frozenset(each for core in self.cores for each in core)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the engine's process: OpenMP binds its threads to the cores, CUDA sees the GPU alone."""
        if self.gpu is not None:
            return {VISIBLE_DEVICES: self.gpu}
        places = ",".join("{" + ",".join(map(str, core)) + "}" for core in self.cores)
        return {"OMP_PLACES": places} if places else {}


WHOLE_MACHINE: Final = EnginePlace()


def engine_places(engines: int | None, device: str) -> list[EnginePlace]:
    """Return a place for each of `engines`, and one for each further GPU. None: an engine per GPU, or one.

    Raises `SettingsError` for more engines than GPUs.
    """
    gpus = visible_gpus() if device != "cpu" else ()
    if gpus:
        if (engines or 0) > len(gpus):
            raise SettingsError(f"setting `engines`: {engines} engines, and {len(gpus)} GPUs are visible")
        return [EnginePlace(gpu=gpu) for gpu in gpus]
    if (engines or 1) == 1:
        return [WHOLE_MACHINE]
    return core_places(engines or 1, physical_cores())


def core_places(engines: int, cores: Sequence[tuple[int, ...]]) -> list[EnginePlace]:
    """Divide the cores among the engines; engines that outnumber them share one each, which is logged."""
    if engines > len(cores):
        structlog.get_logger("loraplex.engines").warning(
            "engines share cores", engines=engines, physical_cores=len(cores)
        )
        return [EnginePlace(cores=(cores[number % len(cores)],)) for number in range(engines)]
    bounds = [len(cores) * number // engines for number in range(engines + 1)]
    return [EnginePlace(cores=tuple(cores[begin:end])) for begin, end in pairwise(bounds)]


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that a process of this environment sees, as `CUDA_VISIBLE_DEVICES` names them; none without CUDA's torch."""
    try:
        if version("torch").endswith("+cpu"):
            return ()
    except PackageNotFoundError:
        return ()
    # In a container the only device may be /dev/nvidia3, which CUDA counts as 0.
    files = [file for file in DEVICES.glob("nvidia*") if file.name.removeprefix("nvidia").isdecimal()]
    named = os.environ.get(VISIBLE_DEVICES)
    if named is None:
        return tuple(map(str, range(len(files))))
    gpus = [each.strip() for each in named.split(",")]
    # CUDA sees what stands before the first entry that names no GPU.
    end = next((place for place, gpu in enumerate(gpus) if gpu in ("", "-1")), len(gpus))
    return tuple(gpus[:end]) if files else ()


def physical_cores() -> list[tuple[int, ...]]:
    """The cores that this process may use, each as those of its logical processors that it may use."""
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(each) & allowed or frozenset({each}) for each in allowed}
    return sorted(tuple(sorted(core)) for core in cores)


def _siblings(processor: int) -> frozenset[int]:
    """The logical processors of a core, by a list such as `0,64` or `0-1`; the processor itself where the kernel names none."""
    try:
        text = (TOPOLOGY / f"cpu{processor}/topology/thread_siblings_list").read_text()
    except OSError:
        return frozenset({processor})
    ranges = [part.partition("-") for part in text.strip().split(",")]
    return frozenset(each for first, _, last in ranges for each in range(int(first), int(last or first) + 1))
