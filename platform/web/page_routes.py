"""All pages of the console."""

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter

from loraplex.platform.web.account.link_pages import links_pages
from loraplex.platform.web.account.mailed_link_pages import mailed_links_pages
from loraplex.platform.web.account.oidc_pages import oidc_pages
from loraplex.platform.web.account.pages import account_pages
from loraplex.platform.web.account.sign_in_pages import sign_in_pages
from loraplex.platform.web.adapters.alias_pages import aliases_pages
from loraplex.platform.web.adapters.pages import adapters_pages
from loraplex.platform.web.adapters.upload_pages import uploads_pages
from loraplex.platform.web.adapters.version_pages import versions_pages
from loraplex.platform.web.audit.pages import audit_pages
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.invoices.pages import billing_pages
from loraplex.platform.web.keys import pages as keys
from loraplex.platform.web.limits import pages as limits
from loraplex.platform.web.operator_page_routes import OPERATOR_PAGES
from loraplex.platform.web.overview.index_pages import index_pages
from loraplex.platform.web.overview.pages import overview_pages
from loraplex.platform.web.playground.pages import playground_pages
from loraplex.platform.web.playground.token_pages import token_pages
from loraplex.platform.web.team.pages import team_pages
from loraplex.platform.web.usage.pages import usage_pages
from loraplex.platform.web.usage.request_pages import requests_pages
from loraplex.platform.web.webhooks import pages as webhooks

PAGES: Final[tuple[Callable[[ConsoleEndpoint], APIRouter], ...]] = (
    index_pages,
    sign_in_pages,
    links_pages,
    mailed_links_pages,
    oidc_pages,
    account_pages,
    audit_pages,
    billing_pages,
    adapters_pages,
    aliases_pages,
    versions_pages,
    uploads_pages,
    playground_pages,
    token_pages,
    overview_pages,
    requests_pages,
    usage_pages,
    team_pages,
    *OPERATOR_PAGES,
)


def page_routers(endpoint: ConsoleEndpoint) -> list[APIRouter]:
    """Build the routers of all pages, each with absolute paths."""
    return [keys.router, limits.router, webhooks.router, *(build(endpoint) for build in PAGES)]
