"""Sampling parameters of a request. Their bounds are enforced by the gateway's parameter table and again here."""

from collections.abc import Sequence

import msgspec

from loraplex.engine.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SCORED_TOKENS = 1 << 20
"""Given tokens that one request may score."""
SCORE_SLICE_BYTES = 64 << 20
"""Of the float32 logits of scored positions that exist at once on a GPU."""
CPU_SCORE_SLICE_BYTES = 24 << 20
"""The same on a CPU. glibc returns a freed block above 32 MB to the system, and fresh pages cost as much as the log-softmax."""
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
MAX_TOP_K = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request. `max_tokens` 0: it only scores, and writes nothing.

    `top_k` 0 means off. `logprobs` None means none, k means the chosen token's and the k best (0-20). `seed` None draws a
    seed at submission; the stream of random numbers is a function of (seed, choice, position). `stops_behind`: stop strings
    count behind a thought, which is between these two texts; of one that the prompt has begun, the first is empty.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stops_behind: tuple[str, str] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None

    def validate(self, vocab_size: int, *, scores: bool = False) -> None:
        """Raise `InvalidRequest` naming the first field out of bounds. `scores`: whether the request scores tokens."""
        require(scores or 1 <= self.max_tokens, "max_tokens", "must be at least 1")
        require(0 <= self.max_tokens, "max_tokens", "must be at least 0")
        require(1 <= self.n <= MAX_CHOICES, "n", "must lie in 1..{}", MAX_CHOICES)
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        require(self.top_p > 0.0, "top_p", "must be above 0")
        require(0 <= self.top_k <= MAX_TOP_K, "top_k", "must lie in 0..{}; 0 turns it off", MAX_TOP_K)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must lie in 0..max_tokens")
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", "holds at most {} strings", MAX_STOP_STRINGS)
        require(all(self.stop), "stop", "must not hold an empty string")
        require_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", "holds at most {} entries", MAX_LOGIT_BIAS
        )
        require_token_ids("logit_bias", tuple(self.logit_bias), vocab_size)
        for bias in self.logit_bias.values():
            _in_range("logit_bias", bias, -100.0, 100.0)
        if self.logprobs is not None:
            require(0 <= self.logprobs <= MAX_TOP_LOGPROBS, "logprobs", "must lie in 0..{}", MAX_TOP_LOGPROBS)


def require(condition: bool, field: str, message: str, *bounds: float) -> None:
    """Raise `InvalidRequest` unless a condition holds. Only then is the message formatted: every request passes here."""
    if not condition:
        raise InvalidRequest(field, f"`{field}` {message.format(*bounds)}")


def _in_range(field: str, value: float, low: float, high: float) -> None:
    # A number that is not finite is in no range.
    require(low <= value <= high, field, "must lie in {}..{}", low, high)


def require_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise `InvalidRequest` for an id that is not in the vocabulary."""
    if ids:
        in_vocabulary = min(ids) >= 0 and max(ids) < vocab_size
        require(in_vocabulary, field, "must hold token ids in 0..{}", vocab_size - 1)
