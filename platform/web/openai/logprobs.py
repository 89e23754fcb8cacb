"""Log-probabilities as per-token entries (chat) and parallel lists (completions), and those of prompts in vLLM's shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loraplex.engine import messages
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.prompting.token_text import TextOf
from loraplex.platform.web.openai.response_models import (
    ChatLogprobs,
    ChosenTokenLogprob,
    LogprobLists,
    RankedLogprob,
    TokenLogprob,
)

LOWEST = -9999.0


def prompt_logprobs(
    generation: Generation, scored: messages.Scored | None, text_of: TextOf
) -> dict[str, Any]:
    """Build the field of this name, if the request asks: as in vLLM null for the first token, then each by its id."""
    count, tokens = generation.prompt_output.prompt_logprobs, [] if scored is None else scored.prompt or []
    if count is None:
        return {}
    return {"prompt_logprobs": [None, *(_ranked(token, count, text_of) for token in tokens)]}


def _ranked(token: messages.TokenScore, count: int, text_of: TextOf) -> dict[int, RankedLogprob]:
    best = [(each, logprob, rank) for rank, (each, logprob) in enumerate(token.top[:count], start=1)]
    return {
        each: {"logprob": _finite(logprob), "rank": rank, "decoded_token": text_of(each)[0]}
        for each, logprob, rank in ((token.token_id, token.logprob, token.rank), *best)
    }


def chat_logprobs(entries: list[ChosenTokenLogprob]) -> ChatLogprobs:
    """Build the log-probabilities of a choice. The entries are not validated again."""
    return ChatLogprobs.model_construct(content=entries, refusal=None)


def chat_entries(tokens: Sequence[messages.TokenLogprob], text_of: TextOf) -> list[ChosenTokenLogprob]:
    """Build one entry per token."""
    return [
        {
            **_entry(each.token_id, each.logprob, text_of),
            "top_logprobs": [_entry(token_id, logprob, text_of) for token_id, logprob in each.top],
        }
        for each in tokens
    ]


def _entry(token_id: int, logprob: float, text_of: TextOf) -> TokenLogprob:
    text, raw = text_of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


@dataclass(slots=True)
class CompletionLogprobs:
    """Parallel lists of one choice. `text_offset` counts characters of the tokens' own texts.

    `top_logprobs` always has the sampled token, so one more entry than asked for where it is none of the best.
    """

    text_of: TextOf
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[messages.TokenLogprob]) -> None:
        for each in tokens:
            logprob = _finite(each.logprob)
            best = {self.text_of(token)[0]: _finite(value) for token, value in each.top}
            text = self._add(each.token_id, logprob)
            self.top_logprobs.append(best | {text: logprob})

    def add_prompt(self, first: int, tokens: Sequence[messages.TokenScore], count: int) -> None:
        """Begin with a prompt, whose first token has no log-probability; of alternatives the `count` likeliest."""
        self._add(first, None)
        self.top_logprobs.append(None)
        self.add([messages.TokenLogprob(each.token_id, each.logprob, each.top[:count]) for each in tokens])

    def _add(self, token_id: int, logprob: float | None) -> str:
        text, _ = self.text_of(token_id)
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.text_offset.append(self.offset)
        self.offset += len(text)
        return text

    def take(self) -> LogprobLists:
        """Return the lists so far and start new ones; `text_offset` goes on counting. The lists are not validated again."""
        lists = LogprobLists.model_construct(
            tokens=self.tokens,
            token_logprobs=self.token_logprobs,
            top_logprobs=self.top_logprobs,
            text_offset=self.text_offset,
        )
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return lists


def _finite(logprob: float) -> float:
    """Replace infinity, which JSON lacks: a masked token gets the lowest value that the OpenAI API uses."""
    return logprob if math.isfinite(logprob) else LOWEST
