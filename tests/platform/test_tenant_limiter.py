"""Slots are bounded in all and for each tenant, and come back whatever happens in them."""

from contextlib import ExitStack
from uuid import uuid4

import pytest

from loraplex.platform.errors import Overloaded
from loraplex.platform.tenant_limiter import RefusingTenantLimiter


def test_slots_are_bounded_in_all_and_for_each_tenant() -> None:
    slots = RefusingTenantLimiter(3, 2, "uploads")
    first, second = uuid4(), uuid4()
    with ExitStack() as stack:
        for tenant_id in (first, first, second):
            stack.enter_context(slots.taken(tenant_id))
        with pytest.raises(Overloaded, match="This tenant has 2 uploads"), slots.taken(first):
            pass
        with pytest.raises(Overloaded, match="The server has as many uploads"), slots.taken(second):
            pass
    with pytest.raises(ZeroDivisionError), slots.taken(first):
        raise ZeroDivisionError
    with slots.taken(first), slots.taken(first), slots.taken(second):
        pass
    assert not slots._taken
