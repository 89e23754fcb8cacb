"""What a started engine says of its memory: the worksheet, and beside it what tensors really took. Needs torch."""

import structlog
import torch
from rich.console import Console

from loraplex.engine.capacity.memory_advice import memory_advice
from loraplex.engine.config import EngineConfig
from loraplex.engine.engine import Engine
from loraplex.platform.engines.memory_worksheet import worksheet_document, worksheet_table


def report_memory(engine: Engine, config: EngineConfig, console: Console | None = None) -> None:
    """A table where `console`, by default standard error, is a terminal, else one event of the log."""
    model = engine.model
    measured = {"weights": model.weights_bytes, "KV cache": engine.runner.kv_cache_bytes}
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        measured |= {"all tensors": torch.cuda.memory_allocated(model.device), "device": total - free}
    advice = memory_advice(model.config, config, model.memory)
    shown = console or Console(stderr=True)
    if shown.is_terminal:
        shown.print("\n", worksheet_table(model.memory, measured))
    else:
        structlog.get_logger("loraplex.engine").info(
            "memory", **worksheet_document(model.memory, advice, measured)
        )
