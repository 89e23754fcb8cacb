"""The router that `ray_world` compares with: it chooses replicas at random, and knows them as the product's router does."""

import random
from typing import Any

from loraplex.platform.ray.router import PlacementRouter


class RandomRouter(PlacementRouter):
    """Ranks the candidates at random."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]
