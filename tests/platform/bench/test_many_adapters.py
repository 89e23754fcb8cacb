"""The log-probability margin at the first token that differs from the run alone."""

import pytest
from tests.platform.bench.test_client import record, text

from loraplex.platform.bench.client import decode
from loraplex.platform.bench.many_adapters import margin_at_difference


def test_the_margin_is_that_of_the_token_where_texts_part() -> None:
    tops = [{"ab": -0.1, "x": -3.0}, {"cd": -0.7, "ce": -0.7005}]
    pieces = [
        text(piece, logprobs={"tokens": [piece], "top_logprobs": [top]})
        for piece, top in zip(("ab", "cd"), tops, strict=True)
    ]
    alone = decode(record((1.0, b"".join(pieces) + b"data: [DONE]\n\n")))
    assert margin_at_difference("abcd", alone) is None
    assert margin_at_difference("abce", alone) == pytest.approx(0.0005)
    assert margin_at_difference("ax", alone) == pytest.approx(2.9)
    assert margin_at_difference("abcdx", alone) == float("inf")
