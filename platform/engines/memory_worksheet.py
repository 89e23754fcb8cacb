"""Renders the memory worksheet: a table, one line for the start, and a document for `--json` and the log.

Invariant: sizes are whole bytes in documents and decimal in tables (1 GB is 10**9 bytes).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from loraplex.engine.capacity.memory_advice import Advice, format_bytes
from loraplex.engine.capacity.memory_plan import MemoryPlan


def worksheet_document(
    plan: MemoryPlan, advice: Sequence[Advice], measured: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The worksheet as a JSON document. `measured`: bytes that tensors take after loading, by name."""
    document: dict[str, Any] = {
        "fits": plan.fits,
        "total_bytes": plan.total,
        "budget_bytes": plan.budget,
        "device_bytes": plan.machine.memory,
        "dtype": plan.machine.dtype,
        "weights_bytes": plan.weights_bytes,
        "weights": [
            {"kind": w.kind, "format": w.format, "count": w.count, "bytes": w.num_bytes} for w in plan.weights
        ],
        "adapter_budget_bytes": plan.adapter_budget,
        "adapters": [
            {"rank": plan.rank, "dtype": a.page_dtype, "bytes": a.num_bytes, "resident": a.resident}
            for a in plan.adapters
        ],
        "kv_cache_bytes": plan.kv_bytes,
        "kv_bytes_per_token": plan.kv_token_bytes,
        "kv_tokens": plan.kv_tokens,
        "reserve_bytes": plan.reserve_bytes,
        "reserve": dict(plan.reserve),
        "max_model_len": plan.max_model_len,
        "context": plan.context,
        "rows": plan.rows,
        "advice": [each.text for each in advice],
    }
    return document if measured is None else document | {"measured": dict(measured)}


def worksheet_table(plan: MemoryPlan) -> Table:
    """The worksheet as a table: one line per part of the memory, and at the end the rows that fit."""
    table = Table("memory", "planned", "what", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for weight in plan.weights:
        table.add_row(
            weight.kind, format_bytes(weight.num_bytes), f"{_numbers(weight.count)} in {weight.format}"
        )
    table.add_row("adapters", format_bytes(plan.adapter_budget), _adapters(plan))
    table.add_row(
        "KV cache",
        format_bytes(plan.kv_bytes),
        f"{plan.kv_tokens:,} tokens of {format_bytes(plan.kv_token_bytes)}",
    )
    for name, num_bytes in plan.reserve:
        table.add_row(name, format_bytes(num_bytes), "estimated")
    table.add_row("total", format_bytes(plan.total), _budget(plan), style="bold" if plan.fits else "bold red")
    table.add_row("rows", f"{plan.rows:,}", f"of {plan.context:,} tokens at once")
    return table


def worksheet_line(plan: MemoryPlan, measured: Mapping[str, int]) -> str:
    """One line for the start on a terminal: the planned total and the bytes that tensors take."""
    taken = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in measured.items())
    return (
        f"memory: {format_bytes(plan.total)} planned, {format_bytes(plan.adapter_budget)} of it for adapters; measured: {taken}; "
        f"{plan.rows:,} rows of {plan.context:,} tokens at once"
    )


def _numbers(count: int) -> str:
    return (
        f"{count / 1e9:.2f} G"
        if count >= 10**8
        else f"{count / 1e6:.2f} M"
        if count >= 10**6
        else f"{count:,}"
    )


def _adapters(plan: MemoryPlan) -> str:
    if not plan.adapter_budget:
        return "none"
    kinds = (f"{a.resident} in {a.page_dtype} ({format_bytes(a.num_bytes)} each)" for a in plan.adapters)
    return f"rank {plan.rank}: " + ", ".join(kinds)


def _budget(plan: MemoryPlan) -> str:
    if plan.budget is None or plan.machine.memory is None:
        return ""
    return f"{format_bytes(plan.budget)} that may be used of {format_bytes(plan.machine.memory)}"
