"""An invoice as CSV, and as HTML that prints. Invariant: no text on it becomes a formula or markup, and the page has no script."""

import base64
import csv
import hashlib
import io
from datetime import timedelta
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loraplex.platform.web.console.formatting import count
from loraplex.platform.web.responses import csv_text
from loraplex.tenants.invoices.currencies import decimal_text
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.records import PAYMENT_DAYS, InvoiceDocument

LINE_COLUMNS: Final = (
    *("kind", "month", "adapter", "adapter_id", "token_class", "price_version_id", "price", "tokens"),
    *("amount_pico", "amount_micro", "rounding_pico", "billed_tokens", "billed_pico"),
)
SUMS: Final = {
    "subtotal": "subtotal_micro",
    "credits": "credits",
    "tax": "tax",
    "rounding": "rounding_micro",
    "total": "total_micro",
}
"""Rows of the CSV below the lines, and the fields of the document that have their amounts."""
PPM_PERCENT_DIGITS: Final = 4
STYLE: Final = (
    "body{font:14px/1.4 sans-serif;margin:2em auto;padding:0 1em;max-width:60em}.text{white-space:pre-line}"
    "header,.facts{display:flex;flex-wrap:wrap;justify-content:space-between;gap:1em 3em}p,h1,h2,dl,dd{margin:0}"
    "h2{font-size:1em}.facts{margin:2em 0}dl{display:grid;grid-template-columns:auto auto;gap:0 1.5em}dt{color:#555}"
    "table{border-collapse:collapse;width:100%;margin-bottom:1em}th,td{border-bottom:1px solid #ccc;padding:.4em .5em;"
    "text-align:left;vertical-align:top}.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
    ".id{font-size:.8em;overflow-wrap:anywhere}tr{break-inside:avoid}tfoot{display:table-row-group}.total td{font-weight:bold}"
    ".lines{overflow-x:auto;margin-bottom:1em}.lines table{min-width:42em;margin:0}"
    "@page{margin:18mm}@media print{.lines{overflow:visible}body{margin:0;padding:0;max-width:none;font-size:10px}}"
)
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'"
)
_TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
)
_TEMPLATES.filters.update(micro=lambda amount: decimal_text(amount, 6), count=count)


def invoice_csv(invoice: InvoiceDocument) -> str:
    """Write an invoice as RFC 4180: its lines, then its sums, each with number and currency."""
    of_all = {"invoice_id": invoice.id, "number": invoice.number, "currency": invoice.currency}
    text = io.StringIO()
    writer = csv.DictWriter(text, (*of_all, *LINE_COLUMNS), restval="")
    writer.writeheader()
    for line in invoice.lines:
        writer.writerow({name: csv_text(value) for name, value in {**of_all, **dict(line)}.items()})
    for kind, name in SUMS.items():
        amount = getattr(invoice, name)
        writer.writerow({**of_all, "kind": kind, "month": invoice.month, "amount_micro": amount})
    return text.getvalue()


def invoice_html(invoice: InvoiceDocument) -> str:
    """Render an invoice as one page without script and without links. Send it with `CONTENT_SECURITY_POLICY`."""
    month = Month.parse(invoice.month)
    date = invoice.finalized_at.date() if invoice.finalized_at else None
    rate = decimal_text(invoice.tax_rate_ppm, PPM_PERCENT_DIGITS, scale=PPM_PERCENT_DIGITS)
    return _TEMPLATES.get_template("document.html").render(
        invoice=invoice,
        title="Draft invoice" if invoice.number is None else f"Invoice {invoice.number}",
        style=STYLE,
        period=f"{month.begin.date()} to {month.end.date() - timedelta(days=1)}",
        due=date and date + timedelta(days=PAYMENT_DAYS),
        payment_days=PAYMENT_DAYS,
        tax_rate=rate.rstrip("0").rstrip("."),
    )
