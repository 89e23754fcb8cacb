"""`NumericCheck`: compares what the device computes for an adapter with the float32 reference, a few modules per step.

Invariant: the step loop only launches, for `STEP_BUDGET_S` per step or one site. A side thread reads weights and compares
figures. The adapter is pinned during its probe and unpinned however the probe ends.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loraplex.engine.adapter_probe.reference import SiteFigures, compare
from loraplex.engine.errors import (
    AdapterLoadFailed,
    EngineError,
    EngineOverloaded,
    EngineUnavailable,
    RequestTimeout,
)
from loraplex.engine.kernels.group_rows import every_path_of
from loraplex.engine.kernels.sgmv import sgmv
from loraplex.engine.layers.embedding import add_adapters
from loraplex.engine.lora.loader import AdapterSource
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.lora.site import LoraSite
from loraplex.engine.lora.weights import LoraWeights
from loraplex.engine.messages import AdapterRef, ProbeReport
from loraplex.engine.threads import lower_priority

ROWS = 4
STEP_BUDGET_S = 0.002
PROBE_TIMEOUT_S = 120.0
MAX_WAITING = 8
NICENESS = 10
SEED = 20_25


@dataclass(slots=True)
class _Probe:
    adapter: AdapterRef
    done: "Future[ProbeReport]"
    deadline: float
    weights: "Future[LoraWeights] | None" = None
    is_pinned: bool = False
    sites: Iterator[LoraSite] | None = None
    compared: "list[Future[SiteFigures]]" = field(default_factory=list)
    longest_step_s: float = 0.0


class NumericCheck:
    """Runs one probe at a time. All calls come from the step loop, except those of the side thread."""

    def __init__(
        self,
        sites: Sequence[LoraSite],
        pool: AdapterPool,
        source: AdapterSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bound: float,
        deterministic: bool,
        clock: Callable[[], float],
    ) -> None:
        self._sites = sites
        self._pool = pool
        self._source = source
        self._dtype = dtype
        self._device = device
        self._bound = bound
        self._deterministic = deterministic
        self._clock = clock
        self._waiting: deque[_Probe] = deque()
        cores = os.sched_getaffinity(0)
        self._side_thread = ThreadPoolExecutor(
            1, "adapter-probe", initializer=_set_up_thread, initargs=(cores,)
        )

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def warm_up(self) -> None:
        """Launch what a probe does, once for each shape of a site, so that its kernels are compiled before any step."""
        for site in {(site.inputs, site.slice_sizes): site for site in self._sites}.values():
            self._launch(site, 0)

    def start(self, adapter: AdapterRef, done: "Future[ProbeReport]") -> None:
        """Queue a probe. `done` gets a report about the modules alone, or an `EngineError`; cancelling it ends the probe."""
        if len(self._waiting) >= MAX_WAITING:
            done.set_exception(EngineOverloaded(f"{MAX_WAITING} adapters wait to be probed"))
            return
        self._waiting.append(_Probe(adapter, done, self._clock() + PROBE_TIMEOUT_S))

    def advance(self) -> None:
        """Advance the first probe as far as possible without waiting. Called once per step; costs next to nothing without a
        probe.
        """
        if not self._waiting:
            return
        probe = self._waiting[0]
        began = self._clock()
        try:
            figures = None if probe.done.cancelled() else self._advance(probe)
            if figures is None and not probe.done.cancelled():
                if began > probe.deadline:
                    raise RequestTimeout(f"the adapter was not probed within {PROBE_TIMEOUT_S:g} s")
                probe.longest_step_s = max(probe.longest_step_s, self._clock() - began)
                return
        except EngineError as error:
            self._end(probe, error)
        except Exception as error:  # noqa: BLE001 - no tenant's adapter may end the step loop
            self._end(probe, AdapterLoadFailed(f"the adapter could not be probed: {type(error).__name__}"))
        else:
            self._end(probe, figures)

    def close(self, reason: str = "the engine is closed") -> None:
        """Fail the waiting probes and end the thread. Idempotent."""
        while self._waiting:
            self._end(self._waiting[0], EngineUnavailable(reason))
        self._side_thread.shutdown(wait=False, cancel_futures=True)

    def _advance(self, probe: _Probe) -> ProbeReport | None:
        if probe.weights is None:
            probe.weights = self._side_thread.submit(self._source.load, probe.adapter)
        if not probe.is_pinned:
            probe.is_pinned = self._pin(probe.adapter)
        if not probe.is_pinned or not probe.weights.done():
            return None
        weights = probe.weights.result()
        if probe.sites is None:
            probe.sites = (site for site in self._sites if not weights.modules.keys().isdisjoint(site.names))
        if self._launch_some(probe, probe.sites, weights):
            return None
        if not all(figures.done() for figures in probe.compared):
            return None
        return self._report(probe, [figures.result() for figures in probe.compared])

    def _pin(self, adapter: AdapterRef) -> bool:
        """Pin the adapter if it is resident; otherwise start its load and return False. Raises the `AdapterError` of an
        adapter that cannot be loaded.
        """
        match self._pool.state(adapter):
            case AdapterState.RESIDENT:
                self._pool.pin(adapter)
                return True
            case AdapterState.FAILED | AdapterState.QUARANTINED:
                raise self._pool.take_error(adapter)
            case AdapterState.ABSENT:
                self._pool.prefetch(adapter)
        return False

    def _launch_some(self, probe: _Probe, sites: Iterator[LoraSite], weights: LoraWeights) -> bool:
        """Launch as many sites as a step's budget allows; False when none is left."""
        until = self._clock() + STEP_BUDGET_S
        slot = self._pool.slots()[probe.adapter.key]
        while (site := next(sites, None)) is not None:
            x, results = self._launch(site, slot)
            probe.compared.append(self._side_thread.submit(compare, site, weights, x, results))
            if self._clock() >= until:
                return True
        return False

    @torch.inference_mode()
    def _launch(self, site: LoraSite, slot: int) -> tuple[Tensor, list[Tensor]]:
        """Return the inputs, on the host, and the result [rows, outputs] of each set of kernels, on the device that
        computed it.
        """
        generator = torch.Generator().manual_seed(SEED)
        paths = every_path_of(slot, ROWS, self._device, deterministic=self._deterministic)
        results = [torch.zeros(ROWS, site.outputs, dtype=self._dtype, device=self._device) for _ in paths]
        if site.names == ("embed_tokens",):
            x = torch.randint(site.inputs, (ROWS,), generator=generator)
            on_device = self._on_device(x)
            for y, lora in zip(results, paths, strict=True):
                add_adapters(on_device, y, site, lora)
            return x, results
        x = torch.randn(ROWS, site.inputs, generator=generator).to(self._dtype)
        on_device = self._on_device(x)
        for y, lora in zip(results, paths, strict=True):
            sgmv(on_device, y, site, lora)
        return x, results

    def _on_device(self, x: Tensor) -> Tensor:
        """Copy to the device without waiting for it."""
        if self._device.type == "cpu":
            return x
        return x.pin_memory().to(self._device, non_blocking=True)

    def _report(self, probe: _Probe, figures: Sequence[SiteFigures]) -> ProbeReport:
        max_error: dict[str, float] = {}
        for site in figures:
            for kind, error in site.errors.items():
                max_error[kind] = max(error, max_error.get(kind, 0.0))
        return ProbeReport(
            digest=probe.adapter.digest,
            modules=sum(site.modules for site in figures),
            finite=all(site.finite for site in figures),
            effect=max((site.effect for site in figures), default=0.0),
            max_error=max_error,
            bound=self._bound,
            longest_step_s=probe.longest_step_s,
        )

    def _end(self, probe: _Probe, outcome: ProbeReport | EngineError | None) -> None:
        self._waiting.popleft()
        if probe.is_pinned:
            self._pool.unpin(probe.adapter)
        for figures in probe.compared:
            figures.cancel()
        if outcome is None or not probe.done.set_running_or_notify_cancel():
            return
        if isinstance(outcome, ProbeReport):
            probe.done.set_result(outcome)
        else:
            probe.done.set_exception(outcome)


def _set_up_thread(cores: set[int]) -> None:
    """Set up the side thread: one core of any, at low priority (see `threads.py`)."""
    os.sched_setaffinity(0, cores)
    lower_priority(threading.get_native_id(), NICENESS)
    torch.set_num_threads(1)
