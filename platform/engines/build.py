"""Builds the engine: decoder, adapter source and grammar compiler; reports planned and measured memory.

Invariant: only the engine process imports this module, because it imports torch, which the gateway process never does.
"""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import structlog
import torch

from loraplex.adapters.loader import PeftAdapterSource
from loraplex.engine.capacity.memory_advice import memory_advice
from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.messages import EngineInfo
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.structured_output.grammar_compilation import NICENESS as MASK_COMPILATION_NICENESS
from loraplex.engine.threads import StepThread, start_side_thread
from loraplex.engine.token_mask import TokenMaskFactory
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.platform.engines.memory_worksheet import worksheet_document, worksheet_line


def report_memory(
    engine: Engine, config: EngineConfig, on_stage: Callable[[str], None], *, on_terminal: bool
) -> None:
    """Report the planned and the measured memory: one stage line on a terminal, else the whole worksheet in the log."""
    model = engine.model
    measured = {"weights": model.weights_bytes, "KV cache": engine.runner.kv_cache_bytes}
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        measured |= {"all tensors": torch.cuda.memory_allocated(model.device), "device": total - free}
    if on_terminal:
        on_stage(worksheet_line(model.memory, measured))
        return
    advice = memory_advice(model.config, config, model.memory)
    structlog.get_logger("loraplex.engine").info(
        "memory", **worksheet_document(model.memory, advice, measured)
    )


def load_engine(
    config: EngineConfig,
    cores: set[int],
    on_stage: Callable[[str], None],
    on_described: Callable[[EngineInfo], None],
) -> Callable[[], AbstractAsyncContextManager[EngineClient]]:
    """Load the model and allocate its KV pool. Returns what runs the engine's threads on an event loop.

    `on_described` receives what will be served, before the weights are read. `cores` are those that the process may use.
    Raises `ModelError`.
    """
    steps = StepThread()
    engine = steps.submit(partial(_load, config, cores, on_stage, on_described)).result()
    return partial(_running, engine, steps)


def _load(
    config: EngineConfig,
    cores: set[int],
    on_stage: Callable[[str], None],
    on_described: Callable[[EngineInfo], None],
) -> Engine:
    model = load_model(config, on_described)
    # Loading binds this thread to one core. The adapter loader starts next and would inherit that core and queue behind it.
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    source = PeftAdapterSource(model.config, model.dtype, model.digest)
    engine = Engine(model, config, source, mask_factory=_mask_factory(model, cores))
    report_memory(engine, config, on_stage, on_terminal=sys.stderr.isatty())
    os.sched_setaffinity(0, bound)
    return engine


def _mask_factory(model: LoadedModel, cores: set[int]) -> TokenMaskFactory | None:
    """The grammar compiler for the model's tokens; None for a model without an end token, whose documents would never end."""
    if not model.config.eos_token_ids:
        return None
    vocabulary = Vocabulary(
        model.tokenizer.to_str(), model.config.vocab_size, frozenset(model.config.eos_token_ids)
    )
    compiler = MaskCompiler(vocabulary)
    start_side_thread("mask-warm-up", partial(_warm_up, compiler), cores, MASK_COMPILATION_NICENESS)
    return compiler.compile


def _warm_up(compiler: MaskCompiler) -> None:
    try:
        compiler.warm_up()
    except Exception:  # noqa: BLE001 - logged: requests with a grammar will fail, all others are served
        structlog.get_logger("loraplex.engine").exception(
            "the grammar backends cannot be used with this tokenizer"
        )


@asynccontextmanager
async def _running(engine: Engine, steps: StepThread) -> AsyncIterator[EngineClient]:
    """Run the steps on the thread that built the engine, until the context ends."""
    local = LocalEngine(engine, steps)
    try:
        yield local
    finally:
        await local.close()
