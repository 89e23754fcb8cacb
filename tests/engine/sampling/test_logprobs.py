"""Log-probabilities of the raw distribution, row by row."""

import math

import torch

from loraplex.engine.messages import TokenLogprob
from loraplex.engine.sampling.logprobs import raw_logprobs, token_logprobs


def answers(
    logits: torch.Tensor, rows: list[int], token_ids: list[int], counts: list[int]
) -> list[TokenLogprob]:
    found = raw_logprobs(logits, torch.tensor(rows), torch.tensor(token_ids))
    return token_logprobs(token_ids, counts, *found)


def test_equals_log_softmax_in_float32_of_the_rows_that_ask() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = logits.float().log_softmax(dim=-1)
    first, second = answers(logits, [3, 1], [7, 8], [5, 0])
    assert (first.token_id, second.token_id) == (7, 8)
    assert first.logprob == expected[3, 7].item()
    assert second.top == []
    best = expected[3].sort(descending=True)
    assert [pair[1] for pair in first.top] == best.values[:5].tolist()
    assert all(expected[3, token].item() == value for token, value in first.top)


def test_ties_are_listed_by_token_id_whatever_other_rows_request() -> None:
    logits = torch.zeros(2, 12)
    alone = answers(logits[:1], [0], [3], [4])
    together = answers(logits, [0, 1], [3, 3], [4, 12])
    assert alone[0] == together[0]
    assert [token for token, _ in together[1].top] == list(range(12))
    assert math.isclose(alone[0].logprob, -math.log(12), rel_tol=1e-6)
