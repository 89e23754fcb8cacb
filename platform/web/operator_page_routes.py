"""All pages of the operator area but its audit log."""

from typing import Final

from loraplex.platform.web.engine.operator_pages import service_pages
from loraplex.platform.web.tenants.operator_pages import tenants_pages
from loraplex.platform.web.tenants.sign_up_plan_pages import sign_up_plan_pages
from loraplex.platform.web.tenants.state_pages import tenant_state_pages
from loraplex.platform.web.usage.operator_pages import usage_pages

OPERATOR_PAGES: Final = (
    *(tenants_pages, tenant_state_pages, sign_up_plan_pages),
    usage_pages,
    service_pages,
)
