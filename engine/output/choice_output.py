"""The output of one choice: takes tokens, returns text up to a stop string, and how it ended.

Invariant: the first token that ends the choice, by a stop string or by the scheduler, is the last one counted, so the
result does not depend on how far the engine ran ahead.
"""

from loraplex.engine.messages import Delta, Finished, FinishReason, TokenLogprob, Usage
from loraplex.engine.output.detokenizer import Detokenizer
from loraplex.engine.output.stop_strings import StopMatcher
from loraplex.engine.sampling_params import SamplingParams


class ChoiceOutput:
    """Pending output of one choice. `matcher` None: no stop strings."""

    def __init__(
        self, sampling: SamplingParams, detokenizer: Detokenizer, matcher: StopMatcher | None
    ) -> None:
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._completion_tokens = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = ""
        self._reason: FinishReason | None = None
        self._stop: str | int | None = None

    @property
    def ended(self) -> bool:
        return self._reason is not None

    def add_token(self, token_id: int, logprob: TokenLogprob | None, is_text: bool) -> None:
        """Count a token; its text is returned only if `is_text`. It may complete a stop string and so end the choice."""
        self._completion_tokens += 1
        self._token_ids.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        if is_text:
            self._show(self._detokenizer.push(token_id))

    def drop_pending(self) -> None:
        """Drop the output since the last delta: the client has it."""
        self._token_ids, self._logprobs, self._text = [], [], ""

    def end(self, reason: FinishReason, stop: int | None) -> None:
        """End the choice by the scheduler's decision. Withheld text is returned, and may still complete a stop string."""
        self._show(self._detokenizer.flush())
        if self.ended:
            return
        if self._matcher is not None:
            self._text += self._matcher.flush()
        self._reason, self._stop = reason, stop

    def take_delta(self, request_id: str, choice: int) -> Delta | None:
        """Return the new output since the last call. Tokens wait for text, unless they carry log-probabilities or are the
        last.
        """
        asks_logprobs = self._sampling.logprobs is not None
        if not self._text and not (self._token_ids and (asks_logprobs or self.ended)):
            return None
        logprobs = self._logprobs if asks_logprobs else None
        delta = Delta(request_id, choice, self._token_ids, self._text, logprobs)
        self.drop_pending()
        return delta

    def finished(
        self, request_id: str, choice: int, prompt_tokens: int, cached_tokens: int
    ) -> Finished | None:
        """The final event, None while the choice runs."""
        if self._reason is None:
            return None
        usage = Usage(prompt_tokens, cached_tokens, self._completion_tokens)
        return Finished(request_id, choice, self._reason, usage, self._stop)

    def _show(self, text: str) -> None:
        if self._matcher is None or not text:
            self._text += text
            return
        # As in vLLM: a stop that the last of `min_tokens` completes does not end the choice yet.
        may_stop = self._completion_tokens > self._sampling.min_tokens or self._sampling.min_tokens == 0
        visible, stop = self._matcher.push(text, may_stop)
        self._text += visible
        if stop is not None:
            self._reason, self._stop = "stop", stop
