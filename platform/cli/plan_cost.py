"""The cost per million tokens of `loraplex plan`: the price of an hour over a measured throughput.

Invariant: amounts are integers of micro-units; a price with more than six decimals is refused, not rounded.
"""

import json
import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from loraplex.platform.startup_errors import SettingsError
from loraplex.tenants.ledger.serving_cost import cost_per_million

MAX_PRICE_MICRO = 10**12
MAX_TOKENS_PER_SECOND = 1e9
MICRO = 1_000_000
"""Microseconds of a second, and micro-units of money."""
BENCHMARK = "serve"


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens, of prompts and responses together, that took `microseconds`. `output_tokens` None: unknown."""

    tokens: int
    microseconds: int
    output_tokens: int | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens * MICRO / self.microseconds


def cost_document(price_per_hour: str, currency: str, throughput: Throughput) -> dict[str, Any]:
    """The cost as a document. Raises `SettingsError` when the price is none."""
    price = parse_price(price_per_hour)
    output = throughput.output_tokens
    return {
        "currency": currency,
        "price_per_hour_micro": price,
        "tokens_per_second": round(throughput.tokens_per_second, 3),
        "cost_per_million_tokens_micro": cost_per_million(price, throughput.tokens, throughput.microseconds),
        "cost_per_million_output_tokens_micro": (
            cost_per_million(price, output, throughput.microseconds) if output else None
        ),
    }


def cost_lines(document: dict[str, Any]) -> list[str]:
    """The cost for people."""
    currency, rate = document["currency"], f"{document['tokens_per_second']:,g} tokens per second"
    per_token = _amount(document["cost_per_million_tokens_micro"])
    per_hour = _amount(document["price_per_hour_micro"])
    lines = [f"{per_hour} {currency} per hour at {rate}: {per_token} {currency} per million tokens"]
    per_output = document["cost_per_million_output_tokens_micro"]
    if per_output is not None:
        lines.append(f"all of it charged to responses: {_amount(per_output)} {currency} per million tokens")
    return lines


def parse_price(text: str) -> int:
    """Micro-units of a price such as `2.49`. Raises `SettingsError`."""
    try:
        micro = Decimal(text) * MICRO
    except InvalidOperation:
        micro = Decimal(0)
    if not micro.is_finite() or micro != int(micro) or not 0 < micro <= MAX_PRICE_MICRO:
        raise SettingsError(f"--price-per-hour: {text!r}; allowed is a price above 0 with up to six decimals")
    return int(micro)


def measured(tokens_per_second: float | None, result: Path | None) -> Throughput:
    """The throughput of a result file of `loraplex bench serve`, or a given one. Raises `SettingsError`."""
    if result is not None and tokens_per_second is None:
        return _read(result)
    if result is not None or tokens_per_second is None:
        raise SettingsError(
            "--price-per-hour: needs a measured throughput: --bench-result FILE or --tokens-per-second N"
        )
    if not 0 < tokens_per_second <= MAX_TOKENS_PER_SECOND:
        raise SettingsError(
            f"--tokens-per-second: {tokens_per_second:g}; allowed is a number above 0 and at most {MAX_TOKENS_PER_SECOND:g}"
        )
    # So many tokens in a thousand seconds: three decimals of a rate.
    return Throughput(max(round(tokens_per_second * 1000), 1), 1000 * MICRO)


def _read(path: Path) -> Throughput:
    """The newest case of the file. Raises `SettingsError`."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        figures = [line["figure"] for line in lines if line["benchmark"] == BENCHMARK]
        newest = [each for each in figures if "total_output_tokens" in each][-1]
        prompt, output, seconds = (
            newest[name] for name in ("total_input_tokens", "total_output_tokens", "duration")
        )
        microseconds = math.ceil(seconds * MICRO)
        throughput = Throughput(int(prompt) + int(output), microseconds, int(output))
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise SettingsError(f"--bench-result: {path} has no result of `bench serve`: {error!r}") from None
    if throughput.tokens < 1 or throughput.microseconds < 1:
        raise SettingsError(f"--bench-result: {path}: the run completed no tokens")
    return throughput


def _amount(micro: int) -> str:
    """At least two decimals, and as many more as are needed."""
    whole, rest = divmod(micro, MICRO)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{whole:,}.{decimals}"
