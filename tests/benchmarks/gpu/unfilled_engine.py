"""Engines at their real widths on a machine without a GPU: tensors have shapes and no memory, launches are noted and not run.

The device is torch's `meta`, which every choice of the engine takes for CUDA: Triton's kernels, pages, captured steps. An
address is the place in its storage, so a launch has the dtypes, the alignment and the integers that it has on a GPU.

Invariant: one layer's launches are every layer's, so a model needs two: the first norm has no residual.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from tests.benchmarks.gpu import model as random_models
from tests.benchmarks.kernels.gemm import random_weight
from tests.engine.lora.immediate_stream import ImmediateStream
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loraplex.engine import runner_loading
from loraplex.engine.capacity.memory_plan import Machine
from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.triton import launch_plans
from loraplex.engine.lora import pool_factory
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder_state import Weight
from loraplex.engine.models.parameters import Parameter, decoder_parameters
from loraplex.engine.quantization.scheme import quantize_parameter

META = torch.device("meta")
LAYERS = 2
MEMORY = 80 << 30
"""Bytes of the device that the memory plan is made for; no kernel depends on it."""
Key = tuple[object, ...]
_is_cuda = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, to be compiled: what `launch_plans` hands to Triton."""

    kernel: Any
    grid: tuple[int, ...]
    operands: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def key(self) -> Key:
        """What Triton compiles it for: kernel, constants, dtypes, alignment, and the kinds of integers."""
        return self.name, *sorted(self.constants.items()), *launch_plans._kinds(self.operands)

    def compile(self) -> None:
        """Compile it with the driver that is active. It runs nothing where that is the launch recorder's."""
        self.kernel[self.grid](*self.operands, **self.constants)


@dataclass(slots=True)
class Launches:
    """The launches of engines, each distinct one once, in the order of their first."""

    found: dict[Key, Launch] = field(default_factory=dict)

    def note(
        self,
        plans: object,
        key: object,
        kernel: Any,
        grid: tuple[int, ...],
        operands: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        """In place of `launch_plans._launch`."""
        launch = Launch(kernel, grid, operands, constants)
        self.found.setdefault(launch.key, launch)


class OnCuda(TorchFunctionMode):
    """Tensors say that they are on CUDA; pinning does nothing, and what comes back from the device is zeros."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _is_cuda:
            return True
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.copy_ and not args[0].is_meta and args[1].is_meta:
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


class OneRun:
    """A `Replayer` that runs a step when it is captured, and again whenever it is replayed."""

    nbytes = 0

    def __init__(self, device: torch.device) -> None:
        """`device` is where the others' graphs are."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        return step


class MetaTensors:
    """A `TensorSource` of shapes."""

    device = META

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    def permutation(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=META)


@contextmanager
def unfilled_engines() -> Iterator[Launches]:
    """Within, this thread's models and engines on `META` start and step, and their launches are noted."""
    launches = Launches()
    with ExitStack() as changes:
        for module, name, value in (
            (dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON),
            (launch_plans, "_launch", launches.note),
            (runner_loading, "replays", lambda setting, device: setting == "auto"),
            (runner_loading, "CudaReplayer", OneRun),
            (pool_factory, "CudaCopyStream", lambda device: ImmediateStream()),
            (random_models, "machine_of", _machine),
            (random_models, "drawn_parameters", _undrawn),
            (random_models, "quantize_parameter", _quantized),
        ):
            changes.enter_context(patch.object(module, name, value))
        changes.enter_context(OnCuda())
        yield launches


def _machine(device: torch.device, dtype: torch.dtype) -> Machine:
    name = str(dtype).removeprefix("torch.")
    return Machine(is_cuda=True, dtype=name, memory=MEMORY, free=MEMORY)


def _undrawn(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Parameter, Tensor]]:
    """As `drawn_parameters` gives them: `meta` has no generator."""
    for parameter in decoder_parameters(config):
        yield parameter, torch.empty(parameter.shape, dtype=dtype, device=device)


def _quantized(name: str, weight: Tensor, scheme: str) -> Weight:
    """As `quantize_parameter` stores it, without its values."""
    # One output says which format and groups the others have.
    one = quantize_parameter(name, torch.ones(1, *weight.shape[1:]), scheme)
    if isinstance(one, Tensor):
        return weight
    variant = "int8" if one.zeros is None else "int4 zeros"
    return random_weight(MetaTensors(), variant, weight.shape[0], weight.shape[1], one.group_size)
