"""All pages of the operator area but its audit log."""

from typing import Final

from loraplex.platform.web.invoices.credit_pages import credits_pages
from loraplex.platform.web.invoices.operator_pages import invoices_pages
from loraplex.platform.web.rate_cards.operator_pages import rate_cards_pages
from loraplex.platform.web.tenants.operator_pages import tenants_pages
from loraplex.platform.web.tenants.sign_up_plan_pages import sign_up_plan_pages
from loraplex.platform.web.tenants.state_pages import tenant_state_pages

OPERATOR_PAGES: Final = (
    *(tenants_pages, tenant_state_pages, sign_up_plan_pages),
    *(rate_cards_pages, credits_pages, invoices_pages),
)
