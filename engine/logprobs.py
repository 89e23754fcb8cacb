"""Log-probabilities of the model's own distribution: before penalties, bias, masks and temperature (OpenAI API).

Invariant: only rows that ask are computed, and a row's answer does not depend on what the others ask for.
"""

import torch
from torch import Tensor

from loraplex.engine.messages import TokenLogprob
from loraplex.engine.sampling_params import MAX_TOP_LOGPROBS


def raw_logprobs(
    logits: Tensor, rows: list[int], token_ids: list[int], counts: list[int]
) -> list[TokenLogprob]:
    """One answer per entry of `rows`: the chosen token's log-probability and the `counts[i]` best, best first.

    `logits` [rows, vocab] of any float type; nats. Ties are listed by token id.
    """
    distribution = logits[torch.tensor(rows, device=logits.device)].float().log_softmax(dim=-1)
    chosen = distribution.gather(-1, torch.tensor(token_ids, device=logits.device).unsqueeze(-1))
    # The same width for all, so that ties at the end do not depend on the neighbours' wishes.
    best = distribution.topk(min(MAX_TOP_LOGPROBS, distribution.shape[1]))
    answers = zip(
        token_ids,
        chosen.squeeze(-1).tolist(),
        best.indices.tolist(),
        best.values.tolist(),
        counts,
        strict=True,
    )
    return [
        TokenLogprob(token, value, _top(ids, values, count)) for token, value, ids, values, count in answers
    ]


def _top(ids: list[int], values: list[float], count: int) -> list[tuple[int, float]]:
    ranking = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return ranking[:count]
