"""Recomputes an exported invoice from its rows, offline. Invariant: it reads the export and nothing else, and uses the arithmetic
of `lines` and `totals`, as the server does.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar
from uuid import UUID

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.tenant_billing import TERMS
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.invoices.content import balance_of
from loraplex.tenants.invoices.document import line_document, totals_document
from loraplex.tenants.invoices.export import (
    BILLED,
    COLUMNS,
    CREDITS,
    DIGESTS,
    FORMAT,
    INVOICE,
    PRICES,
    USAGE,
    PricePeriod,
    UsageRow,
    digest_lines,
)
from loraplex.tenants.invoices.lines import (
    CORRECTION,
    TOKEN_CLASSES,
    Charge,
    LineKey,
    UsageSum,
    billed_micro,
    charges_of,
    outstanding_lines,
)
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.totals import InvoiceTerms, total_invoice

_Read = TypeVar("_Read")
MAX_DIFFERENCES: Final = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the export differs from what was computed; None: that side has nothing there."""

    place: str
    exported: str | None
    computed: str | None

    def __str__(self) -> str:
        return f"{self.place}: exported {self.exported}, computed {self.computed}, first at character {self.position}"

    @property
    def position(self) -> int:
        """The first character that differs, counted from 1."""
        pairs = zip_longest(self.exported or "", self.computed or "")
        return next((number for number, (one, other) in enumerate(pairs, 1) if one != other), 1)


class Mismatch(Exception):
    """The first difference; what follows from it is not computed."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


def verify_export(folder: Path) -> list[Difference]:
    """Return the first difference of the recomputed bill, then the lines that changed since the export; empty: all agrees.

    At most `MAX_DIFFERENCES` are returned. Raises `OSError` for a folder that is no export.
    """
    differences = []
    try:
        _recompute(folder)
    except Mismatch as mismatch:
        differences.append(mismatch.difference)
    changed = _changed_lines(folder)
    return [*differences, *(each for each, _ in zip(changed, range(MAX_DIFFERENCES), strict=False))]


def _recompute(folder: Path) -> None:
    """Raises `Mismatch`."""
    invoice = _json(folder, INVOICE, dict)
    periods = dict(_items(folder, PRICES, _price_period))
    billed = dict(_items(folder, BILLED, _billed))
    for key in billed:
        _require_price(f"{BILLED} {key.month}", key.price_version_id, periods)
    credits = _items(folder, CREDITS, balance_of)
    month, terms = _read(INVOICE, invoice, _terms)
    prices = {identity: period.price for identity, period in periods.items()}
    charges = _charges(folder, _columns(invoice), periods, prices)
    lines = outstanding_lines(month, charges, billed, prices)
    totals = total_invoice(month, lines, credits, terms, billed_micro(month, billed))
    adapters = _read(INVOICE, invoice, _adapters)
    records = [
        line_document(line, adapters.get(None if line.adapter_id is None else str(line.adapter_id)))
        for line in totals.lines
    ]
    documents = [each.model_dump(mode="json") for each in records]
    computed = {
        "format": 1 if invoice.get("format") == 1 else FORMAT,
        "lines": documents,
        **totals_document(totals, terms.currency),
    }
    _compare(INVOICE, {name: invoice.get(name) for name in computed}, computed)


def _columns(invoice: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of the rows: an export of the first format has none of reasoning tokens."""
    return tuple(name for name in COLUMNS if name != "reasoning_tokens" or invoice.get("format") != 1)


def _charges(
    folder: Path,
    columns: tuple[str, ...],
    periods: Mapping[UUID, PricePeriod],
    prices: Mapping[UUID, Price],
) -> dict[LineKey, Charge]:
    """Add up the rows; each is checked by itself."""
    sums: dict[tuple[Month, UUID | None, UUID | None], list[int]] = {}
    for place, row in _rows(folder, columns):
        _check_row(place, row, periods)
        key = Month.of(row.admitted_at), row.adapter_id, row.price_version_id
        total = sums.setdefault(key, [0] * len(COLUMNS[5:]))
        for index, name in enumerate(COLUMNS[5:]):
            total[index] += getattr(row, name)
    return charges_of((UsageSum.of(*key, *total) for key, total in sums.items()), prices)


def _check_row(place: str, row: UsageRow, periods: Mapping[UUID, PricePeriod]) -> None:
    """Check that usage has the price in force when it was admitted, and the amount of its tokens."""
    period = _require_price(place, row.price_version_id, periods)
    if period is None or row.kind != "usage":
        return
    if row.admitted_at < period.since or (period.until is not None and row.admitted_at >= period.until):
        bounds = f"{period.since.isoformat()} to {period.until and period.until.isoformat()}"
        raise Mismatch(Difference(f"{place} admitted_at", row.admitted_at.isoformat(), bounds))
    prompt = row.uncached_tokens + row.cached_tokens
    amount = period.price.amount_pico(prompt, row.cached_tokens, row.completion_tokens, row.reasoning_tokens)
    if amount != row.amount_pico:
        raise Mismatch(Difference(f"{place} amount_pico", str(row.amount_pico), str(amount)))


def _require_price(
    place: str, version: UUID | None, periods: Mapping[UUID, PricePeriod]
) -> PricePeriod | None:
    """Return the period of a price version; None for usage from before rate cards. Raises `Mismatch` for an unknown one."""
    if version is not None and version not in periods:
        raise Mismatch(Difference(f"{place} price_version_id", str(version), None))
    return None if version is None else periods[version]


def _rows(folder: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, UsageRow]]:
    with (folder / USAGE).open(newline="", errors="replace") as file:
        reader = csv.reader(file)
        try:
            _compare(f"{USAGE}:1", next(reader, []), list(columns))
            for cells in reader:
                place = f"{USAGE}:{reader.line_num}"
                yield place, _read(place, cells, partial(_usage_row, columns))
        except csv.Error as error:
            _refuse(f"{USAGE}:{reader.line_num}", error)


def _changed_lines(folder: Path) -> Iterator[Difference]:
    """Yield the lines whose digest is another than at the export."""
    files = (INVOICE, PRICES, BILLED, CREDITS, USAGE)
    present = (line for name in files for line in digest_lines(folder, name))
    with (folder / DIGESTS).open(errors="replace") as file:
        for exported, computed in zip_longest(map(str.rstrip, file), present):
            if exported != computed:
                place = (computed or exported or "").rpartition(" ")[2]
                yield Difference(f"{place} (digest)", exported, computed)


def _compare(place: str, exported: Any, computed: Any) -> None:
    """Raises `Mismatch` for the first difference of two JSON values, in the order of `computed`."""
    if isinstance(computed, dict) and isinstance(exported, dict):
        for name in computed.keys() | exported.keys():
            if name not in computed or name not in exported:
                sides = _shown(exported.get(name)), _shown(computed.get(name))
                raise Mismatch(Difference(f"{place} {name}", *sides))
        for name, value in computed.items():
            _compare(f"{place} {name}", exported[name], value)
    elif isinstance(computed, list) and isinstance(exported, list):
        for number, (one, other) in enumerate(zip_longest(exported, computed)):
            _compare(f"{place}[{number}]", one, other)
    elif type(exported) is not type(computed) or exported != computed:
        raise Mismatch(Difference(place, _shown(exported), _shown(computed)))


def _shown(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)


def _json(folder: Path, name: str, kind: type[_Read]) -> _Read:
    try:
        document = json.loads((folder / name).read_text())
    except (ValueError, RecursionError) as error:
        _refuse(name, error)
    if not isinstance(document, kind):
        _refuse(name, TypeError(f"no {kind.__name__}"))
    return document


def _items(folder: Path, name: str, read: Callable[[Any], _Read]) -> list[_Read]:
    documents = enumerate(_json(folder, name, list))
    return [_read(f"{name}[{number}]", each, read) for number, each in documents]


def _read(place: str, value: Any, read: Callable[[Any], _Read]) -> _Read:
    try:
        return read(value)
    except (KeyError, TypeError, ValueError, TenantsError) as error:
        _refuse(place, error)


def _refuse(place: str, error: Exception) -> NoReturn:
    raise Mismatch(Difference(place, f"unreadable ({error})", None)) from error


def _price_period(document: Any) -> tuple[UUID, PricePeriod]:
    names = [
        name
        for name in ("prompt", "cached_prompt", "completion", "reasoning")
        if document.get(name) is not None
    ]
    price = Price(**{name: _integer(document[name]) for name in names})
    until = document["effective_to"]
    since = datetime.fromisoformat(document["effective_from"])
    period = PricePeriod(price, since, None if until is None else datetime.fromisoformat(until))
    return UUID(document["id"]), period


def _billed(document: Any) -> tuple[LineKey, Charge]:
    adapter_id, version = document["adapter_id"], document["price_version_id"]
    if document["token_class"] not in (*TOKEN_CLASSES, CORRECTION):
        raise ValueError(f"no token class {document['token_class']!r}")
    key = LineKey(
        Month.parse(document["month"]),
        None if adapter_id is None else UUID(adapter_id),
        None if version is None else UUID(version),
        document["token_class"],
    )
    return key, Charge(_integer(document["tokens"]), int(document["amount_pico"]))


def _terms(document: Any) -> tuple[Month, InvoiceTerms]:
    terms = InvoiceTerms(currency=document["currency"], **{name: document[name] for name in TERMS})
    _integer(terms.tax_rate_ppm), _integer(terms.minimum_micro)
    return Month.parse(document["month"]), terms


def _adapters(document: Any) -> dict[str | None, str | None]:
    """Return the names that the lines have for their adapters: they follow from nothing else in the export."""
    return {each["adapter_id"]: each["adapter"] for each in document["lines"]}


def _usage_row(columns: tuple[str, ...], cells: list[str]) -> UsageRow:
    if len(cells) != len(columns):
        raise ValueError(f"{len(cells)} columns in place of {len(columns)}")
    identity, kind, admitted_at, adapter_id, version, *numbers = cells
    return UsageRow(
        id=UUID(identity),
        kind=kind,
        admitted_at=datetime.fromisoformat(admitted_at),
        adapter_id=UUID(adapter_id) if adapter_id else None,
        price_version_id=UUID(version) if version else None,
        **dict(zip(columns[5:], map(int, numbers), strict=True)),
    )


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value
