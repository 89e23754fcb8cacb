"""Sampling parameters of a batch as tensors, and its counter-based random numbers (Salmon et al. 2011, Parallel random
numbers).

Invariant: a value that depends on a sequence's newest token is computed for every step. A random number is a pure function
of (seed, choice, position): a row draws the same one alone, in any batch, in any slot and after a preemption.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.sampling.logit_bias import bias_tensors, ending_tensors, is_below_minimum
from loraplex.engine.sampling.penalties import TokenHistories, has_penalty, penalty_tensors
from loraplex.engine.sampling.truncation import Truncation, Truncations

_MANTISSA_BITS = 53


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits. `position` counts the output tokens before the one to draw."""
    digest = hashlib.blake2b(b"%d:%d:%d" % (seed, choice, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS


LOWEST_TEMPERATURE = 1e-5
"""Below this temperature sampling is greedy: the quotient would leave float32."""


class SampledRows:
    """The sampling parameters of rows. `special` rows need more than an argmax; the other indices count within the special
    rows.

    After `stage` every tensor is on the device. `with_logprobs` are the rows that want log-probabilities.
    """

    def __init__(self, sequences: list[Sequence], vocab_size: int) -> None:
        self.sequences = list(sequences)
        special = [row for row, sequence in enumerate(sequences) if _is_special(sequence)]
        chosen = [sequences[row] for row in special]
        params = [sequence.request.sampling for sequence in chosen]
        self._vocab_size = vocab_size
        self._penalised = [(i, s) for i, s in enumerate(chosen) if has_penalty(s.request.sampling)]
        self._short = [(i, s) for i, s in enumerate(chosen) if is_below_minimum(s)]
        self._random = [s for s in chosen if _is_random(s)]
        self._has_mask = [sequence.token_mask is not None for sequence in sequences]
        random = [i for i, sequence in enumerate(chosen) if _is_random(sequence)]
        masked = [i for i, sequence in enumerate(chosen) if sequence.token_mask is not None]
        biased = [i for i, sampling in enumerate(params) if sampling.logit_bias]
        with_logprobs = [i for i, s in enumerate(sequences) if s.request.sampling.logprobs is not None]
        self.num_special = len(special)
        self.num_random = len(random)
        self.num_masked = len(masked)
        self.num_with_logprobs = len(with_logprobs)
        self.logprob_counts = {row: sequences[row].request.sampling.logprobs or 0 for row in with_logprobs}
        self.is_constrained = bool(masked or biased or self._penalised or self._short)
        drawn = [sampling for sampling in params if sampling.temperature >= LOWEST_TEMPERATURE]
        self.truncations = Truncations.of([Truncation(p.top_k, p.top_p, p.min_p) for p in drawn])
        self._fixed: dict[str, Tensor] = {
            "special": _indices(special),
            "random": _indices(random),
            "masked": _indices(masked),
            "with_logprobs": _indices(with_logprobs),
            "temperatures": torch.tensor([p.temperature for p in drawn]).unsqueeze(-1),
        }
        if biased:
            bias = bias_tensors(biased, [params[i].logit_bias for i in biased], vocab_size)
            self._fixed |= {"bias index": bias[0], "bias": bias[1]}
        self._is_staged = False
        self._on_device: dict[str, Tensor] = {}

    def is_of(self, sequences: list[Sequence]) -> bool:
        """Whether these are the rows, and nothing about them has changed except their newest tokens."""
        if self._short or self.sequences != sequences:
            return False
        return [sequence.token_mask is not None for sequence in sequences] == self._has_mask

    def stage(
        self, transfers: HostTransfers, histories: TokenHistories, eos_token_ids: frozenset[int]
    ) -> None:
        """Copy everything that is not on the device yet, in one transfer."""
        fresh = self._changing(histories, eos_token_ids)
        if not self._is_staged:
            fresh |= self._fixed | {f"truncation {i}": t for i, t in enumerate(self.truncations.tensors)}
        staged = dict(zip(fresh, transfers.stage(list(fresh.values())), strict=True)) if fresh else {}
        self._on_device |= staged
        if not self._is_staged:
            places = range(len(self.truncations.tensors))
            self.truncations = self.truncations.at(tuple(staged[f"truncation {i}"] for i in places))
        self._is_staged = True

    def __getitem__(self, name: str) -> Tensor:
        return self._on_device[name]

    def __contains__(self, name: str) -> bool:
        return name in self._on_device

    def _changing(self, histories: TokenHistories, eos_token_ids: frozenset[int]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        if self._random:
            numbers = [uniform(s.seed, s.choice, s.num_output_tokens) for s in self._random]
            tensors["uniforms"] = torch.tensor(numbers, dtype=torch.float64)
        if self._penalised:
            rows, sequences = _unzipped(self._penalised)
            index, factors = penalty_tensors(rows, sequences, histories, self._vocab_size)
            tensors |= {"penalised": index, "penalties": factors}
        if self._short:
            rows, sequences = _unzipped(self._short)
            short, where, tokens = ending_tensors(rows, sequences, eos_token_ids)
            tensors |= {"short": short, "ending rows": where, "ending tokens": tokens}
        return tensors


def _indices(rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def _unzipped(pairs: Iterable[tuple[int, Sequence]]) -> tuple[list[int], list[Sequence]]:
    return [row for row, _ in pairs], [sequence for _, sequence in pairs]


def _is_random(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature >= LOWEST_TEMPERATURE


def _is_special(sequence: Sequence) -> bool:
    """True if the row needs more than an argmax of its raw logits."""
    sampling = sequence.request.sampling
    return (
        sampling.temperature >= LOWEST_TEMPERATURE
        or sequence.token_mask is not None
        or bool(sampling.logit_bias)
        or has_penalty(sampling)
        or is_below_minimum(sequence)
    )
