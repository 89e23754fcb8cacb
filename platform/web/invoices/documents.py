"""Response schemas of invoices and credits. Amounts named `_micro`, `credits` and `tax` are micro-units of the currency."""

from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.errors import InvalidParameter, UnknownParameter
from loraplex.platform.services.billing.invoice_formats import (
    CONTENT_SECURITY_POLICY,
    invoice_csv,
    invoice_html,
)
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented, respond
from loraplex.platform.web.sorting import SortOrder, by_id, by_time
from loraplex.tenants.errors import InvoiceNotFound
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.invoices.credits import GrantedCredit
from loraplex.tenants.invoices.currencies import decimal_text, minor_digits
from loraplex.tenants.invoices.document import invoice_document
from loraplex.tenants.invoices.invoices import InvoiceDetails
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.models import Invoice
from loraplex.tenants.models.invoices import INVOICE_STATES
from loraplex.tenants.records import UtcTime

BY_TIME: Final[SortOrder[Invoice, Any]] = by_time(lambda invoice: (invoice.created_at, invoice.id))
BY_GRANT: Final[SortOrder[GrantedCredit, UUID]] = by_id(lambda credit: credit.grant.id)
FILTERS: Final = {
    "month": "Only invoices of this month, `YYYY-MM`.",
    "state": "Only invoices in this state: `draft`, `final`, `paid` or `void`.",
}
FORMATS: Final = ("json", "csv", "html")
FORMAT: Final = {
    "in": "query",
    "name": "format",
    "required": False,
    "description": "`json`, `csv`, or `html`, a page to print.",
    "schema": {"type": "string", "enum": list(FORMATS), "default": "json"},
}


class InvoiceLineDocument(ResponseModel):
    """`kind`: `usage` of the month, `adjustment` of an earlier `month`, or the rest up to the `minimum`. `adapter` is null for
    the base model. `amount_pico` = `tokens` x `price` (micro-units per million tokens), rounded once to `amount_micro`; `price` is
    null for amounts of corrections and of usage from before rate cards. `billed_…`: what earlier invoices billed of the same.
    """

    kind: str
    month: str
    adapter: str | None
    adapter_id: UUID | None
    token_class: str | None
    price_version_id: UUID | None
    price: int | None
    tokens: int
    amount_pico: str
    amount_micro: int
    rounding_pico: int
    billed_tokens: int
    billed_pico: str


class CreditUseDocument(ResponseModel):
    """The part of a grant that an invoice uses."""

    grant_id: UUID
    amount_micro: int


class InvoiceDocument(ResponseModel):
    """`total_micro` = `subtotal_micro` - `credits` + `tax` + `rounding_micro`: a whole number of the currency's minor unit, which
    `total` has in decimals. A draft has no number; it is computed whenever it is read, and becomes final after `grace_ends_at`.
    """

    id: UUID
    tenant_id: UUID
    number: int | None
    state: str
    month: str
    currency: str
    issuer: str
    customer_name: str
    customer_address: str
    vat_id: str | None
    tax_rate_ppm: int
    minimum_micro: int
    lines: list[InvoiceLineDocument]
    subtotal_micro: int
    credits: int
    credit_uses: list[CreditUseDocument]
    tax: int
    rounding_micro: int
    total_micro: int
    total: str
    grace_ends_at: UtcTime | None
    finalized_at: UtcTime | None
    paid_at: UtcTime | None
    paid_reference: str | None
    voided_at: UtcTime | None


class InvoiceSummaryDocument(ResponseModel):
    """An invoice in a list. A draft has neither number nor total."""

    id: UUID
    tenant_id: UUID
    number: int | None
    state: str
    month: str
    currency: str
    total_micro: int | None
    total: str | None
    created_at: UtcTime
    grace_ends_at: UtcTime
    finalized_at: UtcTime | None
    paid_at: UtcTime | None
    voided_at: UtcTime | None


class CreditDocument(ResponseModel):
    """Of a lower `priority` it is used first, then by the earliest expiry, then by age. It pays for months that end before
    `expires_at`.
    """

    id: UUID
    currency: str
    amount_micro: int
    available_micro: int
    priority: int
    expires_at: UtcTime | None
    reason: str
    granted_at: UtcTime


RESPONSES: Final = documented(response=InvoiceDocument)
RESPONSES[200]["content"] = {f"text/{name}": {"schema": {"type": "string"}} for name in ("csv", "html")}


def to_response(invoice: InvoiceDetails) -> InvoiceDocument:
    return InvoiceDocument.model_validate(invoice_document(invoice))


def to_summary(invoice: Invoice) -> InvoiceSummaryDocument:
    total = invoice.total_micro
    text = None if total is None else decimal_text(total, minor_digits(invoice.currency))
    fields = {name: getattr(invoice, name) for name in InvoiceSummaryDocument.model_fields if name != "total"}
    return InvoiceSummaryDocument(**fields, total=text)


def to_credit(credit: GrantedCredit) -> CreditDocument:
    names = CreditDocument.model_fields.keys() - {"available_micro"}
    fields = {name: getattr(credit.grant, name) for name in names}
    return CreditDocument(**fields, available_micro=credit.available_micro)


def checked_filters(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the filters of a listing of invoices. Raises `InvalidParameter`, `InvalidField`."""
    if "month" in given:
        Month.parse(given["month"])
    if given.get("state", INVOICE_STATES[0]) not in INVOICE_STATES:
        raise InvalidParameter(f"`state` must be one of {', '.join(INVOICE_STATES)}.", param="state")
    return dict(given)


def format_of(request: Request) -> str:
    """Read the query of one invoice. Raises `UnknownParameter`, `InvalidParameter`."""
    for name in request.query_params:
        if name != "format":
            raise UnknownParameter(
                f"Unknown query parameter `{name[:64]}`; allowed: format.", param=name[:64]
            )
    given = request.query_params.getlist("format") or ["json"]
    if len(given) != 1 or given[0] not in FORMATS:
        raise InvalidParameter(f"`format` must be one of {', '.join(FORMATS)}.", param="format")
    return given[0]


def formatted(invoice: InvoiceDetails, name: str) -> Response:
    """Build the response in a format of `FORMATS`."""
    if name == "json":
        return respond(ApiResponse(200, to_response(invoice)))
    render: Callable[[Any], str] = invoice_csv if name == "csv" else invoice_html
    headers = {"x-content-type-options": "nosniff", "cache-control": "private, no-store"}
    if name == "csv":
        headers["content-disposition"] = f'attachment; filename="invoice-{invoice.id}.csv"'
    else:
        headers["content-security-policy"] = CONTENT_SECURITY_POLICY
    content = render(invoice_document(invoice))
    return Response(content, headers=headers, media_type=f"text/{name}; charset=utf-8")


def invoice_id_of(text: str) -> UUID:
    """Parse an invoice id. Raises `InvoiceNotFound` for a text that is no UUID in canonical form."""
    identity = canonical_uuid(text)
    if identity is None:
        raise InvoiceNotFound(f"no invoice {text[:40]}")
    return identity
