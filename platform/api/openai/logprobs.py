"""Log-probabilities in the two shapes of the OpenAI API: per-token entries (chat) and parallel lists (completions)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from loraplex.engine import messages
from loraplex.platform.api.openai.response_models import (
    ChatLogprobs,
    ChosenTokenLogprob,
    LogprobLists,
    TokenLogprob,
)
from loraplex.platform.inference.prompting.token_text import TokenText

LOWEST = -9999.0


def chat_logprobs(entries: list[ChosenTokenLogprob]) -> ChatLogprobs:
    """Build the log-probabilities of a choice. The entries are not validated again."""
    return ChatLogprobs.model_construct(content=entries, refusal=None)


def chat_entries(tokens: Sequence[messages.TokenLogprob], text_of: TokenText) -> list[ChosenTokenLogprob]:
    """Build one entry per token."""
    return [
        {
            **_entry(each.token_id, each.logprob, text_of),
            "top_logprobs": [_entry(token_id, logprob, text_of) for token_id, logprob in each.top],
        }
        for each in tokens
    ]


def _entry(token_id: int, logprob: float, text_of: TokenText) -> TokenLogprob:
    text, raw = text_of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


@dataclass(slots=True)
class CompletionLogprobs:
    """Parallel lists of one choice. `text_offset` counts characters of the tokens' own texts.

    `top_logprobs` always has the sampled token, so one more entry than asked for where it is none of the best.
    """

    text_of: TokenText
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[messages.TokenLogprob]) -> None:
        for each in tokens:
            text, _ = self.text_of(each.token_id)
            self.tokens.append(text)
            self.token_logprobs.append(_finite(each.logprob))
            best = {self.text_of(token)[0]: _finite(logprob) for token, logprob in each.top}
            self.top_logprobs.append(best | {text: self.token_logprobs[-1]})
            self.text_offset.append(self.offset)
            self.offset += len(text)

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
