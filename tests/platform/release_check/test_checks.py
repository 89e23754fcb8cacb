"""What a check says of its figures, and the texts that it asks."""

import math
from typing import Any

import pytest

from loraplex.platform.bench.client import Completion
from loraplex.platform.release_check.checks import Check, Pair, compared, memory_check
from loraplex.platform.release_check.corpus import PROMPTS
from loraplex.platform.release_check.releases import Release

PLAN: dict[str, Any] = {
    "max_model_len": 8192,
    "rows": 10,
    "kv_tokens": 81_920,
    "adapters": [{"resident": 50}],
    "weights_bytes": 1,
}


def completion(tokens: str, *tops: float) -> Completion:
    alternatives = tuple({token: top} for token, top in zip(tokens, tops, strict=True))
    return Completion(tokens, (), 1, len(tokens), 0, True, None, 1.0, tuple(tokens), alternatives)


def pair(plan: dict[str, Any] | None) -> Pair:
    return Pair(Release("", "", {}, {}, PLAN), Release("", "", {}, {}, plan))


def test_an_answer_differs_from_its_first_other_token_on() -> None:
    old, new = completion("abcd", -1.0, -1.0, -1.0, -1.0), completion("abxd", -1.5, -1.0, -2.0, -9.0)
    assert compared(old, new) == (0.5, [0.5, 0.0])
    assert compared(old, old) == (0.0, [0.0] * 4)


def test_answers_without_a_common_token_are_infinitely_far_apart() -> None:
    assert compared(completion("a", -1.0), completion("b", -1.0)) == (1.0, [math.inf])


@pytest.mark.parametrize(
    ("value", "outcome"), [(0.3, "pass"), (0.31, "FAIL"), (math.nan, "FAIL"), (None, "skip")]
)
def test_a_line_says_figure_and_bound(value: float | None, outcome: str) -> None:
    check = Check("answers base", value, 0.3, "because")
    figure = "" if value is None else f" {value:.3g} (at most 0.3)"
    assert check.line == f"{outcome} answers base:{figure} because"


@pytest.mark.parametrize("less", [{"rows": 9}, {"kv_tokens": 70_000}, {"adapters": [{"resident": 40}]}])
async def test_less_memory_for_any_use_fails(less: dict[str, Any]) -> None:
    [check] = await memory_check(pair(PLAN | less))
    assert check.outcome == "FAIL"
    [check] = await memory_check(pair(PLAN | {"rows": 11}))
    assert check.outcome == "pass"
    [check] = await memory_check(pair(None))
    assert check.outcome == "skip"


def test_the_corpus_has_200_different_prompts() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 200
