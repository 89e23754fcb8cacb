"""Pools that are closed when their test ends, whatever loads it still blocks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engine.lora.driven_pool import DrivenPool, Source


@pytest.fixture
def make_pool() -> Iterator[Callable[..., DrivenPool]]:
    made: list[DrivenPool] = []

    def make(max_ranks: float, **options: Any) -> DrivenPool:
        made.append(DrivenPool(Source(), max_ranks, **options))
        return made[-1]

    yield make
    for pool in made:
        for digest in list(pool.source.gates):
            pool.source.release(digest)
        pool.close()
