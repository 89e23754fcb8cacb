"""`Sampler`: logits -> one token per row, each row by its own parameters.

Invariant: a row's token is a function of its logits, parameters, history, seed, choice and position alone, not of the
batch, the slot or the step. A row that needs an operation pays for it, the others do not. Only `PendingTokens.collect`
waits for the device, once per step.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from loraplex.engine.batch.host_transfers import HostTransfers, Results
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import SampledToken
from loraplex.engine.kernels.bitmask import apply_bitmask
from loraplex.engine.messages import TokenLogprob
from loraplex.engine.sampling.categorical import draw, row_maxima
from loraplex.engine.sampling.logit_bias import apply_bias, apply_minimum_length
from loraplex.engine.sampling.logprobs import raw_logprobs, token_logprobs
from loraplex.engine.sampling.penalties import TokenHistories, apply_penalties
from loraplex.engine.sampling.sampling_batch import SampledRows
from loraplex.engine.sampling.step_logits import NOT_FINITE, greedy_tokens
from loraplex.engine.sampling.truncation import truncate

_NOTHING_ALLOWED = -2


class PendingTokens:
    """One step's tokens being copied to the host. `token_ids` int64 [rows] are on the device; negative: none."""

    def __init__(self, token_ids: Tensor, results: Results, logprob_counts: dict[int, int]) -> None:
        self.token_ids = token_ids
        self._results = results
        self._logprob_counts = logprob_counts

    def collect(self) -> list[SampledToken]:
        """Wait for the device and return the tokens."""
        token_ids, *logprobs = self._results.wait()
        ids: list[int] = token_ids.tolist()
        logprobs_by_row = self._logprobs(ids, logprobs) if logprobs else {}
        return [_sampled(token, logprobs_by_row.get(row)) for row, token in enumerate(ids)]

    def _logprobs(self, ids: list[int], logprobs: list[Tensor]) -> dict[int, TokenLogprob]:
        rows, counts = list(self._logprob_counts), list(self._logprob_counts.values())
        chosen, best_ids, best_values = logprobs
        found = token_logprobs([ids[row] for row in rows], counts, chosen, best_ids, best_values)
        return dict(zip(rows, found, strict=True))


class Sampler:
    """Samples on the device of the logits. `eos_token_ids` are the model's own end tokens, which `min_tokens` forbids at
    first.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        max_histories: int = 4096,
        transfers: HostTransfers | None = None,
    ) -> None:
        """`transfers` None: the logits are on the host."""
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._histories = TokenHistories(max_histories)
        self._transfers = transfers or HostTransfers(torch.device("cpu"))
        self._rows = SampledRows([], vocab_size)

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that left. Forgetting a live one only costs time."""
        self._histories.forget(sequence)

    def sample(
        self, logits: Tensor, sequences: list[Sequence], bitmask: Tensor | None = None
    ) -> list[SampledToken]:
        """Sample one token per row and wait for it. See `start`."""
        return self.start(logits, sequences, bitmask).collect()

    def start(
        self,
        logits: Tensor,
        sequences: list[Sequence],
        bitmask: Tensor | None = None,
        greedy: Tensor | None = None,
    ) -> PendingTokens:
        """Start choosing one token per row of `logits` [rows, vocab], any float type, left unchanged.

        `greedy`: what `greedy_tokens` gives for them, if the step has computed it; the next step may overwrite it.
        `bitmask` int32 [masked, ceil(vocab / 32)], bit set = allowed, has one row for each sequence with a `token_mask`. A
        row whose logits contain NaN or +inf, or only -inf, comes back with `finite` false and `token_id` -1; so does one
        whose constraints leave no token, with `nothing_allowed` true. Raises `ValueError` on a wrong shape.
        """
        self._check(logits, sequences, bitmask)
        if not sequences:
            return PendingTokens(torch.empty(0, dtype=torch.int64), Results([torch.empty(0)], None), {})
        rows = self._rows_of(sequences)
        tokens = greedy_tokens(logits) if greedy is None else greedy.clone()
        if rows.num_special:
            index = rows["special"]
            work = logits.index_select(0, index).to(torch.float32)
            is_finite = tokens[index] != NOT_FINITE
            tokens[index] = torch.where(is_finite, self._process(work, rows, bitmask), NOT_FINITE)
        results = [tokens]
        if rows.num_with_logprobs:
            results += raw_logprobs(logits, rows["with_logprobs"], tokens[rows["with_logprobs"]].clamp_min(0))
        return PendingTokens(tokens, self._transfers.fetch(results), rows.logprob_counts)

    def _rows_of(self, sequences: list[Sequence]) -> SampledRows:
        if not self._rows.is_of(sequences):
            self._rows = SampledRows(sequences, self._vocab_size)
        self._rows.stage(self._transfers, self._histories, self._eos_token_ids)
        return self._rows

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

    def _process(self, logits: Tensor, rows: SampledRows, bitmask: Tensor | None) -> Tensor:
        """Return token ids [special rows] of `logits` float32, which is overwritten."""
        _constrain(logits, rows, bitmask)
        maxima, tokens = row_maxima(logits)
        if rows.num_random == rows.num_special:
            tokens = _draw(logits, maxima, rows)
        elif rows.num_random:
            index = rows["random"]
            tokens[index] = _draw(logits[index], maxima[index], rows)
        if rows.is_constrained:
            tokens = torch.where(maxima.isfinite(), tokens, NOT_FINITE)
            tokens = torch.where(maxima == -torch.inf, _NOTHING_ALLOWED, tokens)
        return tokens


def _constrain(logits: Tensor, rows: SampledRows, bitmask: Tensor | None) -> None:
    """Edit `logits` in place."""
    if rows.num_masked and bitmask is not None:
        apply_bitmask(logits, rows["masked"], bitmask)
    if "bias" in rows:
        apply_bias(logits, rows["bias index"], rows["bias"])
    if "penalties" in rows:
        apply_penalties(logits, rows["penalised"], rows["penalties"])
    if "short" in rows:
        apply_minimum_length(logits, rows["short"], rows["ending rows"], rows["ending tokens"])


def _draw(logits: Tensor, maxima: Tensor, rows: SampledRows) -> Tensor:
    """Draw random token ids [rows]; `logits` float32 [rows, vocab] is overwritten."""
    weights = logits.sub_(maxima.unsqueeze(-1)).div_(rows["temperatures"]).exp_()
    return draw(truncate(weights, rows.truncations), rows["uniforms"])


def _sampled(token: int, logprob: TokenLogprob | None) -> SampledToken:
    if token >= 0:
        return SampledToken(token, logprob)
    return SampledToken(-1, finite=False, nothing_allowed=token == _NOTHING_ALLOWED)
