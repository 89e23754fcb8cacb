"""All pages of the console."""

from fastapi import APIRouter

from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.console.pages.account import account_pages
from loraplex.platform.console.pages.adapters import adapters_pages
from loraplex.platform.console.pages.aliases import aliases_pages
from loraplex.platform.console.pages.audit import audit_pages
from loraplex.platform.console.pages.billing import billing_pages
from loraplex.platform.console.pages.keys import keys_pages
from loraplex.platform.console.pages.limits import limits_pages
from loraplex.platform.console.pages.links import links_pages
from loraplex.platform.console.pages.overview import overview_pages
from loraplex.platform.console.pages.playground import playground_pages
from loraplex.platform.console.pages.requests import requests_pages
from loraplex.platform.console.pages.sign_in import sign_in_pages
from loraplex.platform.console.pages.team import team_pages
from loraplex.platform.console.pages.tokens import token_pages
from loraplex.platform.console.pages.uploads import uploads_pages
from loraplex.platform.console.pages.usage import usage_pages
from loraplex.platform.console.pages.webhooks import webhooks_pages


def page_routers(endpoint: ConsoleEndpoint) -> list[APIRouter]:
    """Build the routers of all pages, each with absolute paths."""
    return [
        account_pages(endpoint),
        adapters_pages(endpoint),
        aliases_pages(endpoint),
        audit_pages(endpoint),
        billing_pages(endpoint),
        keys_pages(endpoint),
        limits_pages(endpoint),
        links_pages(endpoint),
        overview_pages(endpoint),
        playground_pages(endpoint),
        requests_pages(endpoint),
        sign_in_pages(endpoint),
        team_pages(endpoint),
        token_pages(endpoint),
        uploads_pages(endpoint),
        usage_pages(endpoint),
        webhooks_pages(endpoint),
    ]
