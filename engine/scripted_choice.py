"""One choice of a request to a scripted engine: its tokens, what of its text may be sent, and its end.

Invariant: tokens are a function of the prompt and the choice alone: a seed that a gateway draws changes none.
"""

import hashlib
from collections.abc import Iterator, Mapping

from loraplex.engine.messages import Delta, EngineRequest, Finished, FinishReason, Scored, TokenLogprob, Usage
from loraplex.engine.sequence_scores import PositionScore, scores_of


class ScriptedChoice:
    """One choice in progress: its tokens, its visible text and how it ended."""

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        *,
        answer: tuple[str, ...] | None,
        token_ids: Mapping[str, int],
        vocab_size: int,
        cached_tokens: int,
        prefilled_tokens: int,
    ) -> None:
        """`answer`: the texts of its tokens, whose ids are in `token_ids` or drawn; None goes on until `max_tokens`."""
        self._request = request
        self._index = index
        self._answer = answer
        self._token_ids = token_ids
        self._cached = min(cached_tokens, len(request.prompt_token_ids))
        self._vocab_size = vocab_size
        prompt = b",".join(b"%d" % token for token in request.prompt_token_ids)
        self._key = hashlib.sha256(b"%d|%s" % (index, prompt)).digest()
        self._tokens = 0
        self._text = ""
        self._num_sent = 0
        self.num_prefilled = min(prefilled_tokens, len(request.prompt_token_ids))
        self._stop: str | None = None
        self.step_tokens = 0
        self.reason: FinishReason | None = None
        for _ in request.received.get(index, ()):
            self._next_token()
        self._num_sent = max(0, self._visible_end())

    def step(self, count: int) -> Iterator[Delta | Finished]:
        """Produce up to `count` tokens as one delta, then the end if it was reached."""
        self.step_tokens = 0
        if self.reason is not None:
            return
        token_ids: list[int] = []
        while len(token_ids) < count and self.reason is None:
            token_ids.append(self._next_token())
        self.step_tokens = len(token_ids)
        visible = self._visible_end()
        text, self._num_sent = self._text[self._num_sent : visible], max(self._num_sent, visible)
        logprobs = [self._logprob(token) for token in token_ids]
        wanted = self._request.sampling.logprobs is not None
        yield Delta(self._request.request_id, self._index, token_ids, text, logprobs if wanted else None)
        if self.reason is not None:
            yield self.finish(self.reason)

    def score(self) -> Iterator[Scored | Finished]:
        """Score what the request asks for, -0.5 for each token; the end of a choice that writes nothing follows."""
        scores = scores_of(self._request, self._index)
        if scores is not None:
            for target in scores.targets:
                top = self._alternatives(target.token_ids[0], target.top or 0)
                scores.add([PositionScore(target, [-0.5] * len(target.token_ids), 1, top)])
            yield Scored(self._request.request_id, self._index, scores.prompt, scores.token_ids)
        if not self._request.sampling.max_tokens:
            yield self.finish("length")

    def finish(self, reason: FinishReason) -> Finished:
        """Return the choice's last event."""
        self.reason = reason
        usage = Usage(self.num_prefilled, min(self._cached, self.num_prefilled), self._tokens)
        return Finished(self._request.request_id, self._index, reason, usage, self._stop)

    def _next_token(self) -> int:
        digest = hashlib.sha256(self._key + self._tokens.to_bytes(8, "big")).digest()
        token = int.from_bytes(digest[:4], "big") % self._vocab_size
        answer = self._answer
        text = f" w{token}" if answer is None else (answer[self._tokens : self._tokens + 1] or ("",))[0]
        self._text += text
        token = self._token_ids.get(text, token)
        self._tokens += 1
        self._end(answer is not None and self._tokens >= len(answer))
        return token

    def _end(self, exhausted: bool) -> None:
        begin = self._answer_begin()
        found = [(self._text.find(stop, begin), stop) for stop in self._request.sampling.stop]
        if hits := [hit for hit in found if hit[0] >= 0]:
            at, self._stop = min(hits)
            keep = self._request.sampling.include_stop_str_in_output
            self._text = self._text[: at + len(self._stop) if keep else at]
            self.reason = "stop"
        elif exhausted:
            self.reason = "stop"
        elif self._tokens >= self._request.sampling.max_tokens:
            self.reason = "length"

    def _answer_begin(self) -> int:
        """Return where stop strings count: behind the thought that `stops_behind` tells of."""
        start, end = self._request.sampling.stops_behind or ("", "")
        if not end or not (self._text.startswith(start) or start.startswith(self._text)):
            return 0
        found = self._text.find(end, len(start))
        return len(self._text) if found < 0 else found + len(end)

    def _visible_end(self) -> int:
        """Return the length of the text that is sent: text that may begin a stop string is kept back until the choice
        ends.
        """
        if self.reason is not None:
            return len(self._text)
        return len(self._text) - max((len(stop) - 1 for stop in self._request.sampling.stop), default=0)

    def _logprob(self, token: int) -> TokenLogprob:
        return TokenLogprob(token, -0.5, self._alternatives(token, self._request.sampling.logprobs or 0))

    def _alternatives(self, token: int, count: int) -> list[tuple[int, float]]:
        return [((token + rank) % self._vocab_size, -0.5 - rank) for rank in range(count)]
