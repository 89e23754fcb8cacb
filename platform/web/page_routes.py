"""All pages of the console."""

from fastapi import APIRouter

from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.web.account import link_pages, mailed_link_pages, oidc_pages, sign_in_pages
from loraplex.platform.web.account import pages as account
from loraplex.platform.web.adapters import alias_pages, version_pages
from loraplex.platform.web.adapters import pages as adapters
from loraplex.platform.web.audit import pages as audit
from loraplex.platform.web.engine import live_pages
from loraplex.platform.web.engine import operator_pages as engine
from loraplex.platform.web.evaluations import pages as evaluations
from loraplex.platform.web.invoices import credit_pages
from loraplex.platform.web.invoices import operator_pages as operator_invoices
from loraplex.platform.web.invoices import pages as invoices
from loraplex.platform.web.keys import pages as keys
from loraplex.platform.web.limits import pages as limits
from loraplex.platform.web.overview import pages as overview
from loraplex.platform.web.playground import pages as playground
from loraplex.platform.web.playground import token_pages
from loraplex.platform.web.rate_cards import operator_pages as rate_cards
from loraplex.platform.web.team import pages as team
from loraplex.platform.web.tenants import operator_pages as tenants
from loraplex.platform.web.tenants import sign_up_plan_pages, state_pages
from loraplex.platform.web.usage import choice_pages as choices
from loraplex.platform.web.usage import operator_pages as operator_usage
from loraplex.platform.web.usage import pages as usage
from loraplex.platform.web.usage import request_pages as requests
from loraplex.platform.web.webhooks import pages as webhooks


def page_routers(dependencies: GatewayDependencies) -> list[APIRouter]:
    """Return the routers of all pages, each with absolute paths. What needs a mail server or an identity provider is there with it
    alone.
    """
    return [
        sign_in_pages.router,
        sign_in_pages.tenant_router,
        link_pages.router,
        *(() if dependencies.mailed_links is None else (mailed_link_pages.router,)),
        *(() if dependencies.identity_provider is None else (oidc_pages.router,)),
        account.router,
        audit.router,
        invoices.router,
        keys.router,
        adapters.router,
        alias_pages.router,
        version_pages.router,
        evaluations.router,
        playground.router,
        token_pages.router,
        limits.router,
        overview.router,
        requests.router,
        usage.router,
        choices.router,
        team.router,
        webhooks.router,
        tenants.router,
        state_pages.router,
        sign_up_plan_pages.router,
        rate_cards.router,
        credit_pages.router,
        operator_invoices.router,
        operator_usage.router,
        live_pages.router,
        engine.router,
    ]
