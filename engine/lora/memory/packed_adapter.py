"""`PackedAdapter`: an adapter as one rank-exact blob in host memory, divided into pages of 16 rank rows.

Invariant: a page has rows of one matrix only, and no more of them than the rank; it starts at 16 bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex.engine.lora.memory.rank_quantization import QuantizationReport, QuantizedModule
from loraplex.engine.lora.memory.slot_entries import ModulePages, TableRows, table_rows
from loraplex.engine.lora.page_geometry import ALIGNMENT, MIN_SCALE_BYTES, PAGE_RANKS
from loraplex.engine.lora.weights import LoraModule


@dataclass(frozen=True, slots=True)
class Page:
    """Bytes `start ... start + nbytes - 1` of the blob; `nbytes` is a multiple of 16."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """`blob` uint8. `need` counts the pages by size, `nbytes` the bytes of rank rows and scales."""

    digest: str
    blob: Tensor
    pages: tuple[Page, ...]
    modules: Mapping[str, ModulePages]
    rows: TableRows
    need: Mapping[int, int]
    nbytes: int
    report: QuantizationReport | None

    def without_blob(self) -> "PackedAdapter":
        """Return a copy without the blob, for an adapter whose pages are elsewhere."""
        return replace(self, blob=torch.empty(0, dtype=torch.uint8))


@dataclass(frozen=True, slots=True)
class _Part:
    """A page before packing: rows of a matrix, or a module's scales (`matrix` "s")."""

    module: str
    matrix: str
    rows: Tensor
    nbytes: int


def _in_host_memory(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def pack(
    digest: str,
    modules: Mapping[str, LoraModule | QuantizedModule],
    dtype: torch.dtype,
    *,
    names: Sequence[str],
    max_pages: int,
    by_size: bool,
    allocate: Callable[[int], Tensor] = _in_host_memory,
    report: QuantizationReport | None = None,
) -> PackedAdapter:
    """Pack `modules`, in the order of use, into pages of `dtype`; `names` are all modules of the model, in table order.

    `by_size`: pages of one size are contiguous, so that few copies move them to contiguous pages; otherwise the pages of a
    matrix are contiguous, so that it is whole. `allocate` makes the blob, uint8.
    """
    parts = [part for name, module in modules.items() for part in _parts(name, module, dtype)]
    if by_size:
        # A matrix's last page, which may be shorter, stays after its others.
        parts.sort(key=lambda part: -part.nbytes)
    numbered = _numbered(parts, modules)
    blob = allocate(sum(part.nbytes for part in parts))
    return PackedAdapter(
        digest=digest,
        blob=blob,
        pages=tuple(_fill(blob, parts, dtype)),
        modules=numbered,
        rows=table_rows(numbered, names, max_pages),
        need=Counter(part.nbytes for part in parts),
        nbytes=sum(part.rows.numel() * _item_bytes(part, dtype) for part in parts),
        report=report,
    )


def page_bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page of `rows` rank rows of `width` values."""
    return -(-rows * width * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _parts(name: str, module: LoraModule | QuantizedModule, dtype: torch.dtype) -> Iterator[_Part]:
    for matrix, rows in (
        ("a", module.a),
        ("b", module.b if isinstance(module, QuantizedModule) else module.b.t()),
    ):
        for page in torch.split(rows, PAGE_RANKS):
            yield _Part(name, matrix, page, page_bytes(page.shape[0], page.shape[1], dtype))
    if isinstance(module, QuantizedModule):
        scales = module.scales
        yield _Part(name, "s", scales, max(MIN_SCALE_BYTES, _power_of_two(scales.nbytes)))


def _fill(blob: Tensor, parts: Iterable[_Part], dtype: torch.dtype) -> Iterator[Page]:
    start = 0
    for part in parts:
        content = part.rows.numel() * _item_bytes(part, dtype)
        view = blob[start : start + content].view(torch.float32 if part.matrix == "s" else dtype)
        view.view(part.rows.shape).copy_(part.rows)
        yield Page(start, part.nbytes)
        start += part.nbytes


def _numbered(parts: list[_Part], modules: Iterable[str]) -> dict[str, ModulePages]:
    numbers: dict[tuple[str, str], list[int]] = {}
    ranks: Counter[str] = Counter()
    for number, part in enumerate(parts):
        numbers.setdefault((part.module, part.matrix), []).append(number)
        ranks[part.module] += part.rows.shape[0] if part.matrix == "a" else 0
    return {
        name: ModulePages(
            rank=ranks[name],
            a=tuple(numbers[name, "a"]),
            b=tuple(numbers[name, "b"]),
            scales=numbers.get((name, "s"), [None])[0],
        )
        for name in modules
    }


def _item_bytes(part: _Part, dtype: torch.dtype) -> int:
    return torch.float32.itemsize if part.matrix == "s" else dtype.itemsize


def _power_of_two(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()
