"""All pages of the operator area but its audit log."""

from typing import Final

from loraplex.platform.web.engine.operator_pages import service_pages
from loraplex.platform.web.invoices.credit_pages import credits_pages
from loraplex.platform.web.invoices.operator_pages import invoices_pages
from loraplex.platform.web.rate_cards.operator_pages import rate_cards_pages
from loraplex.platform.web.tenants import operator_pages as tenants
from loraplex.platform.web.tenants import sign_up_plan_pages, state_pages
from loraplex.platform.web.usage.operator_pages import usage_pages

OPERATOR_PAGES: Final = (
    *(rate_cards_pages, credits_pages, invoices_pages, usage_pages),
    service_pages,
)

OPERATOR_ROUTERS: Final = (tenants.router, state_pages.router, sign_up_plan_pages.router)
