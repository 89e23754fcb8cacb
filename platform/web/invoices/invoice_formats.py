"""An invoice as CSV, and as HTML that prints. Invariant: no text on it becomes a formula or markup, and the page has no script."""

import base64
import csv
import hashlib
import io
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loraplex.platform.web.responses import csv_text
from loraplex.tenants.invoices.currencies import decimal_text
from loraplex.tenants.invoices.records import InvoiceDocument

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
    "body{font:14px/1.4 sans-serif;margin:2em auto;max-width:75em}.text{white-space:pre-line}"
    "table{border-collapse:collapse;width:100%}th,td{border-bottom:1px solid #ccc;padding:.3em;text-align:left}"
    ".n{text-align:right;font-variant-numeric:tabular-nums}dt{float:left;clear:left;width:9em}"
    "tr{break-inside:avoid}@media print{body{margin:0;max-width:none;font-size:9px}}"
)
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'"
)
_TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
)
_TEMPLATES.filters["micro"] = lambda amount: decimal_text(amount, 6)
_TEMPLATES.filters["pico"] = lambda amount: decimal_text(amount, 12, scale=12)


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
    rate = decimal_text(invoice.tax_rate_ppm, PPM_PERCENT_DIGITS, scale=PPM_PERCENT_DIGITS)
    return _TEMPLATES.get_template("document.html").render(
        invoice=invoice,
        title="Draft invoice" if invoice.number is None else f"Invoice {invoice.number}",
        style=STYLE,
        tax_rate=rate.rstrip("0").rstrip("."),
    )
