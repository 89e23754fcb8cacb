"""`Sampler`: logits -> one token per row, each row by its own parameters.

Invariant: a row's token is a function of its logits, parameters, history, seed, choice and position alone: not of
the batch, the slot or the step. A row that needs an operation pays for it, the others do not.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from loraplex.engine.categorical import draw, row_maxima
from loraplex.engine.kernels.bitmask import apply_bitmask
from loraplex.engine.logit_constraints import (
    apply_bias,
    apply_minimum_length,
    is_below_minimum,
)
from loraplex.engine.logprobs import raw_logprobs
from loraplex.engine.messages import TokenLogprob
from loraplex.engine.penalties import TokenHistories, apply_penalties, has_penalty
from loraplex.engine.plan import SampledToken
from loraplex.engine.random_numbers import uniform
from loraplex.engine.sequence import Sequence
from loraplex.engine.truncation import Truncation, truncate

LOWEST_TEMPERATURE = 1e-5
"""Below it sampling is greedy: the quotient would leave float32."""

_NOT_FINITE = -1
_NOTHING_ALLOWED = -2


class Sampler:
    """Samples where the logits are. `eos_token_ids` are the model's own endings, held off by `min_tokens`."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        max_histories: int = 4096,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._histories = TokenHistories(max_histories)

    def forget(self, sequence: Sequence) -> None:
        """Drop what was remembered of a sequence that left. Forgetting a live one only costs time."""
        self._histories.forget(sequence)

    def sample(
        self, logits: Tensor, sequences: list[Sequence], bitmask: Tensor | None = None
    ) -> list[SampledToken]:
        """One token per row of `logits` [rows, vocab], any float type, left unchanged.

        `bitmask` int32 [masked, ceil(vocab / 32)], bit set = allowed, has one row for each sequence with a `token_mask`.
        A row whose logits hold NaN or +inf, or only -inf, comes back with `finite` false and `token_id` -1;
        so does one whose constraints leave no token, with `nothing_allowed` true. Raises `ValueError` on a wrong shape.
        """
        self._check(logits, sequences, bitmask)
        if not sequences:
            return []
        maxima, tokens = row_maxima(logits)
        rows = [row for row, sequence in enumerate(sequences) if _is_special(sequence)]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            work = logits.index_select(0, index).to(torch.float32)
            tokens[index] = self._process(work, [sequences[row] for row in rows], bitmask)
        ids: list[int] = torch.where(maxima.isfinite(), tokens, _NOT_FINITE).tolist()
        logprobs = _logprobs(logits, ids, sequences)
        return [_sampled(token, logprobs.get(row)) for row, token in enumerate(ids)]

    def _check(self, logits: Tensor, sequences: list[Sequence], bitmask: Tensor | None) -> None:
        if logits.shape != (len(sequences), self._vocab_size):
            raise ValueError(
                f"logits are {list(logits.shape)}, expected [{len(sequences)}, {self._vocab_size}]"
            )
        masked = sum(sequence.token_mask is not None for sequence in sequences)
        if masked and bitmask is None:
            raise ValueError(f"{masked} sequences have a grammar, and there is no bitmask")
        if bitmask is not None and bitmask.shape != (masked, (self._vocab_size + 31) // 32):
            raise ValueError(f"bitmask is {list(bitmask.shape)}, expected {masked} rows of 32-bit words")

    def _process(self, logits: Tensor, sequences: list[Sequence], bitmask: Tensor | None) -> Tensor:
        """Token ids [rows] of `logits` float32, which is consumed."""
        constrained = self._constrain(logits, sequences, bitmask)
        maxima, tokens = row_maxima(logits)
        random = [row for row, sequence in enumerate(sequences) if _is_random(sequence)]
        if len(random) == len(sequences):
            tokens = _draw(logits, maxima, sequences)
        elif random:
            index = torch.tensor(random, device=logits.device)
            tokens[index] = _draw(logits[index], maxima[index], [sequences[row] for row in random])
        if constrained:
            tokens = torch.where(maxima.isfinite(), tokens, _NOT_FINITE)
            tokens = torch.where(maxima == -torch.inf, _NOTHING_ALLOWED, tokens)
        return tokens

    def _constrain(self, logits: Tensor, sequences: list[Sequence], bitmask: Tensor | None) -> bool:
        """Edit `logits` in place; True if any row was."""
        params = [sequence.request.sampling for sequence in sequences]
        masked = [i for i, sequence in enumerate(sequences) if sequence.token_mask is not None]
        biased = [i for i, sampling in enumerate(params) if sampling.logit_bias]
        penalised = [i for i, sampling in enumerate(params) if has_penalty(sampling)]
        short = [i for i, sequence in enumerate(sequences) if is_below_minimum(sequence)]
        if masked and bitmask is not None:
            apply_bitmask(logits, torch.tensor(masked, device=logits.device), bitmask)
        if biased:
            apply_bias(logits, biased, [params[i].logit_bias for i in biased])
        if penalised:
            apply_penalties(logits, penalised, [sequences[i] for i in penalised], self._histories)
        if short:
            apply_minimum_length(logits, short, [sequences[i] for i in short], self._eos_token_ids)
        return bool(masked or biased or penalised or short)


def _is_random(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature >= LOWEST_TEMPERATURE


def _is_special(sequence: Sequence) -> bool:
    """True if the row is more than an argmax of its raw logits."""
    sampling = sequence.request.sampling
    return (
        sampling.temperature >= LOWEST_TEMPERATURE
        or sequence.token_mask is not None
        or bool(sampling.logit_bias)
        or has_penalty(sampling)
        or is_below_minimum(sequence)
    )


def _draw(logits: Tensor, maxima: Tensor, sequences: list[Sequence]) -> Tensor:
    """Random token ids [rows]; `logits` float32 [rows, vocab] is consumed."""
    params = [sequence.request.sampling for sequence in sequences]
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device).unsqueeze(-1)
    numbers = [uniform(s.seed, s.choice, s.num_output_tokens) for s in sequences]
    uniforms = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    weights = logits.sub_(maxima.unsqueeze(-1)).div_(temperatures).exp_()
    return draw(truncate(weights, [Truncation(p.top_k, p.top_p, p.min_p) for p in params]), uniforms)


def _logprobs(logits: Tensor, ids: list[int], sequences: list[Sequence]) -> dict[int, TokenLogprob]:
    """Log-probabilities by row, for the rows that ask and have a token."""
    wanted = {row: sequence.request.sampling.logprobs for row, sequence in enumerate(sequences)}
    asked = {row: count for row, count in wanted.items() if count is not None and ids[row] >= 0}
    if not asked:
        return {}
    rows = list(asked)
    return dict(
        zip(rows, raw_logprobs(logits, rows, [ids[row] for row in rows], list(asked.values())), strict=True)
    )


def _sampled(token: int, logprob: TokenLogprob | None) -> SampledToken:
    if token >= 0:
        return SampledToken(token, logprob)
    return SampledToken(-1, finite=False, nothing_allowed=token == _NOTHING_ALLOWED)
