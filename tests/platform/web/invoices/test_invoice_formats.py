"""Texts on an invoice stay texts: no markup on the page, no formula in the CSV. The page has no script and hides nothing."""

import base64
import csv
import hashlib
import io
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from uuid import UUID

import pytest

from loraplex.platform.web.invoices.invoice_formats import (
    CONTENT_SECURITY_POLICY,
    LINE_COLUMNS,
    invoice_csv,
    invoice_html,
)
from loraplex.platform.web.responses import csv_text
from loraplex.tenants.invoices.content import InvoiceContent
from loraplex.tenants.invoices.document import invoice_document
from loraplex.tenants.invoices.invoices import InvoiceDetails
from loraplex.tenants.invoices.lines import InvoiceLine
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.totals import CreditBalance, InvoiceTerms, total_invoice

NOVEMBER = Month(2026, 11)
ADAPTER, VERSION = UUID(int=1), UUID(int=2)
OWN_ATTRIBUTES = {
    *("lang", "charset", "name", "content", "class", "colspan"),
    *("role", "aria-label", "tabindex"),
}
HOSTILE = "</style><script>alert(1)</script><img src=x onerror='x'>\"&"


def invoice(text: str, tax_rate_ppm: int = 190_000, number: int | None = 7) -> InvoiceDetails:
    """An invoice whose every free text is `text`: 9.876543 in lines, 1 in credits, and tax."""
    terms = InvoiceTerms(
        currency="USD",
        issuer=text,
        customer_name=text,
        customer_address=text,
        vat_id=text,
        tax_rate_ppm=tax_rate_ppm,
        minimum_micro=0,
    )
    line = InvoiceLine(
        kind="usage",
        month=NOVEMBER,
        adapter_id=ADAPTER,
        token_class="completion",
        price_version_id=VERSION,
        price=3,
        tokens=3_292_181_166_667,
        amount_pico=9_876_543_500_001,
        amount_micro=9_876_544,
    )
    granted_at = datetime(2026, 10, 1, tzinfo=UTC)
    credit = CreditBalance(
        grant_id=UUID(int=3), priority=1, expires_at=None, granted_at=granted_at, available_micro=10**6
    )
    totals = total_invoice(NOVEMBER, [line], [credit], terms)
    content = InvoiceContent(terms=terms, totals=totals, credits=(credit,), adapters={ADAPTER: text})
    return InvoiceDetails(
        id=UUID(int=4),
        tenant_id=UUID(int=5),
        month=NOVEMBER,
        state="paid",
        content=content,
        number=number,
        finalized_at=datetime(2026, 12, 2, 0, 0, 5, tzinfo=UTC),
        paid_at=datetime(2026, 12, 9, tzinfo=UTC),
        paid_reference=text,
    )


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_every_text_on_the_page_is_escaped() -> None:
    plain, hostile = (
        Page(invoice_html(invoice_document(invoice("plain")))),
        Page(invoice_html(invoice_document(invoice(HOSTILE)))),
    )
    assert hostile.tags == plain.tags and "script" not in plain.tags
    assert hostile.attributes == plain.attributes == OWN_ATTRIBUTES
    assert "".join(hostile.texts).count(HOSTILE) == 6


def test_the_page_shows_every_amount() -> None:
    texts = Page(invoice_html(invoice_document(invoice("plain")))).texts
    for amount in ("9.876544", "-1.000000", "1.686543", "-0.003087"):
        assert amount in texts
    for text in (
        "Invoice 7",
        "USD 10.56",
        "Tax, 19 %",
        "2026-12-09, plain",
        "3,292,181,166,667",
        str(VERSION),
    ):
        assert text in texts
    facts = {
        "Number": "7",
        "Period (UTC)": "2026-11-01 to 2026-11-30",
        "Date": "2026-12-02",
    }
    for name, value in facts.items():
        assert texts[texts.index(name) + 1] == value
    assert "Draft invoice" in Page(invoice_html(invoice_document(invoice("plain", number=None)))).texts


def test_only_an_invoice_that_waits_for_payment_has_a_due_date() -> None:
    paid = invoice("plain")
    unpaid = replace(paid, state="final", paid_at=None, paid_reference=None)
    texts = Page(invoice_html(invoice_document(unpaid))).texts
    place = texts.index("Due date")
    assert texts[place + 1 : place + 3] == ["2027-01-01", "Payment within 30 days of the invoice date"]
    for other in (paid, replace(unpaid, state="void"), replace(unpaid, state="draft", number=None)):
        assert "Due date" not in Page(invoice_html(invoice_document(other))).texts


def test_the_page_has_six_columns() -> None:
    page = invoice_html(invoice_document(invoice("plain")))
    assert page.partition("</thead>")[0].count("<th") - 1 == 6


@pytest.mark.parametrize(("ppm", "text"), [(0, "0"), (77_500, "7.75"), (1_000_000, "100"), (1, "0.0001")])
def test_the_tax_rate_is_in_percent(ppm: int, text: str) -> None:
    assert f"Tax, {text} %" in Page(invoice_html(invoice_document(invoice("plain", ppm)))).texts


def test_the_policy_allows_the_style_of_the_page_and_nothing_else() -> None:
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    assert re.search(r"style-src 'sha256-[A-Za-z0-9+/]{43}='$", CONTENT_SECURITY_POLICY)
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    style = invoice_html(invoice_document(invoice("plain"))).partition("<style>")[2].partition("</style>")[0]
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in CONTENT_SECURITY_POLICY


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_text_in_the_csv_is_a_formula(first: str) -> None:
    text = f"{first}HYPERLINK(1)"
    rows = list(csv.DictReader(io.StringIO(invoice_csv(invoice_document(invoice(text))), newline="")))
    assert rows[0]["adapter"] == f"'{text}"


@pytest.mark.parametrize("split", [";", "\t", "\n"])
def test_no_part_of_a_text_is_a_formula_where_a_spreadsheet_splits_it(split: str) -> None:
    assert csv_text(f"x{split}=1") == f"x{split}'=1"
    assert csv_text("a-b; c=d") == "a-b; c=d" and csv_text("-5") == "-5"


def test_the_csv_has_the_lines_and_the_sums() -> None:
    document = invoice_document(invoice("plain"))
    rows = list(csv.DictReader(io.StringIO(invoice_csv(document))))
    line, *sums = rows
    assert {name: line[name] for name in LINE_COLUMNS} == {
        name: "" if value is None else str(value) for name, value in dict(document.lines[0]).items()
    }
    assert {row["kind"]: row["amount_micro"] for row in sums} == {
        "subtotal": "9876544",
        "credits": "1000000",
        "tax": "1686543",
        "rounding": "-3087",
        "total": "10560000",
    }
    assert {(row["number"], row["currency"], row["invoice_id"]) for row in rows} == {
        ("7", "USD", str(UUID(int=4)))
    }
