"""All pages of the console."""

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter

from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.pages.account import account_pages
from loraplex.platform.web.console.pages.adapters import adapters_pages
from loraplex.platform.web.console.pages.aliases import aliases_pages
from loraplex.platform.web.console.pages.audit import audit_pages
from loraplex.platform.web.console.pages.billing import billing_pages
from loraplex.platform.web.console.pages.index import index_pages
from loraplex.platform.web.console.pages.keys import keys_pages
from loraplex.platform.web.console.pages.limits import limits_pages
from loraplex.platform.web.console.pages.links import links_pages
from loraplex.platform.web.console.pages.mailed_links import mailed_links_pages
from loraplex.platform.web.console.pages.oidc import oidc_pages
from loraplex.platform.web.console.pages.operator.routes import OPERATOR_PAGES
from loraplex.platform.web.console.pages.overview import overview_pages
from loraplex.platform.web.console.pages.playground import playground_pages
from loraplex.platform.web.console.pages.requests import requests_pages
from loraplex.platform.web.console.pages.sign_in import sign_in_pages
from loraplex.platform.web.console.pages.team import team_pages
from loraplex.platform.web.console.pages.tokens import token_pages
from loraplex.platform.web.console.pages.uploads import uploads_pages
from loraplex.platform.web.console.pages.usage import usage_pages
from loraplex.platform.web.console.pages.versions import versions_pages
from loraplex.platform.web.console.pages.webhooks import webhooks_pages

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
    webhooks_pages,
    *OPERATOR_PAGES,
)


def page_routers(endpoint: ConsoleEndpoint) -> list[APIRouter]:
    """Build the routers of all pages, each with absolute paths."""
    return [build(endpoint) for build in PAGES]
