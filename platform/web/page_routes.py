"""All pages of the console."""

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter

from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.pages.account import account_pages
from loraplex.platform.web.pages.adapters import adapters_pages
from loraplex.platform.web.pages.aliases import aliases_pages
from loraplex.platform.web.pages.audit import audit_pages
from loraplex.platform.web.pages.billing import billing_pages
from loraplex.platform.web.pages.index import index_pages
from loraplex.platform.web.pages.keys import keys_pages
from loraplex.platform.web.pages.limits import limits_pages
from loraplex.platform.web.pages.links import links_pages
from loraplex.platform.web.pages.mailed_links import mailed_links_pages
from loraplex.platform.web.pages.oidc import oidc_pages
from loraplex.platform.web.pages.operator.routes import OPERATOR_PAGES
from loraplex.platform.web.pages.overview import overview_pages
from loraplex.platform.web.pages.playground import playground_pages
from loraplex.platform.web.pages.requests import requests_pages
from loraplex.platform.web.pages.sign_in import sign_in_pages
from loraplex.platform.web.pages.team import team_pages
from loraplex.platform.web.pages.tokens import token_pages
from loraplex.platform.web.pages.uploads import uploads_pages
from loraplex.platform.web.pages.usage import usage_pages
from loraplex.platform.web.pages.versions import versions_pages
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
    keys_pages,
    adapters_pages,
    aliases_pages,
    versions_pages,
    uploads_pages,
    playground_pages,
    token_pages,
    limits_pages,
    overview_pages,
    requests_pages,
    usage_pages,
    team_pages,
    *OPERATOR_PAGES,
)


def page_routers(endpoint: ConsoleEndpoint) -> list[APIRouter]:
    """Build the routers of all pages, each with absolute paths."""
    return [webhooks.router, *(build(endpoint) for build in PAGES)]
