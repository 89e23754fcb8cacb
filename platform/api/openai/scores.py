"""Scores in a whole response: `prompt_logprobs` in vLLM's shape, and `choice_probabilities`."""

from typing import Any

from loraplex.engine.messages import Scored
from loraplex.platform.api.openai.logprobs import prompt_logprobs
from loraplex.platform.api.openai.response_models import ChoiceProbability
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.prompting.token_text import TextOf


def with_prompt_logprobs(generation: Generation, scored: Scored | None, text_of: TextOf) -> dict[str, Any]:
    """Return the member `prompt_logprobs` of a response that has it."""
    count = generation.prompt_output.prompt_logprobs
    if count is None:
        return {}
    tokens = [] if scored is None or scored.prompt is None else scored.prompt
    return {"prompt_logprobs": prompt_logprobs(tokens, count, text_of)}


def with_probabilities(generation: Generation, choice: int) -> dict[str, Any]:
    """Return the member `choice_probabilities` of a choice that has it."""
    found = generation.probabilities(choice)
    if found is None:
        return {}
    entries = [ChoiceProbability(text=e.text, logprob=e.logprob, probability=e.probability) for e in found]
    return {"choice_probabilities": entries}
