"""The expected results of an adapter's modules, computed by the reference backend in float32 on the host."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.config import LoraConfig
from loraplex.engine.kernels.reference import sgmv as reference
from loraplex.engine.lora.batch import HostLoraBatch, group_rows
from loraplex.engine.lora.site import LoraSite, LoraSlice, make_site
from loraplex.engine.lora.weights import LoraModule, LoraWeights

HOST = torch.device("cpu")
BOUNDS: Mapping[torch.dtype, float] = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""How far a device's result may be from the reference, relative to the reference's largest value: a few roundings of the
hidden values and of the sum. A float32 product on a GPU may round its factors to 10 bits (TF32)."""
PAGE_ERROR_SHARE = 2.0
"""8-bit pages change a delta by up to `max_page_error` of its norm, and its largest value by not much more."""


@dataclass(frozen=True, slots=True)
class SiteFigures:
    """`errors` by kind of module, relative; `effect` is the reference's largest value."""

    modules: int
    finite: bool
    effect: float
    errors: Mapping[str, float]


def error_bound(dtype: torch.dtype, config: LoraConfig) -> float:
    """Return the bound for a model of `dtype`. Adapters have pages of that type unless `config` sets another."""
    page_error = 0.0 if config.page_dtype == "auto" else config.max_page_error
    return BOUNDS[dtype] + PAGE_ERROR_SHARE * page_error


@torch.inference_mode()
def compare(site: LoraSite, weights: LoraWeights, x: Tensor, results: Sequence[Tensor]) -> SiteFigures:
    """Compare a device's results with the reference. `x` is the device's input, copied on the host: [rows, inputs], or
    [rows] token ids; `results` [rows, outputs] each.
    """
    expected = _expected(site, weights, x)
    computed = [result.to(HOST, torch.float32) for result in results]
    floor = torch.finfo(results[0].dtype).tiny
    errors: dict[str, float] = {}
    for name, columns in _columns(site):
        wanted = expected[:, columns]
        scale = max(float(wanted.abs().max()), floor)
        error = max(_largest((result[:, columns] - wanted) / scale) for result in computed)
        kind = name.rpartition(".")[2]
        if name in weights.modules or error > 0:
            errors[kind] = max(error, errors.get(kind, 0.0))
    return SiteFigures(
        modules=sum(name in weights.modules for name in site.names),
        finite=all(bool(torch.isfinite(result).all()) for result in computed),
        effect=float(expected.abs().max()),
        errors=errors,
    )


def _expected(site: LoraSite, weights: LoraWeights, x: Tensor) -> Tensor:
    """[rows, outputs] in float32."""
    if site.names == ("embed_tokens",):
        module = weights.modules["embed_tokens"]
        return module.a.float().index_select(1, x).t() @ module.b.float().t()
    twin = make_site(site.names, site.inputs, site.slice_sizes, 0, HOST)
    twin.slots[0] = tuple(_slice(weights.modules.get(name)) for name in site.names)
    rows = group_rows([0] * x.shape[0], HOST)
    y = torch.zeros(x.shape[0], site.outputs)
    if isinstance(rows, HostLoraBatch):
        reference.sgmv(x.float(), y, twin, rows.groups)
    return y


def _slice(module: LoraModule | None) -> LoraSlice | None:
    return None if module is None else LoraSlice(module.a.float(), module.b.float().t().contiguous())


def _columns(site: LoraSite) -> Iterator[tuple[str, slice]]:
    for s, name in enumerate(site.names):
        yield name, slice(site.host_offsets[s], site.host_offsets[s + 1])


def _largest(difference: Tensor) -> float:
    largest = float(difference.abs().max())
    return largest if math.isfinite(largest) else math.inf
