"""All pages of the operator area but its audit log."""

from typing import Final

from loraplex.platform.web.pages.operator.credits import credits_pages
from loraplex.platform.web.pages.operator.invoices import invoices_pages
from loraplex.platform.web.pages.operator.rate_cards import rate_cards_pages
from loraplex.platform.web.pages.operator.service import service_pages
from loraplex.platform.web.pages.operator.sign_up_plan import sign_up_plan_pages
from loraplex.platform.web.pages.operator.tenant_state import tenant_state_pages
from loraplex.platform.web.pages.operator.tenants import tenants_pages
from loraplex.platform.web.pages.operator.usage import usage_pages

OPERATOR_PAGES: Final = (
    *(tenants_pages, tenant_state_pages, sign_up_plan_pages),
    *(rate_cards_pages, credits_pages, invoices_pages, usage_pages),
    service_pages,
)
