"""Resolves `model` to the base model or one immutable adapter version, within the caller's tenant, once per request.

Invariant: the error for an adapter of another tenant is the same as for a name that does not exist.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.errors import ModelNotFound
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.tenants.registry.resolution import ModelResolver


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`name` as the caller wrote it; `adapter` is `name@version`. All adapter fields are None for the base model.

    `tool_style` and `defaults` are the adapter version's profile: None and empty without one.
    """

    name: str
    adapter: str | None = None
    digest: str | None = None
    tool_style: str | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    adapter_id: UUID | None = None
    version: int | None = None

    def headers(self) -> dict[str, str]:
        """Return `x-loraplex-adapter` and its digest; no headers for the base model."""
        if self.adapter is None or self.digest is None:
            return {}
        return {"x-loraplex-adapter": self.adapter, "x-loraplex-adapter-digest": self.digest}


async def resolve_model(
    dependencies: GatewayDependencies, caller: Caller, name: str, sticky: str = ""
) -> ResolvedModel:
    """Resolve a name. Where an alias splits its requests, those with the same `sticky` get the same version.

    Raises `ModelNotFound`, or `DatabaseUnavailable` of tenants.
    """
    if name == dependencies.served_model_name:
        return ResolvedModel(name)
    async with dependencies.database.as_tenant(caller.tenant_id) as session:
        adapter = await ModelResolver(session, caller.tenant_id).resolve(name, sticky)
    if adapter is None:
        raise ModelNotFound(f"The model `{name}` does not exist or you have no access to it.", param="model")
    return ResolvedModel(
        name=name,
        adapter=f"{adapter.name}@{adapter.version}",
        digest=adapter.digest,
        tool_style=adapter.tool_style,
        defaults=adapter.defaults,
        adapter_id=adapter.adapter_id,
        version=adapter.version,
    )


async def list_models(dependencies: GatewayDependencies, caller: Caller) -> list[ResolvedModel]:
    """List the base model and the caller's aliases with a ready version; `production` is listed by its adapter's name."""
    async with dependencies.database.as_tenant(caller.tenant_id) as session:
        adapters = await ModelResolver(session, caller.tenant_id).list()
    own = [ResolvedModel(each.reference, f"{each.name}@{each.version}", each.digest) for each in adapters]
    return [ResolvedModel(dependencies.served_model_name), *own]
