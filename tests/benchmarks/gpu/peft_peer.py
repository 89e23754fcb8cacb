"""The peer on the same device: `transformers` + PEFT over a random model of the same shape, in both of its ways to mix adapters."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tests.benchmarks.gpu.engine_rows import Rows
from tests.benchmarks.gpu.model import hugging_face_config
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.benchmarks.kernels.clock import synchronize
from tests.benchmarks.kernels.shapes import LayerShape

WARM_TOKENS = 2
IN_TURN = 4.0
"""Estimate of the second mode in times of the first: 16 adapters take their steps one after another."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_rates(
    shape: LayerShape, rows: Rows, rank: int, device: torch.device, left: TimeLeft
) -> Iterator[tuple[str, float]]:
    """Output tokens per second: `mixed` names an adapter per row, `in turn` takes one adapter's rows after the other's.

    The second mode only if the time left is a few times what the first took.
    """
    model = _model(shape, rows.adapters, rank, device)
    prompts = torch.randint(2, shape.vocab, (rows.count, rows.prompt), device=device)
    names = [f"adapter_{row % rows.adapters}" for row in range(rows.count)]

    def mixed(tokens: int) -> None:
        _generate(model, prompts, tokens, adapter_names=names)

    def in_turn(tokens: int) -> None:
        for index in range(rows.adapters):
            model.set_adapter(f"adapter_{index}")
            _generate(model, prompts[index :: rows.adapters], tokens)

    taken = 0.0
    for name, work in (("mixed", mixed), ("in turn", in_turn)):
        if left.fits(IN_TURN * taken):
            work(WARM_TOKENS)
            taken = _seconds(partial(work, rows.tokens), device)
            yield name, rows.count * rows.tokens / taken


def _model(shape: LayerShape, adapters: int, rank: int, device: torch.device) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {key: value for key, value in hugging_face_config(shape).items() if key != "rope_theta"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            plain = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="sdpa"))
    finally:
        torch.set_default_dtype(before)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, init_lora_weights=False)
    # Drawn on the device: 16 adapters on one core would take as long as all that is measured.
    with device:
        model = get_peft_model(plain, config, adapter_name="adapter_0", autocast_adapter_dtype=False)
        for index in range(1, adapters):
            model.add_adapter(f"adapter_{index}", config)
    return model.to(device=device, dtype=torch.bfloat16).eval()


def _generate(model: Any, prompts: torch.Tensor, tokens: int, **options: Any) -> None:
    with torch.inference_mode():
        model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            **options,
        )


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began
