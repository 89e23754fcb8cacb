"""What a whole model answers: its log-probabilities against `transformers`, and replayed steps against plain ones.

Invariant: the reference sees the tokens that the engine chose, so that one early difference is counted once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from tests.benchmarks.gpu.engine_rows import (
    AliasedSource,
    EngineOptions,
    Rows,
    random_prompts,
    release,
    request,
    running_engine,
    stepped,
)
from tests.benchmarks.gpu.model import drawn_parameters, hugging_face_config, model_config, random_model
from tests.benchmarks.gpu.sizes import RANK, Line, Size, line
from tests.benchmarks.kernels.shapes import LayerShape

from loraplex.engine.engine import Engine
from loraplex.engine.messages import TokenLogprob

TOP = 20
REFERENCE_ROWS = 4
REFERENCE_TOKENS = 16
Answers = dict[str, list[TokenLogprob]]


def logits(size: Size, device: torch.device) -> Iterator[Line]:
    """The error of the likeliest tokens' log-probabilities, and that of `transformers` in the same type, both against float32."""
    rows = Rows(REFERENCE_ROWS, 0, size.prompt, REFERENCE_TOKENS)
    answers, prompts = _answers(size, rows, device, "auto")
    exact = _reference(size.shape, prompts, answers, torch.float32, device)
    peers = _reference(size.shape, prompts, answers, torch.bfloat16, device)
    own = torch.cat([_values(answers[str(row)]) for row in range(rows.count)])
    shape = {"rows": rows.count, "prompt": rows.prompt, "tokens": rows.tokens, "top": TOP}
    ours, theirs = (float((values - exact).pow(2).mean().sqrt()) for values in (own, peers))
    yield line("logits/error", ours, "rms of log-probabilities", **shape)
    yield line("logits/error of transformers", theirs, "rms of log-probabilities", **shape)
    yield line("logits/error over transformers", ours / theirs, "x", **shape)


def graphs(size: Size, device: torch.device) -> Iterator[Line]:
    """Greedy answers of full batches with steps replayed and plain, `deterministic` off."""
    rows = Rows(size.most_rows, 0, size.prompt, size.output)
    replayed, _ = _answers(size, rows, device, "auto")
    plain, _ = _answers(size, rows, device, "off")
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


def _answers(
    size: Size, rows: Rows, device: torch.device, cuda_graphs: str
) -> tuple[Answers, list[list[int]]]:
    """What greedy rows answer, token by token, and their prompts."""
    model = random_model(size.shape, "none", device)
    source = AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
    with running_engine(model, source, rows, EngineOptions(cuda_graphs=cuda_graphs)) as engine:
        prompts = random_prompts(engine, rows.count, rows.prompt)
        found = _run(engine, rows, prompts)
    del engine, model
    release(device)
    return found, prompts


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


def _reference(
    shape: LayerShape, prompts: list[list[int]], answers: Answers, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Log-probabilities of the same tokens after the same texts."""
    values = []
    with _peer(shape, dtype, device) as peer, torch.inference_mode():
        for row, prompt in enumerate(prompts):
            answer = answers[str(row)]
            text = [*prompt, *(step.token_id for step in answer[:-1])]
            found = peer(torch.tensor([text], device=device)).logits[0, len(prompt) - 1 :].float()
            tokens = torch.tensor([[token for token, _ in step.top[:TOP]] for step in answer], device=device)
            values.append(found.log_softmax(-1).gather(1, tokens).cpu())
    del peer, found
    release(device)
    return torch.cat(values)


@contextmanager
def _peer(shape: LayerShape, dtype: torch.dtype, device: torch.device) -> Iterator[Any]:
    """`transformers` with the random model's parameters, which are rounded to bfloat16 in both types."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = hugging_face_config(shape)
    theta = fields.pop("rope_theta")
    config = LlamaConfig(**fields, rope_parameters={"rope_type": "default", "rope_theta": theta})
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
