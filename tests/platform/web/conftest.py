"""The gateway, its callers and the console of all tests of `platform/web`: the planes and the console are one application."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.platform.web.browser import console, signed_in
from tests.platform.web.gateway import start_gateway
from tests.platform.web.managed_tenant import ManagedTenant, managed
from tests.platform.web.operator_client import operator
from tests.tenants.people.people_world import cheap_passwords

__all__ = ["cheap_passwords", "console", "operator", "signed_in", "start_gateway", "tenant"]


@pytest.fixture
async def tenant(start_gateway: Any) -> AsyncIterator[ManagedTenant]:
    """A new tenant, `writer`, with a key that may manage and use its adapters."""
    async with managed(await start_gateway(), "writer") as made:
        yield made
