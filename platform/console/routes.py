"""All pages of the console."""

from fastapi import APIRouter

from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.console.pages.account import account_pages
from loraplex.platform.console.pages.links import links_pages
from loraplex.platform.console.pages.sign_in import sign_in_pages


def page_routers(endpoint: ConsoleEndpoint) -> list[APIRouter]:
    """Build the routers of all pages, each with absolute paths."""
    return [sign_in_pages(endpoint), links_pages(endpoint), account_pages(endpoint)]
