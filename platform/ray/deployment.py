"""The Serve application of engine replicas. `import_path: loraplex.platform.ray.deployment:build` in a Serve config.

Invariant: what an operator sets in the Serve config (replicas, autoscaling, resources) wins over what is set here.
"""

from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel, ConfigDict, JsonValue
from ray import serve
from ray.serve import Application, Deployment

from loraplex.platform.config import load_settings
from loraplex.platform.engines.process import STOP_GRACE_S
from loraplex.platform.ray.replica import EngineReplica
from loraplex.platform.ray.router import CONTROL_CALLS, PlacementRouter

DEPLOYMENT: Final = "EngineReplica"
STATS_S: Final = 0.5
MAX_BACKOFF_S: Final = 0.1
"""Between two looks of a router at replicas that were full."""
HEALTH_S: Final = 1.0
DRAIN_POLL_S: Final = 0.2
HEALTH_TIMEOUT_S: Final = 10.0
ROUTER: Final = f"{__name__}:{PlacementRouter.__name__}"
"""Named through this module: Ray pickles by value what the named module defines, and the router is to be imported."""


class EngineArguments(BaseModel):
    """The `args` of the application. `settings`: of the engine, by their names; see deploy/guide/settings.md."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, JsonValue] = {}


def build(arguments: EngineArguments) -> Application:
    """Build the application. Raises `SettingsError`."""
    return engine_deployment(arguments.settings).bind(arguments.settings)


def engine_deployment(given: Mapping[str, JsonValue]) -> Deployment:
    """The deployment of replicas with these settings: each takes a batch of requests, and a queue of as many.

    Raises `SettingsError`.
    """
    settings = load_settings(given)
    queue = min(settings.max_waiting, settings.max_num_seqs)
    make_deployment = serve.deployment(
        name=DEPLOYMENT,
        max_ongoing_requests=settings.max_num_seqs + queue + CONTROL_CALLS,
        graceful_shutdown_timeout_s=settings.drain_s + STOP_GRACE_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config={
            "request_router_class": ROUTER,
            "request_routing_stats_period_s": STATS_S,
            "max_backoff_s": MAX_BACKOFF_S,
        },
        logging_config={"enable_access_log": False},
    )
    return make_deployment(EngineReplica)
