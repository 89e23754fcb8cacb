"""The gateway of the inference plane's tests (both planes are one application), and a tenant that manages its adapters."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.platform.web.tenant.managed_tenant import ManagedTenant, managed

__all__ = ["tenant"]


@pytest.fixture
async def tenant(start_gateway: Any) -> AsyncIterator[ManagedTenant]:
    """A new tenant, `writer`, with a key that may manage and use its adapters."""
    async with managed(await start_gateway(), "writer") as made:
        yield made
