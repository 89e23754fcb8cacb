"""All pages of the console."""

from fastapi import APIRouter

from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.console.pages.account import account_pages
from loraplex.platform.console.pages.audit import audit_pages
from loraplex.platform.console.pages.billing import billing_pages


def page_routers(endpoint: ConsoleEndpoint) -> list[APIRouter]:
    """Build the routers of all pages, each with absolute paths."""
    return [account_pages(endpoint), billing_pages(endpoint), audit_pages(endpoint)]
