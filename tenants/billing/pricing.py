"""Prices of tokens. Invariant: amounts are exact integers of pico-units (micro-units per million tokens, times tokens). Only
the counters' amounts are rounded up to nano-units, so that a request never costs more than was reserved for it.
"""

from dataclasses import dataclass, fields
from typing import Final, Self
from uuid import UUID

from loraplex.tenants.errors import InvalidField

# 10,000 units of money per million tokens.
MAX_PRICE = 10_000_000_000
PICO_PER_NANO = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Micro-units of money per 1,000,000 tokens. A cached token costs at most what an uncached one does. `reasoning` None: what a
    completion token costs.

    Raises `InvalidField`.
    """

    prompt: int = 0
    cached_prompt: int = 0
    completion: int = 0
    reasoning: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "cached_prompt", "completion", "reasoning"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_PRICE:
                raise InvalidField(name, f"the price {name} must be between 0 and {MAX_PRICE}")
        if self.cached_prompt > self.prompt:
            raise InvalidField("cached_prompt", "the price cached_prompt must be at most the price prompt")

    @classmethod
    def of(cls, source: object) -> Self:
        """The prices that a row or a form has under the same names."""
        return cls(**{each.name: getattr(source, each.name) for each in fields(cls)})

    @property
    def of_reasoning(self) -> int:
        """The price of a reasoning token."""
        return self.completion if self.reasoning is None else self.reasoning

    @property
    def dearest_completion(self) -> int:
        """The most that a token of a completion may cost, reasoning or not."""
        return max(self.completion, self.of_reasoning)

    def amount_pico(
        self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int = 0
    ) -> int:
        """`prompt_tokens` includes `cached_tokens`, and `completion_tokens` includes `reasoning_tokens`, as usage does; each token
        is charged once.
        """
        prompt = (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * self.cached_prompt
        answer = (completion_tokens - reasoning_tokens) * self.completion
        return prompt + answer + reasoning_tokens * self.of_reasoning

    def bound_nano(self, prompt_tokens: int, completion_tokens: int) -> int:
        """The most that so many tokens can cost, in nano-units: nothing is cached, and completions are of the dearer kind."""
        return amount_nano(prompt_tokens * self.prompt + completion_tokens * self.dearest_completion)

    def completion_tokens_within(self, nano: int, prompt_tokens: int) -> int | None:
        """The most completion tokens for which `bound_nano` is at most `nano`; None for any number. Below zero: not even none."""
        left_pico = nano * PICO_PER_NANO - prompt_tokens * self.prompt
        if self.dearest_completion:
            return left_pico // self.dearest_completion
        return None if left_pico >= 0 else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceVersion:
    """One version of a rate card, which never changes. `currency`: ISO 4217, in capital letters."""

    id: UUID
    currency: str
    price: Price


# What the ledger's reservations have, which are released and never priced. XXX is ISO 4217's code for no currency.
NO_PRICE: Final = PriceVersion(id=UUID(int=0), currency="XXX", price=Price())


def amount_nano(pico: int) -> int:
    """Rounded up."""
    return -(-pico // PICO_PER_NANO)
