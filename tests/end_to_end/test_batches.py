"""Batch invariance over HTTP: a response does not depend on the other rows of its batch."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.end_to_end.live_server import LiveServer
from tests.end_to_end.test_client import MODELS, ask, user_of

TOKENS = 24
QUESTIONS = ("How do I clean my windows?", "Explain what the internet is.")
# Below this margin the height of a batch may decide, since it changes the order of fp32 sums.
UNDECIDED = 1e-3


@dataclass(frozen=True)
class Row:
    """Tokens, and by how much each one's log-probability exceeds the second best."""

    tokens: list[str]
    margins: list[float]


def row(demo: LiveServer, model: str, question: str, **options: Any) -> Row:
    client, name = user_of(demo, model)
    answer = ask(client, name, question, max_tokens=TOKENS, logprobs=True, top_logprobs=2, **options)
    entries = answer.choices[0].logprobs.content
    margins = [entry.top_logprobs[0].logprob - entry.top_logprobs[1].logprob for entry in entries]
    return Row([entry.token for entry in entries], margins)


def test_mixed_batch_equals_solo_answers(demo: LiveServer) -> None:
    cases = [(model, question) for model in MODELS for question in QUESTIONS]
    solo = [row(demo, *case) for case in cases]
    assert len({tuple(each.tokens) for each in solo}) == len(cases)
    with ThreadPoolExecutor(len(cases)) as pool:
        mixed = list(pool.map(lambda case: row(demo, *case), cases))
    for case, alone, shared in zip(cases, solo, mixed, strict=True):
        pairs = zip(alone.tokens, shared.tokens, strict=False)
        differs = next((at for at, (left, right) in enumerate(pairs) if left != right), None)
        assert differs is None or alone.margins[differs] < UNDECIDED, (case, differs, alone, shared)


def test_seeded_draws_do_not_depend_on_the_batch(demo: LiveServer) -> None:
    """The random numbers are the request's own."""
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 12}

    def draw(model: str) -> str:
        client, name = user_of(demo, model)
        text = ask(client, name, QUESTIONS[1], **options).choices[0].message.content
        assert isinstance(text, str)
        return text

    alone = [draw(model) for model in MODELS]
    with ThreadPoolExecutor(len(MODELS) * 2) as pool:
        shared = list(pool.map(draw, [*MODELS, *MODELS]))
    assert shared == alone + alone
