"""What a whole model answers: its log-probabilities and prompts against `transformers`, and replayed steps against plain ones.

Invariant: the reference sees the tokens that the engine chose, so that one early difference is counted once.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from statistics import median
from typing import Any

import torch
from tests.benchmarks.gpu.engine_rows import (
    AliasedSource,
    EngineOptions,
    Rows,
    prefill_rate,
    random_prompts,
    release,
    request,
    running_engine,
    stepped,
)
from tests.benchmarks.gpu.model import drawn_parameters, hugging_face_config, model_config, random_model
from tests.benchmarks.gpu.sizes import RANK, Line, Size, left_out, line
from tests.benchmarks.gpu.targets import prefill_over_sdpa_case
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.benchmarks.kernels.clock import synchronize
from tests.benchmarks.kernels.shapes import LayerShape

from loraplex.engine.engine import Engine
from loraplex.engine.messages import TokenLogprob

TOP = 20
REFERENCE_ROWS = 4
REFERENCE_TOKENS = 16
PREFILL_ROUNDS = 3
PEER_S = 12.0
"""Estimate of the peer's model in one type, and what is asked of it."""
Answers = dict[str, list[TokenLogprob]]


def logits(size: Size, device: torch.device, left: TimeLeft) -> Iterator[Line]:
    """The error of the likeliest tokens' log-probabilities, and that of `transformers` in the same type, both against float32;
    then prompts in the engine and in `transformers` with torch's attention.

    Of 45 s 6 pass until CUDA answers, 4 for the import of `transformers`, 5 for the engine, 4 for its prompts, 3 for each of
    the peer's models, 5 for its prompts. At most 32 GiB are taken at once: the engine's memory is given back first.
    """
    rows = Rows(REFERENCE_ROWS, 0, size.prompt, REFERENCE_TOKENS)
    room = Rows(REFERENCE_ROWS, 0, longest_row(size) - REFERENCE_TOKENS, REFERENCE_TOKENS)
    model = random_model(size.shape, "none", device, longest_row(size))
    source = AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
    own: dict[tuple[int, int], float] = {}
    with running_engine(model, source, room, EngineOptions()) as engine:
        prompts = random_prompts(engine, rows.count, rows.prompt)
        answers = _run(engine, rows, prompts)
        for prompt, count in size.prefills:
            for together in (1, count):
                taken = (
                    prefill_rate(engine, Rows(together, 0, prompt, 1), seed) for seed in range(PREFILL_ROUNDS)
                )
                own[prompt, together] = median(taken)
            yield from _prefill_lines(prompt, count, own, "")
    del engine, model
    release(device)
    values = torch.cat([_values(answers[str(row)]) for row in range(rows.count)])
    with _peer(size.shape, torch.float32, device) as peer:
        exact = _reference(peer, prompts, answers, device)
        del peer
    release(device)
    theirs: dict[tuple[int, int], float] = {}
    with _peer(size.shape, torch.bfloat16, device) as peer:
        peers = _reference(peer, prompts, answers, device)
        yield from _error_lines(rows, values, peers, exact)
        for prompt, count in size.prefills:
            if not left.fits(PEER_S / 2):
                yield from left_out(*(prefill_over_sdpa_case(prompt, what) for what in ("ttft", "rate")))
                continue
            for together in (1, count):
                theirs[prompt, together] = _peer_rate(peer, (together, prompt), size.shape.vocab, device)
            yield from _prefill_lines(prompt, count, theirs, " of sdpa")
            ratios = {key: own[key] / theirs[key] for key in ((prompt, 1), (prompt, count))}
            yield line(prefill_over_sdpa_case(prompt, "ttft"), 1 / ratios[prompt, 1], "x")
            yield line(prefill_over_sdpa_case(prompt, "rate"), ratios[prompt, count], "x", prompts=count)
        del peer


def longest_row(size: Size) -> int:
    """Tokens of the longest prompt of `logits`, and of an answer."""
    return max(size.prompt, *(prompt for prompt, _ in size.prefills)) + REFERENCE_TOKENS


def _error_lines(rows: Rows, own: torch.Tensor, peers: torch.Tensor, exact: torch.Tensor) -> Iterator[Line]:
    shape = {"rows": rows.count, "prompt": rows.prompt, "tokens": rows.tokens, "top": TOP}
    ours, theirs = (float((values - exact).pow(2).mean().sqrt()) for values in (own, peers))
    yield line("logits/error", ours, "rms of log-probabilities", **shape)
    yield line("logits/error of transformers", theirs, "rms of log-probabilities", **shape)
    yield line("logits/error over transformers", ours / theirs, "x", **shape)


def _prefill_lines(
    prompt: int, count: int, rates: dict[tuple[int, int], float], whose: str
) -> Iterator[Line]:
    """Of a lone prompt the time until its first token, of `count` at once the tokens per second."""
    seconds = prompt / rates[prompt, 1]
    yield line(f"prefill/{prompt}/ttft{whose}", seconds * 1000, "ms", prompts=1)
    yield line(f"prefill/{prompt}/rate{whose}", rates[prompt, count], "tokens/s", prompts=count)


def _peer_rate(peer: Any, shape: tuple[int, int], vocab: int, device: torch.device) -> float:
    """Tokens per second of prompts [rows, tokens] at once, until the first token of each."""
    rates = []
    for _ in range(PREFILL_ROUNDS):
        tokens = torch.randint(2, vocab, shape, device=device)
        synchronize(device)
        began = time.perf_counter()
        with torch.inference_mode():
            peer(tokens, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
        rates.append(tokens.numel() / (time.perf_counter() - began))
    return median(rates)


def graphs(size: Size, device: torch.device, left: TimeLeft) -> Iterator[Line]:
    """Greedy answers of full batches with steps replayed and plain, `deterministic` off, on one set of weights.

    Of 30 s 6 pass until CUDA answers, 4 for the weights and an engine with its captures, 2 for the other, 3 for replayed steps and
    6 for plain ones, which the host launches in 25 ms each.
    """
    rows = Rows(size.most_rows, 0, size.prompt, size.output)
    model = random_model(size.shape, "none", device)
    source = AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
    answers = []
    for cuda_graphs in ("auto", "off"):
        with running_engine(model, source, rows, EngineOptions(cuda_graphs=cuda_graphs)) as engine:
            prompts = random_prompts(engine, rows.count, rows.prompt)
            answers.append(_run(engine, rows, prompts))
    replayed, plain = answers
    equal, furthest = 0, 0.0
    for name, own in replayed.items():
        same = list(
            takewhile(lambda pair: pair[0].token_id == pair[1].token_id, zip(own, plain[name], strict=True))
        )
        equal += len(same)
        furthest = max([furthest, *(abs(a.logprob - b.logprob) for a, b in same)])
    shape = {"rows": rows.count, "prompt": rows.prompt, "tokens": rows.tokens}
    yield line("graphs/equal tokens", 100 * equal / (rows.count * rows.tokens), "% equal tokens", **shape)
    yield line("graphs/log-probability", furthest, "largest difference", **shape)


def _run(engine: Engine, rows: Rows, prompts: list[list[int]]) -> Answers:
    for row, prompt in enumerate(prompts):
        engine.add(request(str(row), prompt, rows.tokens, logprobs=TOP))
    found: Answers = {}
    while engine.has_unfinished:
        for output in stepped(engine).outputs:
            if output.logprob is not None:
                found.setdefault(output.sequence.request_id, []).append(output.logprob)
    return found


def _values(answer: list[TokenLogprob]) -> torch.Tensor:
    return torch.tensor([[value for _, value in step.top[:TOP]] for step in answer])


def _reference(peer: Any, prompts: list[list[int]], answers: Answers, device: torch.device) -> torch.Tensor:
    """Log-probabilities of the same tokens after the same texts."""
    values = []
    with torch.inference_mode():
        for row, prompt in enumerate(prompts):
            answer = answers[str(row)]
            text = [*prompt, *(step.token_id for step in answer[:-1])]
            found = peer(torch.tensor([text], device=device)).logits[0, len(prompt) - 1 :].float()
            tokens = torch.tensor([[token for token, _ in step.top[:TOP]] for step in answer], device=device)
            values.append(found.log_softmax(-1).gather(1, tokens).cpu())
    return torch.cat(values)


@contextmanager
def _peer(shape: LayerShape, dtype: torch.dtype, device: torch.device) -> Iterator[Any]:
    """`transformers` with the random model's parameters, which are rounded to bfloat16 in both types."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = hugging_face_config(shape)
    theta = fields.pop("rope_theta")
    rope = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(**fields, rope_parameters=rope, attn_implementation="sdpa")
    with torch.device("meta"):
        peer = LlamaForCausalLM(config)
    state: dict[str, torch.Tensor] = {}
    for parameter, weight in drawn_parameters(model_config(shape), torch.bfloat16, device):
        parts = torch.split(weight, [part.rows for part in parameter.parts])
        state |= {part.source: piece.to(dtype) for part, piece in zip(parameter.parts, parts, strict=True)}
    peer.load_state_dict(state, assign=True)
    # What is computed from the configuration alone is no parameter: it is made anew where the parameters are.
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config).to(device)
    yield peer.eval()
    del peer, state
