"""What one sampled token brings under a grammar: the tokens that must follow it, and the end or the forced close of its document.

Invariant: every appended token was accepted by the mask, or is an end token after a whole document. If the request asked for
a close and no token adds more than `MAX_GROWTH` to the way to the end, a document that could be closed within the remaining
tokens at its start can be closed after every token, as long as searching for the way is affordable.

The grammar has precedence over `min_tokens` and `ignore_eos`: a document that nothing can follow ends the row.
`stop_token_ids` end a row in the middle of the document too. `ForcedClose` is a `TokenMask` that allows one token after
another of a way already found, for rows whose every token is sampled because its log-probability was requested.
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
from loraplex.engine.scheduling.stop_conditions import finish_reason
from loraplex.engine.token_mask import TokenMask


class ForcedClose:
    """`end_token` is allowed after the path, for a path that is empty: something has to be sampled."""

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
        """False for an empty path at its start, where the end token is yet to come."""
        return self.is_complete() and self._position > 0

    def forced_tokens(self) -> abc.Sequence[int]:
        return ()

    def closing_tokens(self, most: int) -> abc.Sequence[int] | None:
        return None

    def _next(self) -> int | None:
        return self._end_token if self.is_complete() else self._path[self._position]


MAX_GROWTH = 64
"""Tokens by which one token is taken to lengthen the shortest way to the end, at most: it may open an object with many
required fields. It spaces out the looks for that way: with r tokens left and a way of w, the next look is due
(r - w) / (MAX_GROWTH + 1) tokens on; some 250 looks for an answer of 1,000 tokens."""

QUICK_S = 0.001
MAX_SECONDS = (0.05, 0.001)
"""Processor time that one row's grammar may take of the step thread, where everybody waits for it: once, and for each
token of the answer besides. A token usually takes 10 us. No step within `QUICK_S` fails a row."""
MAX_SECONDS_CLOSING = 1.0
"""The same for all looks for a way to the end, 1 to 3 ms each as a rule. After it none is looked for."""


def advance_grammar(
    sequence: Sequence, mask: TokenMask, token_id: int, end_token_ids: frozenset[int], max_model_len: int
) -> FinishReason | None:
    """Append the sampled token and what must follow it to `sequence.token_ids`; why the row ends with them, or None.

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
        if is_end:
            return "stop"
        reason = finish_reason(self._sequence, self._end_token_ids, self._max_model_len)
        return "stop" if reason != "stop" and self._mask.is_final() else reason

    def _keep_closable(self, reason: FinishReason | None) -> FinishReason | None:
        """Make sure that the document can still be closed, by taking the new tokens back if need be."""
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
        # No way was known before either: go on, and look again when half of the rest is used up.
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
