"""Resolves `model` to the base model or one immutable adapter version, within the caller's tenant, once per request.

Invariants: the error for an adapter of another tenant is the same as for a name that does not exist; a request runs only on what
its name referred to under the policy epoch that admitted it; no name is said not to exist while PostgreSQL is away.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from uuid import UUID

from loraplex.grammar.tenant_cache import TenantCache
from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.errors import ModelNotFound
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.tenant_limiter import AT_ONCE, TenantLimiter
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.registry.records import decision_read
from loraplex.tenants.registry.resolution import ModelResolver, ModelTargets, ResolvedAdapter

MAX_BYTES: Final = 32 << 20
MAX_TENANT_BYTES: Final = 4 << 20
VERSION_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`name` as the caller wrote it; `adapter` is `name@version`. All adapter fields are None for the base model.

    `tool_style`, `reasoning_style`, `defaults` and `decision` are the adapter version's profile: None and empty without one.
    `calibrations`: of its decisions. `created`: when the version was uploaded, in seconds of the Unix epoch. `alias`: by which it
    was chosen; None for a pinned version.
    """

    name: str
    adapter: str | None = None
    digest: str | None = None
    tool_style: str | None = None
    reasoning_style: str | Mapping[str, str] | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    decision: Mapping[str, str] | None = None
    calibrations: Sequence[Mapping[str, Any]] = ()
    adapter_id: UUID | None = None
    version: int | None = None
    created: int | None = None
    alias: str | None = None

    @property
    def adapter_name(self) -> str | None:
        """The adapter's name, which chooses its price; None for the base model."""
        return None if self.adapter is None else self.adapter.partition("@")[0]

    @property
    def reads_labels(self) -> bool:
        """Whether its decisions read labels, or the texts of the options."""
        return decision_read(self.decision) == "labels"

    def calibration(self, system_fingerprint: str | None, wording: str) -> Mapping[str, Any]:
        """Return `sha256` and `temperatures` of its decisions under a base model and a format: "none" and no temperatures without any."""
        key = (system_fingerprint, wording)
        found = (each for each in self.calibrations if (each["system_fingerprint"], each["format"]) == key)
        return next(found, {"sha256": "none", "temperatures": {}})

    def headers(self) -> dict[str, str]:
        """Return `x-loraplex-adapter` and its digest; no headers for the base model."""
        if self.adapter is None or self.digest is None:
            return {}
        return {"x-loraplex-adapter": self.adapter, "x-loraplex-adapter-digest": self.digest}


@dataclass(frozen=True, slots=True)
class _ModelList:
    """A tenant's models, which may be listed without PostgreSQL until `until`: a name that is new raises no policy epoch."""

    models: Sequence[ResolvedModel]
    until: float


class KnownModels:
    """The adapters that model names refer to, as they were read, for requests of the policy epoch under which they were read.

    Whatever changes them raises the epoch, and admission refuses a caller of an older one. So a request that is resolved
    from here is admitted only if a transaction would resolve it likewise. Names that refer to nothing are not kept.
    """

    def __init__(
        self, dependencies: GatewayDependencies, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dependencies = dependencies
        self._clock = clock
        self._base = ResolvedModel(dependencies.served_model_name)
        self._targets = TenantCache[ModelTargets](MAX_BYTES, MAX_TENANT_BYTES, _size)
        self._lists = TenantCache[_ModelList](MAX_BYTES, MAX_TENANT_BYTES, _list_size)
        # Requests in flight are bounded already, so each of them may wait.
        waiting = dependencies.config.max_in_flight
        self._limiter = TenantLimiter("requests", per_tenant=AT_ONCE, waiting=waiting)

    async def resolve(self, caller: Caller, name: str, sticky: str) -> ResolvedModel:
        """Resolve a name for a request that is admitted under the caller's policy. Where an alias splits its requests, those with the
        same `sticky` get the same version.

        Raises `ModelNotFound`, or `DatabaseUnavailable` of tenants.
        """
        if name == self._base.name:
            return self._base
        tenant, key = caller.tenant_id.bytes, (caller.policy_epoch, name)
        targets = self._targets.get(tenant, key)
        if targets is None:
            async with self._limiter.slot(caller.tenant_id):
                targets = self._targets.get(tenant, key) or await self._find(caller, name)
            self._targets.put(tenant, key, targets)
        return _resolved(name, targets, sticky)

    async def read(self, caller: Caller, name: str) -> ResolvedModel:
        """Resolve a name as it is now, for a request without admission. Raises as `resolve`.

        While PostgreSQL is away a name that was read under the caller's policy is resolved as then.
        """
        if name == self._base.name:
            return self._base
        tenant, key = caller.tenant_id.bytes, (caller.policy_epoch, name)
        kept = self._targets.get(tenant, key)
        try:
            targets = await self._find(caller, name, has_fallback=kept is not None)
        except DatabaseUnavailable:
            if kept is None:
                raise
            return _resolved(name, kept, "")
        self._targets.put(tenant, key, targets)
        return _resolved(name, targets, "")

    async def list(self, caller: Caller) -> Sequence[ResolvedModel]:
        """List the base model and the caller's aliases with a ready version; `production` is listed by its adapter's name.

        Raises `DatabaseUnavailable`, within the bound of `Database.bounded`.
        While PostgreSQL is away, the list is that of the last `known_caller_s`, if it was read under the caller's policy.
        """
        tenant, now = caller.tenant_id.bytes, self._clock()
        kept = self._lists.get(tenant, caller.policy_epoch)
        if kept is not None and now >= kept.until:
            kept = None
        try:
            listed = partial(_list, self._dependencies.database, caller.tenant_id)
            adapters = await self._dependencies.database.bounded(listed, has_fallback=kept is not None)
        except DatabaseUnavailable:
            if kept is None:
                raise
            return kept.models
        models = [self._base, *(_model(each.reference, each) for each in adapters)]
        until = now + self._dependencies.config.known_caller_s
        self._lists.put(tenant, caller.policy_epoch, _ModelList(models, until))
        return models

    async def _find(self, caller: Caller, name: str, *, has_fallback: bool = False) -> ModelTargets:
        """Read what an adapter's name refers to now, within a bound (`Database.bounded`). Raises as `resolve`."""
        find = partial(_find, self._dependencies.database, caller.tenant_id, name)
        targets = await self._dependencies.database.bounded(find, has_fallback=has_fallback)
        if targets is None:
            raise ModelNotFound(
                f"The model `{name}` does not exist or you have no access to it.", param="model"
            )
        return targets


async def _find(database: Database, tenant_id: UUID, name: str) -> ModelTargets | None:
    async with database.as_tenant(tenant_id) as session:
        return await ModelResolver(session, tenant_id).find(name)


async def _list(database: Database, tenant_id: UUID) -> Sequence[ResolvedAdapter]:
    async with database.as_tenant(tenant_id) as session:
        return await ModelResolver(session, tenant_id).list()


def _resolved(name: str, targets: ModelTargets, sticky: str) -> ResolvedModel:
    return _model(name, targets.choose(sticky))


def _model(name: str, adapter: ResolvedAdapter) -> ResolvedModel:
    return ResolvedModel(
        name=name,
        adapter=f"{adapter.name}@{adapter.version}",
        digest=adapter.digest,
        tool_style=adapter.tool_style,
        reasoning_style=adapter.reasoning_style,
        defaults=adapter.defaults,
        decision=adapter.decision,
        calibrations=adapter.calibrations,
        adapter_id=adapter.adapter_id,
        version=adapter.version,
        created=int(adapter.created_at.timestamp()),
        alias=adapter.alias,
    )


def _size(targets: ModelTargets) -> int:
    """Bound the bytes of an entry. The defaults of a version are a few numbers."""
    return VERSION_BYTES * (1 + len(targets.adapters))


def _list_size(listed: _ModelList) -> int:
    return VERSION_BYTES * len(listed.models)
