"""`echo`, `prompt_logprobs` and `choice_probabilities` of a live server equal `transformers` with PEFT, in float32."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.end_to_end.live_server import LiveServer
from transformers import AutoModelForCausalLM

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.model_loading import load_tokenizer

BOUND = 1e-3
PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Question: which of these is a fruit?\nAnswer: an apple",
    "def add(a, b):\n    return a + b\n" * 12,
)
CHOICES = ("yes", "no", "maybe so", "Yes, of course", "an apple a day")


class Model:
    """The base in float32, with the adapter of a demo tenant or without."""

    def __init__(self, path: Path, adapter: Path | None) -> None:
        base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model = base if adapter is None else PeftModel.from_pretrained(base, adapter)
        self._model.eval()

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab]: of the successor of each."""
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits.float().log_softmax(-1)

    @torch.inference_mode()
    def next_logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[vocab]: of what follows all of them."""
        logits: torch.Tensor = self._model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1]
        return logits.float().log_softmax(-1)


@pytest.fixture(scope="module", params=["base", "adapter"])
def served(request: pytest.FixtureRequest, demo: LiveServer, demo_model: Path) -> tuple[Any, str, Model]:
    """(client, name of the model, the same model in `transformers`)."""
    if request.param == "base":
        return demo.client(), demo.access.model, Model(demo_model, None)
    name = demo.access.tenants[0].adapters[0]
    first = demo.client().completions.with_raw_response.create(model=name, prompt="a", max_tokens=1)
    (folder,) = (demo.data_dir / "adapters").glob(f"*/{first.headers['x-loraplex-adapter-digest']}")
    return demo.client(), name, Model(demo_model, folder)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_echo_has_the_log_probabilities_of_the_reference(
    served: tuple[Any, str, Model], demo_model: Path, prompt: str
) -> None:
    client, name, model = served
    ids = load_tokenizer(str(demo_model)).encode(prompt).ids
    reference = model.logprobs(ids)
    for given in (prompt, ids):
        answer = client.completions.create(
            model=name, prompt=given, echo=True, logprobs=2, max_tokens=0, extra_body={"prompt_logprobs": 3}
        )
        (choice,) = answer.choices
        expected = [reference[i, token].item() for i, token in enumerate(ids[1:])]
        assert choice.text == prompt and choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=BOUND)
        assert [max(top.values()) for top in choice.logprobs.top_logprobs[1:]] == pytest.approx(
            reference[:-1].max(-1).values.tolist(), abs=BOUND
        )
        ranked = choice.model_extra["prompt_logprobs"]
        for position, token in enumerate(ids[1:]):
            own = ranked[position + 1][str(token)]
            best = reference[position].topk(3).values.tolist()
            values = sorted((each["logprob"] for each in ranked[position + 1].values()), reverse=True)
            assert values[:3] == pytest.approx(best, abs=BOUND)
            assert own["logprob"] == pytest.approx(expected[position], abs=BOUND)
        assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens == 0


def test_choice_probabilities_equal_brute_force(served: tuple[Any, str, Model], demo_model: Path) -> None:
    """The whole model once for each choice; the end is any of the model's end tokens."""
    client, name, model = served
    tokenizer = load_tokenizer(str(demo_model))
    ends = list(load_model_config(str(demo_model)).eos_token_ids)
    prompt = tokenizer.encode(PROMPTS[1]).ids
    totals = []
    for text in CHOICES:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        reference = model.logprobs(prompt + tokens)
        at = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        own = sum(reference[i, token].item() for i, token in zip(at, tokens, strict=True))
        totals.append(own + reference[-1, ends].logsumexp(0).item())
    whole = math.log(sum(map(math.exp, totals)))
    answer = client.completions.create(
        model=name,
        prompt=PROMPTS[1],
        extra_body={"structured_outputs": {"choice": list(CHOICES), "probabilities": True}},
    )
    found = answer.choices[0].model_extra["choice_probabilities"]
    assert [each["text"] for each in found] == list(CHOICES) and answer.choices[0].text in CHOICES
    assert [each["logprob"] for each in found] == pytest.approx(totals, abs=BOUND)
    assert [each["probability"] for each in found] == pytest.approx(
        [math.exp(total - whole) for total in totals], abs=BOUND
    )
