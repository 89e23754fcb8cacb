"""The peer: `generate` of `transformers` + PEFT, in a separate process so that its threads end with it.

It reads a `PeerJob` as JSON from standard input and writes the seconds by case as JSON to standard output.
"""

import sys
import time
from typing import Any

import msgspec


class PeerCase(msgspec.Struct, frozen=True, kw_only=True):
    """One `generate`. `adapters` None is the plain model, one name a set adapter, more one per row (`adapter_names`).

    `prompts` are token ids of equal length.
    """

    name: str
    prompts: list[list[int]]
    adapters: list[str] | None = None
    warm_up: bool = False


class PeerJob(msgspec.Struct, frozen=True, kw_only=True):
    """`adapters`: folder by name."""

    model: str
    dtype: str
    threads: int
    output_len: int
    adapters: dict[str, str]
    cases: list[PeerCase]


def run(job: PeerJob) -> dict[str, float]:
    """Run every case; return the seconds of those that are no warm-up."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.threads)
    options = {"dtype": getattr(torch, job.dtype)}
    plain = AutoModelForCausalLM.from_pretrained(job.model, **options).eval()
    adapted: Any = None
    for name, folder in job.adapters.items():
        if adapted is None:
            base = AutoModelForCausalLM.from_pretrained(job.model, **options)
            adapted = PeftModel.from_pretrained(base, folder, adapter_name=name, autocast_adapter_dtype=False)
        else:
            adapted.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
    seconds: dict[str, float] = {}
    with torch.inference_mode():
        for case in job.cases:
            taken = _generate(plain if case.adapters is None else adapted.eval(), case, job.output_len)
            if not case.warm_up:
                seconds[case.name] = taken
    return seconds


def _generate(model: Any, case: PeerCase, output_len: int) -> float:
    import torch

    ids = torch.tensor(case.prompts)
    options: dict[str, Any] = {}
    if case.adapters is not None and len(case.adapters) == 1:
        model.set_adapter(case.adapters[0])
    elif case.adapters is not None:
        options["adapter_names"] = case.adapters
    began = time.perf_counter()
    produced = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=output_len,
        min_new_tokens=output_len,
        **options,
    )
    taken = time.perf_counter() - began
    if produced.shape[1] != ids.shape[1] + output_len:
        raise RuntimeError(f"{case.name}: {produced.shape[1] - ids.shape[1]} of {output_len} tokens")
    return taken


def main() -> None:
    """Read a `PeerJob`, run it, write the seconds."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=PeerJob)
    seconds = run(job)
    sys.stdout.buffer.write(msgspec.json.encode(seconds) + b"\n")


if __name__ == "__main__":
    main()
