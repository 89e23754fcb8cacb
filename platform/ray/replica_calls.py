"""Calls that are no requests: of a method of every replica that Serve lists, or of every replica that lives.

Invariant: a replica is a named actor of Serve from its start to its end. One that drains is no longer listed and still lives.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final
from uuid import uuid4

import ray
from ray._private.state import actors
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve._private.request_router.replica_wrapper import ActorReplicaWrapper
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest

from loraplex.engine.errors import EngineUnavailable

CONTROL_TIMEOUT_S: Final = 10.0


async def call_listed(handle: "DeploymentHandle[Any]", method: str, argument: object) -> None:
    """Call a method of the replicas that take requests. Raises `EngineUnavailable` unless each has ended it or is dead."""
    try:
        results = await handle.broadcast(method, argument).results_async(
            timeout_s=CONTROL_TIMEOUT_S, return_exceptions=True
        )
    except (RayError, RayServeException, TimeoutError) as error:
        raise EngineUnavailable(f"{method}: {type(error).__name__}") from None
    _require_ended(method, results, RayActorError)


async def call_living(handle: "DeploymentHandle[Any]", method: str, argument: object) -> None:
    """Call a method of all replicas, also of those that drain. Raises `EngineUnavailable` unless each has ended it or is dead.

    A replica that starts has had no request, and is left out.
    """
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            living = await asyncio.to_thread(_living, handle.app_name, handle.deployment_name)
            results = await asyncio.gather(
                *(_call(actor, method, argument) for actor in living), return_exceptions=True
            )
    except (RayError, TimeoutError) as error:
        raise EngineUnavailable(f"{method}: {type(error).__name__}") from None
    _require_ended(method, results, ActorDiedError)


def _require_ended(method: str, results: Iterable[object], dead: type[RayActorError]) -> None:
    """Check what each replica returned; `dead` says that it has ended. Raises `EngineUnavailable`."""
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, dead):
            raise EngineUnavailable(f"{method}: an engine replica answered {type(result).__name__}")


def _living(app_name: str, deployment: str) -> "list[ActorHandle[Any]]":
    """Blocks. One that waits for a machine is not among them."""
    prefix = ReplicaID("", DeploymentID(name=deployment, app_name=app_name)).to_full_id_str()
    living = []
    for actor in actors(actor_state_name="ALIVE").values():
        if actor["Name"].startswith(prefix):
            try:
                living.append(ray.get_actor(actor["Name"], namespace=SERVE_NAMESPACE))
            except ValueError:  # it has ended since it was listed
                continue
    return living


async def _call(actor: "ActorHandle[Any]", method: str, argument: object) -> None:
    if await actor.was_initialized.remote():
        metadata = RequestMetadata(uuid4().hex, uuid4().hex, call_method=method)
        call = PendingRequest(args=[argument], kwargs={}, metadata=metadata)
        await ActorReplicaWrapper(actor).send_request_python(call, with_rejection=False).get_async()
