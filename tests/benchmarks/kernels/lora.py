"""Grouped LoRA: one site, and the four sites of a layer, for rows spread over adapters."""

from collections.abc import Sequence

import torch
from tests.benchmarks.kernels.problem import DTYPES, Operands, Problem, TensorSource, size_of, widened
from tests.benchmarks.kernels.shapes import LayerShape
from tests.engine.lora.installed_slices import install
from torch import Tensor

from loraplex.engine.kernels.group_rows import group_rows
from loraplex.engine.kernels.reference import sgmv as reference
from loraplex.engine.kernels.sgmv import sgmv
from loraplex.engine.layers.embedding import Embedding
from loraplex.engine.lora import batch as host
from loraplex.engine.lora.site import LoraSite, LoraSlice, make_site
from loraplex.platform.bench.workload import pick_adapters

Site = tuple[int, tuple[int, ...]]
"""Inputs, and outputs of each slice."""


def pair_problem(
    rows: int, adapters: int, rank: int, inputs: int, outputs: int, dtype: str, pages: str, zipf: float = 0.0
) -> Problem:
    """y += (x A^T) B for `rows` rows over `adapters` adapters, evenly or with a Zipf exponent."""
    sites = [(inputs, (outputs,))]
    shape = {"rows": rows, "adapters": adapters, "rank": rank, "inputs": inputs, "outputs": outputs}
    slots = row_slots(rows, adapters, zipf)
    return _problem("lora pair", sites, shape, slots, rank, dtype, pages, zipf, rows)


def layer_problem(
    model: LayerShape,
    rows: int,
    adapters: int,
    rank: int,
    dtype: str,
    pages: str,
    zipf: float = 0.0,
    decodes: int | None = None,
) -> Problem:
    """The four sites of a layer one after another: eight kernels where shrink and expand are two. Rows from `decodes` on
    belong to prompts.
    """
    shape = {"rows": rows, "adapters": adapters, "rank": rank, "hidden": model.hidden}
    slots = row_slots(rows, adapters, zipf)
    sites = list(model.sites().values())
    return _problem(
        "lora layer", sites, shape, slots, rank, dtype, pages, zipf, rows if decodes is None else decodes
    )


def row_slots(rows: int, adapters: int, zipf: float = 0.0) -> list[int]:
    """The adapter of each row: in turn, or drawn with this Zipf exponent, the same ones in every run."""
    return pick_adapters(adapters, rows, "zipf" if zipf else "distinct", zipf, seed=0)


def _problem(
    op: str,
    sites: Sequence[Site],
    shape: dict[str, int],
    slots: Sequence[int],
    rank: int,
    dtype: str,
    pages: str,
    zipf: float,
    decodes: int,
) -> Problem:
    rows = len(slots)
    variant = f"{pages} pages" if pages != dtype else "pages"
    variant += f", zipf {zipf:g}" if zipf else ""
    variant += f", {decodes} decode" if decodes < rows else ""

    def make(tensors: TensorSource) -> Operands:
        return _operands(
            tensors, sites, slots, shape["adapters"], rank, DTYPES[dtype], DTYPES[pages], decodes
        )

    weights = len(set(slots)) * rank * sum(inputs * len(sizes) + sum(sizes) for inputs, sizes in sites)
    # A slice's rows are read and written; x is read once for all slices of a site.
    moved = rows * sum(inputs + 2 * sum(sizes) for inputs, sizes in sites)
    return Problem(
        op=op,
        variant=variant,
        shape=shape,
        dtype=dtype,
        bytes=weights * size_of(pages) + moved * size_of(dtype),
        flops=2 * rows * rank * sum(inputs * len(sizes) + sum(sizes) for inputs, sizes in sites),
        make=make,
    )


def _operands(
    tensors: TensorSource,
    sites: Sequence[Site],
    slots: Sequence[int],
    adapters: int,
    rank: int,
    dtype: torch.dtype,
    pages: torch.dtype,
    decodes: int,
) -> Operands:
    batch, groups = group_rows(slots, tensors.device, decodes), host_groups(slots, tensors.device)
    if batch is None:
        raise ValueError("a LoRA problem needs at least one adapter")
    calls = [SiteCall(tensors, site, adapters, rank, dtype, pages, len(slots)) for site in sites]

    def run() -> tuple[Tensor, ...]:
        for call in calls:
            sgmv(call.x, call.y, call.site, batch)
        return tuple(call.y for call in calls)

    return Operands(run, lambda: tuple(call.expected(groups) for call in calls))


class SiteCall:
    """The operands of one site."""

    def __init__(
        self,
        tensors: TensorSource,
        site: Site,
        adapters: int,
        rank: int,
        dtype: torch.dtype,
        pages: torch.dtype,
        rows: int,
    ) -> None:
        inputs, sizes = site
        names = tuple(f"slice {index}" for index in range(len(sizes)))
        self.site: LoraSite = make_site(names, inputs, sizes, adapters, tensors.device)
        self.site.page_dtype = None if pages is dtype else pages
        for slot in range(adapters):
            parts = tuple(_slice(tensors, inputs, size, rank, pages) for size in sizes)
            install(self.site, slot, parts)
        self.x = tensors.normal(rows, inputs, dtype=dtype)
        self.y = tensors.normal(rows, sum(sizes), dtype=dtype)

    def expected(self, groups: host.LoraGroups) -> Tensor:
        """In float32, from the same matrices."""
        wide = make_site(
            self.site.names, self.site.inputs, self.site.slice_sizes, len(self.site.slots), self.x.device
        )
        for slot, parts in self.site.slots.items():
            wide.slots[slot] = tuple(
                part and LoraSlice(part.a.float(), part.b.float(), part.scales) for part in parts
            )
        y = widened(self.y)
        reference.sgmv(self.x.float(), y, wide, groups)
        return y


def host_groups(slots: Sequence[int], device: torch.device) -> host.LoraGroups:
    """For the reference, whatever groups the rows of the kernels."""
    batch = host.group_rows(slots, device)
    if batch is None:
        raise ValueError("a LoRA problem needs at least one adapter")
    return batch.groups


def embedding_problem(
    model: LayerShape, rows: int, adapters: int, rank: int, dtype: str, pages: str
) -> Problem:
    """The rows of the embedding and of the adapters that were trained on it."""

    def make(tensors: TensorSource) -> Operands:
        slots = row_slots(rows, adapters)
        batch, groups = group_rows(slots, tensors.device), host_groups(slots, tensors.device)
        call = SiteCall(
            tensors, (model.vocab, (model.hidden,)), adapters, rank, DTYPES[dtype], DTYPES[pages], rows=1
        )
        weight = tensors.normal(model.vocab, model.hidden, dtype=DTYPES[dtype])
        token_ids = tensors.integers(0, model.vocab, rows, dtype=torch.int64)
        embedding = Embedding(weight, call.site)

        def expected() -> tuple[Tensor, ...]:
            result = weight[token_ids].float()
            for index, slot in enumerate(groups.host_slots):
                (part,) = call.site.slots[slot]
                chosen = groups.order[groups.host_starts[index] : groups.host_starts[index + 1]].long()
                if part is not None:
                    hidden = part.a[:, token_ids[chosen]].t().float()
                    result[chosen] += (
                        hidden if part.scales is None else hidden * part.scales
                    ) @ part.b.float()
            return (result,)

        return Operands(lambda: (embedding(token_ids, batch),), expected)

    return Problem(
        op="lora embedding",
        variant=f"{pages} pages" if pages != dtype else "pages",
        shape={
            "rows": rows,
            "adapters": adapters,
            "rank": rank,
            "vocab": model.vocab,
            "hidden": model.hidden,
        },
        dtype=dtype,
        # Of A a column is read, element by element.
        bytes=rows * (2 * model.hidden * size_of(dtype) + rank * (1 + model.hidden) * size_of(pages)),
        flops=2 * rows * rank * model.hidden,
        make=make,
    )


def _slice(tensors: TensorSource, inputs: int, outputs: int, rank: int, pages: torch.dtype) -> LoraSlice:
    if pages is torch.int8 or pages is torch.float8_e4m3fn:
        a, b = tensors.normal(rank, inputs, dtype=pages), tensors.normal(rank, outputs, dtype=pages)
        size = 40.0**2 if pages is torch.int8 else 1.0
        scales = tensors.normal(rank, dtype=torch.float32, scale=(inputs * rank) ** -0.5 / size)
        return LoraSlice(a, b, scales)
    a = tensors.normal(rank, inputs, dtype=pages, scale=inputs**-0.5)
    return LoraSlice(a, tensors.normal(rank, outputs, dtype=pages, scale=rank**-0.5))
