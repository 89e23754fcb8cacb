"""An invoice in the formats in which it is sent: JSON, CSV, and a page to print."""

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.cursors import query_parameter, read_query
from loraplex.platform.web.invoices.invoice_formats import (
    CONTENT_SECURITY_POLICY,
    invoice_csv,
    invoice_html,
)
from loraplex.platform.web.responses import ApiResponse, documented, respond
from loraplex.tenants.invoices.records import InvoiceDocument

FORMATS: Final = ("json", "csv", "html")
FORMAT: Final = query_parameter(
    "format",
    "`json`, `csv`, or `html`, a page to print.",
    {"type": "string", "enum": list(FORMATS), "default": "json"},
)
RESPONSES: Final = documented(response=InvoiceDocument)
RESPONSES[200]["content"] = {f"text/{name}": {"schema": {"type": "string"}} for name in ("csv", "html")}
_PRIVATE: Final = {"x-content-type-options": "nosniff", "cache-control": "private, no-store"}


def format_of(request: Request) -> str:
    """Read the query of one invoice. Raises `UnknownParameter`, `InvalidParameter`."""
    given = read_query(request, ("format",)).get("format", "json")
    if given not in FORMATS:
        raise InvalidParameter(f"`format` must be one of {', '.join(FORMATS)}.", param="format")
    return given


def formatted(invoice: InvoiceDocument, name: str) -> Response:
    """Respond with an invoice in a format of `FORMATS`, as the API sends it."""
    if name == "json":
        return respond(ApiResponse(200, invoice))
    return _text(invoice, name, _PRIVATE)


def saved(invoice: InvoiceDocument, name: str) -> Response:
    """Respond with an invoice as a browser saves it; `html` is shown, to be printed."""
    if name == "json":
        return respond(ApiResponse(200, invoice, headers=_as_file(invoice, name)))
    return _text(invoice, name, {})


def _text(invoice: InvoiceDocument, name: str, headers: Mapping[str, str]) -> Response:
    if name == "csv":
        headers = {**headers, **_as_file(invoice, name)}
        return Response(invoice_csv(invoice), headers=headers, media_type="text/csv")
    headers = {**headers, "content-security-policy": CONTENT_SECURITY_POLICY}
    return Response(invoice_html(invoice), headers=headers, media_type="text/html")


def _as_file(invoice: InvoiceDocument, name: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="invoice-{invoice.id}.{name}"'}
