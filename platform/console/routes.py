"""All pages of the console."""

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter

from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.console.pages.account import account_pages
from loraplex.platform.console.pages.audit import audit_pages
from loraplex.platform.console.pages.billing import billing_pages
from loraplex.platform.console.pages.links import links_pages
from loraplex.platform.console.pages.operator.routes import OPERATOR_PAGES
from loraplex.platform.console.pages.sign_in import sign_in_pages

PAGES: Final[tuple[Callable[[ConsoleEndpoint], APIRouter], ...]] = (
    sign_in_pages,
    links_pages,
    account_pages,
    audit_pages,
    billing_pages,
    *OPERATOR_PAGES,
)


def page_routers(endpoint: ConsoleEndpoint) -> list[APIRouter]:
    """Build the routers of all pages, each with absolute paths."""
    return [build(endpoint) for build in PAGES]
