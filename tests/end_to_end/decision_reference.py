"""Questions about committed inputs, and the reference of their answers: `transformers` with PEFT, by one run of the whole model each."""

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
from tests.end_to_end.test_scores import BOUND, Model
from transformers import AutoTokenizer

INPUTS: Final = [*json.loads((Path(__file__).parent / "decision_inputs.json").read_text())]
MARK: Final = "@@question@@"
QUESTIONS: Final[list[dict[str, Any]]] = [
    {"type": "predicate", "instructions": "The customer needs an answer today.", "name": "urgent"},
    {"type": "predicate", "instructions": "Is money mentioned?"},
    {
        "type": "choice",
        "instructions": "Which team is this for?",
        "choices": [
            {"value": "billing", "description": "payments, refunds"},
            {"value": "technical"},
            {"value": True},
        ],
    },
    {"type": "score", "instructions": "How angry is it?", "levels": [{"label": "calm"}, {"label": "mad"}]},
]
TEXTS: Final = (
    "The customer needs an answer today.\n\nAnswer Yes if it is true, and No if it is not. Write one word.",
    "Is money mentioned?\n\nAnswer Yes if it is true, and No if it is not. Write one word.",
    "Which team is this for?\n\nOptions:\nA: billing (payments, refunds)\nB: technical\nC: true\n\nWrite the letter of one option.",
    "How angry is it?\n\nLevels, from lowest to highest:\nA: calm\nB: mad\n\nWrite the letter of one level.",
)
LABELS: Final = (("Yes", "No"), ("Yes", "No"), ("A", "B", "C"), ("A", "B"))


class Reference:
    """The probabilities of labels by one run of the whole model for each question."""

    def __init__(self, path: Path, adapter: Path | None) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._model = Model(path, adapter)

    def prompt(self, given: str, text: str) -> list[int]:
        """The token ids of a question about an input."""
        chat = [{"role": "user", "content": given + MARK}]
        rendered = self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        begin, end = rendered.split(MARK)
        asked = f"\n\nAnswer one question about everything above.\n\n{text}{end}"
        return [token for part in (begin, asked) for token in self.encode(part)]

    def encode(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text)]

    def probabilities(self, given: str, text: str, labels: tuple[str, ...]) -> tuple[list[float], float]:
        """Return those of the labels among each other, and the sum that the model gives to them."""
        last = self._model.next_logprobs(self.prompt(given, text)).exp()
        spelled = [[self.encode(blank + label) for blank in ("", " ")] for label in labels]
        found = [sum(last[ids[0]].item() for ids in each if len(ids) == 1) for each in spelled]
        return [each / sum(found) for each in found], sum(found)

    def logprob(self, prompt: list[int], written: list[int]) -> float:
        """Return that of tokens behind a prompt, by one run of the whole model for each."""
        return sum(
            self._model.next_logprobs(prompt + written[:at])[token].item() for at, token in enumerate(written)
        )


def shares(answer: dict[str, Any]) -> list[float]:
    """The probabilities of an answer, in the order of its options."""
    if answer["type"] == "predicate":
        return [answer["probability"], 1 - answer["probability"]]
    return [each["probability"] for each in answer["probabilities"]]


def decide(client: Any, model: str, given: Any, questions: list[dict[str, Any]]) -> Any:
    return client.decisions.with_raw_response.create(model=model, input=given, questions=questions)


def answers_of(raw: Any) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = json.loads(raw.text)["answers"]
    return answers


def check_equal(reference: Reference, given: str, raw: Any) -> None:
    expected = [reference.probabilities(given, *each) for each in zip(TEXTS, LABELS, strict=True)]
    for answer, (probabilities, _) in zip(answers_of(raw), expected, strict=True):
        found = [math.log(each) for each in shares(answer)]
        assert found == pytest.approx([math.log(each) for each in probabilities], abs=BOUND)
    mass = float(raw.headers["x-loraplex-label-mass-min"])
    assert mass == pytest.approx(min(mass for _, mass in expected), abs=BOUND)
