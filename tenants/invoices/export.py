"""An exported invoice: a folder with all that recomputes it, and nothing else.

`invoice.json`, the invoice; `usage.csv`, the ledger's rows of its months; `price_versions.json`, their prices; `billed.json`, what
earlier invoices billed of them; `credits.json`, what was left of the credits before; `digests.txt`, one digest for each line of
the others. Invariant: every value stands on a line of its own, so that a digest names it.
"""

import csv
import hashlib
import json
from collections.abc import AsyncIterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.invoices.content import balance_document
from loraplex.tenants.invoices.document import invoice_document
from loraplex.tenants.invoices.invoices import InvoiceDetails
from loraplex.tenants.invoices.lines import Charge, LineKey
from loraplex.tenants.rfc3339 import utc_text

FORMAT: Final = 2
"""The first one had no reasoning tokens: neither their column nor their price."""
INVOICE: Final = "invoice.json"
PRICES: Final = "price_versions.json"
BILLED: Final = "billed.json"
CREDITS: Final = "credits.json"
USAGE: Final = "usage.csv"
DIGESTS: Final = "digests.txt"
COLUMNS: Final = (
    *("id", "kind", "admitted_at", "adapter_id", "price_version_id"),
    *("uncached_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "amount_pico"),
)
DIGEST_LENGTH: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """A row of the ledger, as far as a bill depends on it."""

    id: UUID
    kind: str
    admitted_at: datetime
    adapter_id: UUID | None
    price_version_id: UUID | None
    uncached_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    amount_pico: int


@dataclass(frozen=True, slots=True)
class PricePeriod:
    """A price and when it was in force; `until` None: still."""

    price: Price
    since: datetime
    until: datetime | None


async def write_export(
    folder: Path,
    invoice: InvoiceDetails,
    prices: Mapping[UUID, PricePeriod],
    billed: Mapping[LineKey, Charge],
    rows: AsyncIterable[UsageRow],
) -> None:
    """Write an export into a new folder. Raises `FileExistsError`."""
    folder.mkdir()
    _write_json(folder / INVOICE, {"format": FORMAT, **invoice_document(invoice).model_dump(mode="json")})
    _write_json(folder / PRICES, [_price_document(*each) for each in prices.items()])
    _write_json(folder / BILLED, [_billed_document(*each) for each in billed.items()])
    _write_json(folder / CREDITS, [balance_document(each) for each in invoice.content.credits])
    with (folder / USAGE).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        async for row in rows:
            writer.writerow(_cells(row))
    with (folder / DIGESTS).open("w") as digests:
        for name in (INVOICE, PRICES, BILLED, CREDITS, USAGE):
            digests.writelines(f"{line}\n" for line in digest_lines(folder, name))


def digest_lines(folder: Path, name: str) -> Iterator[str]:
    """Yield the digest of each line of a file, with its place."""
    with (folder / name).open("rb") as file:
        for number, line in enumerate(file, 1):
            yield f"{hashlib.sha256(line).hexdigest()[:DIGEST_LENGTH]} {name}:{number}"


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def _cells(row: UsageRow) -> list[Any]:
    values = {name: getattr(row, name) for name in COLUMNS} | {"admitted_at": utc_text(row.admitted_at)}
    return ["" if value is None else value for value in values.values()]


def _price_document(identity: UUID, period: PricePeriod) -> dict[str, Any]:
    return {
        "id": str(identity),
        "prompt": period.price.prompt,
        "cached_prompt": period.price.cached_prompt,
        "completion": period.price.completion,
        "reasoning": period.price.reasoning,
        "effective_from": utc_text(period.since),
        "effective_to": utc_text(period.until),
    }


def _billed_document(key: LineKey, charge: Charge) -> dict[str, Any]:
    return {
        "month": str(key.month),
        "adapter_id": None if key.adapter_id is None else str(key.adapter_id),
        "price_version_id": None if key.price_version_id is None else str(key.price_version_id),
        "token_class": key.token_class,
        "tokens": charge.tokens,
        "amount_pico": str(charge.amount_pico),
    }
