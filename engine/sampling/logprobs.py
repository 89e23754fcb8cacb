"""Log-probabilities of the model's own distribution: before penalties, bias, masks and temperature (OpenAI API).

Invariant: only rows with `logprobs` are computed, and a row's result does not depend on the other rows' requests.
"""

from torch import Tensor

from loraplex.engine.messages import TokenLogprob
from loraplex.engine.sampling_params import MAX_TOP_LOGPROBS


def raw_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `rows` int64 [requested]: the log-probability of its token [requested, 1], the best tokens and theirs.

    `logits` [all rows, vocab] of any float type; `token_ids` int64 [requested]; nats. The best [requested,
    `MAX_TOP_LOGPROBS`] are as many for every row, so that ties at the end do not depend on the other rows' counts.
    """
    distribution = logits.index_select(0, rows).float().log_softmax(dim=-1)
    chosen = distribution.gather(-1, token_ids.unsqueeze(-1))
    best = distribution.topk(min(MAX_TOP_LOGPROBS, distribution.shape[1]))
    return chosen, best.indices, best.values


def token_logprobs(
    token_ids: list[int], counts: list[int], chosen: Tensor, best_ids: Tensor, best_values: Tensor
) -> list[TokenLogprob]:
    """Convert results of `raw_logprobs`, on the host: `counts[i]` of the best, best first. Ties are listed by token id."""
    answers = zip(
        token_ids,
        chosen.squeeze(-1).tolist(),
        best_ids.tolist(),
        best_values.tolist(),
        counts,
        strict=True,
    )
    return [
        TokenLogprob(token, value, best_first(ids, values, count))
        for token, value, ids, values, count in answers
    ]


def best_first(ids: list[int], values: list[float], count: int) -> list[tuple[int, float]]:
    """Return the `count` best of one row. Ties are listed by token id."""
    ranking = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return ranking[:count]
