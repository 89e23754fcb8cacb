"""All pages of the console."""

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter

from loraplex.platform.web.account import (
    link_pages,
    mailed_link_pages,
    oidc_pages,
    sign_in_pages,
)
from loraplex.platform.web.account import pages as account
from loraplex.platform.web.adapters.alias_pages import aliases_pages
from loraplex.platform.web.adapters.pages import adapters_pages
from loraplex.platform.web.adapters.upload_pages import uploads_pages
from loraplex.platform.web.adapters.version_pages import versions_pages
from loraplex.platform.web.audit.pages import audit_pages
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.invoices.pages import billing_pages
from loraplex.platform.web.keys.pages import keys_pages
from loraplex.platform.web.limits.pages import limits_pages
from loraplex.platform.web.operator_page_routes import OPERATOR_PAGES, OPERATOR_ROUTERS
from loraplex.platform.web.overview.index_pages import index_pages
from loraplex.platform.web.overview.pages import overview_pages
from loraplex.platform.web.playground import pages as playground
from loraplex.platform.web.playground import token_pages
from loraplex.platform.web.team import pages as team
from loraplex.platform.web.usage.pages import usage_pages
from loraplex.platform.web.usage.request_pages import requests_pages
from loraplex.platform.web.webhooks import pages as webhooks

PAGES: Final[tuple[Callable[[ConsoleEndpoint], APIRouter], ...]] = (
    index_pages,
    audit_pages,
    billing_pages,
    keys_pages,
    adapters_pages,
    aliases_pages,
    versions_pages,
    uploads_pages,
    limits_pages,
    overview_pages,
    requests_pages,
    usage_pages,
    *OPERATOR_PAGES,
)


ROUTERS: Final = (
    sign_in_pages.router,
    sign_in_pages.tenant_router,
    link_pages.router,
    account.router,
    webhooks.router,
    team.router,
    playground.router,
    token_pages.router,
    *OPERATOR_ROUTERS,
)


def page_routers(endpoint: ConsoleEndpoint) -> list[APIRouter]:
    """Build the routers of all pages, each with absolute paths. What needs a mail server or an identity provider is there with it
    alone.
    """
    dependencies = endpoint.dependencies
    mailed = () if dependencies.mailed_links is None else (mailed_link_pages.router,)
    provided = () if dependencies.identity_provider is None else (oidc_pages.router,)
    return [*ROUTERS, *mailed, *provided, *(build(endpoint) for build in PAGES)]
