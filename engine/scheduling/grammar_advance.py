"""Advances a row's grammar by one sampled token: the forced tokens after it, and the end or the forced close of its
document.

Invariant: every appended token was accepted by the mask, or is an end token after a complete document. If the request asks
for forced close and no token adds more than `MAX_GROWTH` to the way to the end, a document that could be closed within the
remaining tokens at its start can be closed after every token, as long as searching for the way is affordable.

The grammar has precedence over `min_tokens` and `ignore_eos`: a document that nothing can follow ends the row.
`stop_token_ids` end a row in the middle of the document too. `ForcedClose` is a `TokenMask` that allows the tokens of a
known way one after another, for rows whose every token is sampled because its log-probability was requested.
"""

from collections import abc
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import Tensor
import time
from collections.abc import Iterable

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.errors import GrammarFailed, GrammarTooSlow
from loraplex.engine.messages import FinishReason
from loraplex.engine.scheduling.stop_conditions import masked_reason
from loraplex.engine.token_mask import TokenMask


class ForcedClose:
    """The mask of a forced close. `end_token` is allowed after the path; an empty path needs it, because a token must be
    sampled.
    """

    closes = False

    def __init__(self, path: abc.Sequence[int], end_token: int | None, position: int = 0) -> None:
        self._path = tuple(path)
        self._end_token = end_token
        self._position = position

    @property
    def family(self) -> object:
        return self

    def fill(self, bitmask: "Tensor", row: int) -> None:
        token = self._next()
        bitmask[row] = 0
        if token is not None:
            bit = 1 << (token % 32)
            bitmask[row, token // 32] = bit - (1 << 32) if token % 32 == 31 else bit

    def accept(self, token_id: int) -> bool:
        accepted = token_id == self._next()
        self._position += accepted
        return accepted

    def rollback(self, count: int) -> None:
        self._position -= count

    def fork(self) -> Self:
        return type(self)(self._path, self._end_token, self._position)

    def is_complete(self) -> bool:
        return self._position >= len(self._path)

    def is_final(self) -> bool:
        """False for an empty path at its start, where the end token still has to come."""
        return self.is_complete() and self._position > 0

    def forced_tokens(self) -> abc.Sequence[int]:
        return ()

    def closing_tokens(self, most: int) -> abc.Sequence[int] | None:
        return None

    def _next(self) -> int | None:
        return self._end_token if self.is_complete() else self._path[self._position]


MAX_GROWTH = 64
"""Most tokens by which one token is assumed to lengthen the shortest way to the end: it may open an object with many
required fields. This spaces out the searches for that way. With r tokens left and a way of w, the next search is due (r -
w) / (MAX_GROWTH + 1) tokens later: some 250 searches for a response of 1,000 tokens."""

QUICK_S = 0.001
MAX_SECONDS = (0.05, 0.001)
"""Processor time that one row's grammar may use on the step thread, which all rows wait for: a fixed part, and a part for
each token of the response. A token usually takes 10 us. No step within `QUICK_S` fails a row."""
MAX_SECONDS_CLOSING = 1.0
"""The same for all searches for a way to close, usually 1 to 3 ms each. After it no search is made."""


def advance_grammar(
    sequence: Sequence, mask: TokenMask, token_id: int, end_token_ids: frozenset[int], max_model_len: int
) -> FinishReason | None:
    """Append the sampled token and its forced tokens to `sequence.token_ids`; return why the row ends with them, or None.

    Nothing is appended if the row is to be sampled once more under another mask. Raises `GrammarFailed`.
    """
    try:
        return _Step(sequence, mask, end_token_ids, max_model_len).take(token_id)
    except GrammarFailed:
        raise
    except BaseException as error:
        # Panics of extension modules are not derived from `Exception`.
        raise GrammarFailed.of(error) from error


class _Step:
    """One sampled token of one row."""

    def __init__(
        self, sequence: Sequence, mask: TokenMask, end_token_ids: frozenset[int], max_model_len: int
    ) -> None:
        self._sequence = sequence
        self._mask = mask
        self._end_token_ids = end_token_ids
        self._max_model_len = max_model_len
        self._known = len(sequence.token_ids)

    def take(self, token_id: int) -> FinishReason | None:
        began = time.thread_time()
        reason = self._append(token_id)
        # A token that was not sampled has no log-probability.
        if self._sequence.request.sampling.logprobs is None:
            while reason is None and (forced := self._mask.forced_tokens()):
                reason = self._append_all(forced)
        if reason is None:
            self._charge(time.thread_time() - began)
        if self._mask.closes and reason != "stop" and self._remaining() <= self._sequence.closing_due:
            return self._look_for_end(reason)
        return reason

    def _charge(self, seconds: float) -> None:
        sequence, (once, per_token) = self._sequence, MAX_SECONDS
        sequence.matcher_seconds += seconds
        if seconds > QUICK_S and sequence.matcher_seconds > once + per_token * sequence.num_output_tokens:
            raise GrammarTooSlow("advancing the grammar of this request takes too long")

    def _look_for_end(self, reason: FinishReason | None) -> FinishReason | None:
        began = time.thread_time()
        reason = self._keep_closable(reason)
        self._sequence.closing_seconds += time.thread_time() - began
        if self._sequence.closing_seconds > MAX_SECONDS_CLOSING:
            self._sequence.closing_due = -1
        return reason

    def _remaining(self) -> int:
        """Tokens that may still come."""
        sequence = self._sequence
        return min(
            sequence.request.sampling.max_tokens - sequence.num_output_tokens,
            self._max_model_len - len(sequence.token_ids),
        )

    def _append_all(self, token_ids: Iterable[int]) -> FinishReason | None:
        for token_id in token_ids:
            reason = self._append(token_id)
            if reason is not None:
                return reason
        return None

    def _append(self, token_id: int) -> FinishReason | None:
        is_end = token_id in self._end_token_ids
        if not (self._mask.is_complete() if is_end else self._mask.accept(token_id)):
            raise GrammarFailed(f"the grammar of this request refused token {token_id}")
        self._sequence.token_ids.append(token_id)
        return masked_reason(self._sequence, self._mask, self._end_token_ids, self._max_model_len)

    def _keep_closable(self, reason: FinishReason | None) -> FinishReason | None:
        """Ensure that the document can still be closed, by removing the new tokens if necessary."""
        remaining = self._remaining()
        way = self._mask.closing_tokens(remaining)
        if way is not None:
            spare = (remaining - len(way)) // (MAX_GROWTH + 1)
            self._sequence.closing_due = remaining - spare - 1
            return "stop" if remaining == 0 else reason
        taken = self._sequence.token_ids[self._known :]
        self._mask.rollback(len(taken))
        way = self._mask.closing_tokens(remaining + len(taken))
        if way is not None and (way or self._end_token_ids):
            del self._sequence.token_ids[self._known :]
            return self._close(way)
        # No way was known before either: continue, and search again when half of the rest is used up.
        self._sequence.closing_due = remaining // 2 if remaining else -1
        if not all(self._mask.accept(token_id) for token_id in taken):
            raise GrammarFailed("the grammar of this request refused what it had accepted")
        return reason

    def _close(self, way: Iterable[int]) -> FinishReason | None:
        sequence = self._sequence
        path, end_token = tuple(way), min(self._end_token_ids, default=None)
        if sequence.request.sampling.logprobs is not None:
            sequence.token_mask = ForcedClose(path, end_token)
            return None
        if not path and end_token is not None:
            path = (end_token,)
        self._append_all(path)
        return "stop"
