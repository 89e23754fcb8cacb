"""What the host does for a step of a GPU engine: launches and time, launched kernel by kernel or replayed.

Invariant: nothing is computed. The model is on the device `meta`, which has shapes and no memory; a Triton launch is
counted instead of made, and so is a replay. What remains is the host's own work.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from tests.benchmarks.gpu.model import model_config
from tests.benchmarks.kernels.shapes import LAYER_SHAPES
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.batch.host_transfers import HostTransfers, Results
from loraplex.engine.batch.sequence import Sequence as Row
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.triton import launch_plans
from loraplex.engine.kv_cache.tensors import allocate_kv_cache
from loraplex.engine.lora.device_batch import FEW_ADAPTERS, make_workspace
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.models.decoder_state import DecoderState
from loraplex.engine.models.parameters import decoder_parameters
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKinds, StaticGroups
from loraplex.engine.runner.cuda_graphs.buckets import Buckets
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticBlocks, StaticInputs
from loraplex.engine.runner.cuda_graphs.step_graphs import FinalStates, StepGraphs
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.sampling.step_logits import StepLogits
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.bench.report import Case, Ratio, Report

META = torch.device("meta")
BLOCK_SIZE = 16
BLOCKS = 4096
MAX_LENGTH = 2048
CONTEXT = 512
"""Tokens before a row's own."""
FORCED = 8
"""Tokens that a grammar forces at once."""
COLUMNS = ("eager_launches", "replayed_launches", "eager_ms", "replayed_ms")


@dataclass(frozen=True, slots=True)
class StepsShape:
    """`rows` of decodes; in steps with forced tokens an eighth of them has `FORCED`, mixed steps are filled up to `tokens`."""

    shape: str = "llama-3-8b"
    rows: int = 64
    tokens: int = 1024
    repeats: int = 20


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that a GPU would be given: no views, no allocations, nothing on host tensors alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        name = func.overloadpacket.__name__
        if name == "_foreach_copy_":
            # One kernel where types and layouts agree, else one for each tensor.
            is_dense = all(tensor.is_contiguous() for tensor in args[0])
            self.count += 1 if is_dense and len({t.dtype for t in args[0]}) == 1 else len(args[0])
        elif not is_view and "empty" not in name and isinstance(result, torch.Tensor):
            self.count += result.device == META
        return result

    def launch(self, *_: Any, **__: Any) -> None:
        """In place of a compiled kernel's launch, or of a graph's."""
        self.count += 1

    def compile(self, *_: Any, **__: Any) -> "Launches":
        """In place of a kernel's first launch, which compiles it: returns what launches it from then on."""
        self.count += 1
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch


class DroppedResults(HostTransfers):
    """There is nothing to bring back."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Results:
        for tensor in tensors:
            torch.empty_like(tensor).copy_(tensor)
        return Results([torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors], None)


class CountedReplayer:
    """A replay is one launch; nothing is captured."""

    nbytes = 0

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        return self._launch


class Slots:
    """Adapter number i is in slot i."""

    def __init__(self, count: int) -> None:
        self._slots = {adapter(index).key: index for index in range(count)}

    def slots(self) -> Mapping[tuple[bytes, str], int]:
        return self._slots


def adapter(index: int) -> AdapterRef:
    return AdapterRef(namespace=bytes(32), digest=str(index), blob_path="")


class Host:
    """A runner as a GPU's engine has it, with adapters at every site."""

    def __init__(self, shape: StepsShape, launches: Launches) -> None:
        config = model_config(LAYER_SHAPES[shape.shape])
        state = DecoderState()
        for parameter in decoder_parameters(config):
            state[parameter.name] = torch.empty(parameter.shape, dtype=torch.bfloat16, device=META)
        self.decoder = Decoder(config, state, MAX_LENGTH)
        for site in self.decoder.sites:
            site.slots[0] = ()
        path = AdapterPath(False, make_workspace(self.decoder.sites, shape.tokens, META), shape.tokens)
        cache = allocate_kv_cache(config, BLOCKS, BLOCK_SIZE, torch.bfloat16, META)
        sampler = Sampler(config.vocab_size, transfers=DroppedResults(META))
        slots: Any = Slots(shape.rows)
        self.runners = {
            kind: ModelRunner(self.decoder, cache, BLOCK_SIZE, sampler, slots, None, path)
            for kind in ("eager", "replayed")
        }
        self.runners["replayed"].replay(self._captured(shape, path, launches))

    def step(self, kind: str, plan: StepPlan) -> None:
        """Launch a step and its sampling."""
        rows = [row for row in plan.rows if row.samples]
        self.runners[kind].launch(plan, rows).sample(rows)

    def _captured(self, shape: StepsShape, path: AdapterPath, launches: Launches) -> StepGraphs:
        buckets = Buckets(shape.rows, shape.tokens)
        logits = torch.empty(buckets.rows, self.decoder.config.vocab_size, dtype=torch.bfloat16, device=META)
        states = FinalStates(buckets.most, self.decoder.config.hidden_size, torch.bfloat16, META)
        runner = self.runners["replayed"]
        graphs = StepGraphs(
            lambda batch: runner.forward(batch, None if batch.chunks is None else states.keep),
            StaticInputs(buckets, StaticBlocks(MAX_LENGTH // BLOCK_SIZE, BLOCK_SIZE, BLOCKS - 1), META),
            StepLogits(logits, torch.empty(buckets.rows, dtype=torch.int64, device=META)),
            buckets,
            CountedReplayer(launches.launch),
            StaticGroups(path, shape.rows),
            AdapterKinds(FEW_ADAPTERS),
            states,
        )
        graphs.capture()
        return graphs


def measure_steps(shape: StepsShape) -> Report:
    """Count and time steps of decodes, with forced tokens, and with chunks of prompts; base rows, and an adapter each."""
    report = Report("steps", COLUMNS)
    with counted_launches() as launches:
        host = Host(shape, launches)
        plans = {
            f"{name}, {kind}": make(shape, has_adapters)
            for name, make in (("decodes", decodes), ("forced tokens", forced), ("mixed", mixed))
            for kind, has_adapters in (("base", False), (f"{shape.rows} adapters", True))
        }
        for name, plan in plans.items():
            figure = _figures(host, plan, launches, shape.repeats)
            report.cases.append(Case(name, asdict(shape) | {"step_tokens": plan.num_tokens}, figure))
            share = figure["replayed_launches"] / figure["eager_launches"]
            report.ratios.append(Ratio(f"launches, replayed / eager: {name}", share, 0.1, "at most"))
    report.notes.append(
        "ms are CPU time of the step's thread for tensors, forward pass and sampling, without the launches themselves; torch's "
        "operations cost the host other time on `meta` than on CUDA."
    )
    return report


@contextmanager
def counted_launches() -> Iterator[Launches]:
    """Choose the kernels of a GPU for every tensor, and count their launches instead of making them."""
    launches = Launches()
    with (
        patch.object(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON),
        patch.object(JITFunction, "run", launches.compile),
        patch.object(launch_plans, "_plans", {}),
    ):
        yield launches


def _figures(host: Host, plan: StepPlan, launches: Launches, repeats: int) -> dict[str, Any]:
    """Launches of one step, and the median of its CPU time. Both kinds take turns."""
    counts: dict[str, int] = {}
    for kind in host.runners:
        host.step(kind, plan)
        launches.count = 0
        with launches:
            host.step(kind, plan)
        counts[f"{kind}_launches"] = launches.count
    seconds: dict[str, list[float]] = {f"{kind}_ms": [] for kind in host.runners}
    for _ in range(repeats):
        for kind in host.runners:
            began = time.thread_time()
            host.step(kind, plan)
            seconds[f"{kind}_ms"].append(time.thread_time() - began)
    return counts | {name: median(times) * 1000 for name, times in seconds.items()}


def decodes(shape: StepsShape, has_adapters: bool) -> StepPlan:
    """One token of each row."""
    return StepPlan(tuple(_row(index, 1, has_adapters) for index in range(shape.rows)))


def forced(shape: StepsShape, has_adapters: bool) -> StepPlan:
    """Every eighth row has forced tokens."""
    return StepPlan(
        tuple(_row(index, FORCED if index % 8 == 0 else 1, has_adapters) for index in range(shape.rows))
    )


def mixed(shape: StepsShape, has_adapters: bool) -> StepPlan:
    """All rows but two decode; two prompts share the remaining tokens."""
    rows = shape.rows - 2
    chunk = (shape.tokens - rows) // 2
    chunks = tuple(_row(rows + index, chunk, has_adapters, is_prompt=True) for index in range(2))
    return StepPlan((*(_row(index, 1, has_adapters) for index in range(rows)), *chunks))


def _row(index: int, count: int, has_adapters: bool, *, is_prompt: bool = False) -> PlannedRow:
    request = EngineRequest(
        request_id=str(index),
        namespace=bytes(32),
        prompt_token_ids=[1] * (count if is_prompt else CONTEXT),
        sampling=SamplingParams(temperature=0.0, max_tokens=100),
    )
    start = 0 if is_prompt else CONTEXT
    sequence = Row(request, 0, 0.0, index, [1] * (start + count))
    table = tuple(range(-(-(start + count) // BLOCK_SIZE)))
    ref = adapter(index) if has_adapters else None
    return PlannedRow(sequence, start, (1,) * count, table, ref, True)
