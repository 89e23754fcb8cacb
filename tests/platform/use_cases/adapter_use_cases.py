"""The rows of the walk for adapters, versions, aliases and uploads."""

from collections.abc import Mapping
from typing import Any, Final

from tests.platform.use_cases.use_case import UseCase
from tests.platform.use_cases.walked_world import NO_ID, Outcome, World
from tests.platform.web.upload_server import declared
from tests.tenants.registry_records import AliasWriter, RegistryWriter, digest

from loraplex.adapters.uploads import use_cases as uploads
from loraplex.engine.fake_engine import DEFAULT_INFO
from loraplex.platform.inference.decisions.wording import FORMAT
from loraplex.tenants.administration import adapters, calibrations, versions
from loraplex.tenants.registry import use_cases as aliases

FILES: Final = {"files": declared({"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"})}
SPLIT: Final = {
    "split": [{"version": 1, "weight": 5}, {"version": 3, "weight": 95}],
    "guard": {"max_failure_ratio": 2, "max_unsatisfied": 0.05},
}
TENANT: Final = ("--tenant", "harbor")


async def _add(
    world: World, states: tuple[str, ...], moves: Mapping[str, tuple[int, ...]], name: str = "voice"
) -> None:
    """Add an adapter with a version in each of the states; `moves`: alias -> the versions that it named, in order."""
    async with world.database.as_tenant(world.tenant_id) as session:
        registry = RegistryWriter(session, world.tenant_id)
        await registry.get_or_create(name)
        for number, state in enumerate(states, 1):
            await registry.add_version(
                name, digest=digest(number), size_bytes=10, rank=8, config={}, report={}, state=state
            )
        for alias, targets in moves.items():
            for target in targets:
                await AliasWriter(session, world.tenant_id).set(name, alias, {target: 100})


async def _idle_and_busy(world: World) -> None:
    await _add(world, ("ready",), {})
    await _add(world, ("ready",), {"production": (1,)}, "busy")


async def add_aliased(world: World) -> None:
    """Version 1 has no alias, 2 has been and 3 is `production`, 4 is quarantined, 5 is deprecated."""
    states = ("ready", "ready", "ready", "quarantined", "deprecated")
    await _add(world, states, {"production": (2, 3), "fresh": (3,)})


async def _open(world: World, name: str = "voice") -> Outcome:
    return await world.tenant("POST", f"/adapters/{name}/uploads", FILES)


async def _with_upload(world: World) -> None:
    await add_aliased(world)
    assert (await _open(world)).accepted


async def _abort(world: World) -> Outcome:
    (upload,) = world.dump()["uploads"]
    return await world.tenant("DELETE", f"/uploads/{upload['id']}")


def _patch(world: World, version: int) -> Any:
    body = {"tool_style": "hermes", "defaults": {"temperature": 0.5}}
    return world.tenant("PATCH", f"/adapters/voice/versions/{version}", body, if_match="1")


def _calibrate(world: World, version: int) -> Any:
    body = {
        "format": FORMAT,
        "system_fingerprint": DEFAULT_INFO.system_fingerprint,
        "temperatures": {"choice": 2.5},
        "report": {},
    }
    return world.tenant("PUT", f"/adapters/voice/versions/{version}/decision-calibration", body)


def _profile(world: World, version: int) -> Any:
    options = ("--tool-style", "hermes", "--defaults", '{"temperature": 0.5}')
    return world.command("adapter", "profile", "voice", str(version), *options, *TENANT)


ALL: Final = (
    UseCase(
        function=adapters.create,
        entries=("adapter.create",),
        http=lambda world: world.tenant("POST", "/adapters", {"name": "voice", "description": "it sings"}),
        refused_http=lambda world: world.tenant("POST", "/adapters", {"name": "demo/base"}),
    ),
    UseCase(
        function=adapters.describe,
        entries=("adapter.change",),
        given=add_aliased,
        http=lambda world: world.tenant("PATCH", "/adapters/voice", {"description": "x"}, if_match="1"),
        refused_http=lambda world: world.tenant(
            "PATCH", "/adapters/voice", {"description": "x"}, if_match="9"
        ),
    ),
    UseCase(
        function=adapters.delete,
        entries=("adapter.delete",),
        given=_idle_and_busy,
        http=lambda world: world.tenant("DELETE", "/adapters/voice"),
        command=lambda world: world.command("adapter", "delete", "voice", *TENANT),
        refused_http=lambda world: world.tenant("DELETE", "/adapters/busy"),
        refused_command=lambda world: world.command("adapter", "delete", "busy", *TENANT),
    ),
    UseCase(
        function=adapters.force_delete,
        entries=("adapter.delete",),
        given=_idle_and_busy,
        command=lambda world: world.command("adapter", "delete", "busy", "--force", *TENANT),
        refused_command=lambda world: world.command("adapter", "delete", "nonesuch", "--force", *TENANT),
    ),
    UseCase(
        function=versions.change_profile,
        entries=("version.change",),
        given=add_aliased,
        http=lambda world: _patch(world, 1),
        command=lambda world: _profile(world, 1),
        refused_http=lambda world: _patch(world, 3),
        refused_command=lambda world: _profile(world, 3),
    ),
    UseCase(
        function=calibrations.calibrate,
        entries=("version.calibrate",),
        given=add_aliased,
        http=lambda world: _calibrate(world, 3),
        refused_http=lambda world: _calibrate(world, 9),
    ),
    UseCase(
        function=versions.deprecate,
        entries=("version.deprecate",),
        given=add_aliased,
        http=lambda world: world.tenant("POST", "/adapters/voice/versions/1/deprecate"),
        refused_http=lambda world: world.tenant("POST", "/adapters/voice/versions/3/deprecate"),
    ),
    UseCase(
        function=versions.restore,
        entries=("version.restore",),
        given=add_aliased,
        http=lambda world: world.tenant("POST", "/adapters/voice/versions/5/restore"),
        refused_http=lambda world: world.tenant("POST", "/adapters/voice/versions/4/restore"),
    ),
    UseCase(
        function=versions.delete,
        entries=("version.delete",),
        given=add_aliased,
        http=lambda world: world.tenant("DELETE", "/adapters/voice/versions/1"),
        command=lambda world: world.command("adapter", "delete", "voice", "--version", "1", *TENANT),
        refused_http=lambda world: world.tenant("DELETE", "/adapters/voice/versions/3"),
        refused_command=lambda world: world.command("adapter", "delete", "voice", "--version", "3", *TENANT),
    ),
    UseCase(
        function=versions.force_delete,
        entries=("version.delete",),
        given=add_aliased,
        command=lambda world: world.command(
            *("adapter", "delete", "voice", "--version", "1", "--force", "--no-end-running", *TENANT)
        ),
        refused_command=lambda world: world.command(
            *("adapter", "delete", "voice", "--version", "3", "--force", *TENANT)
        ),
    ),
    UseCase(
        function=versions.lift_quarantine,
        entries=("version.release",),
        given=add_aliased,
        command=lambda world: world.command("adapter", "release", "voice", "4", *TENANT),
        refused_command=lambda world: world.command("adapter", "release", "voice", "3", *TENANT),
    ),
    UseCase(
        function=aliases.move,
        entries=("alias.move",),
        given=add_aliased,
        http=lambda world: world.tenant(
            "PUT", "/adapters/voice/aliases/production", {"version": 1}, if_match="2"
        ),
        command=lambda world: world.command("adapter", "alias", "voice", "production", "1", *TENANT),
        refused_http=lambda world: world.tenant(
            "PUT", "/adapters/voice/aliases/production", {"version": 4}, if_match="2"
        ),
        refused_command=lambda world: world.command("adapter", "alias", "voice", "production", "4", *TENANT),
    ),
    UseCase(
        function=aliases.move,
        entries=("alias.move",),
        given=add_aliased,
        http=lambda world: world.tenant("PUT", "/adapters/voice/aliases/production", SPLIT, if_match="2"),
        command=lambda world: world.command(
            *("adapter", "alias", "voice", "production", "1", "--share", "5"),
            *("--guard", "max_failure_ratio=2,max_unsatisfied=0.05", *TENANT),
        ),
        refused_http=lambda world: world.tenant(
            "PUT", "/adapters/voice/aliases/production", SPLIT | {"guard": {"min_requests": 50}}, if_match="2"
        ),
        refused_command=lambda world: world.command(
            *("adapter", "alias", "voice", "production", "1", "--share", "5"),
            *("--guard", "min_requests=50", *TENANT),
        ),
    ),
    UseCase(
        function=aliases.roll_back,
        entries=("alias.rollback",),
        given=add_aliased,
        http=lambda world: world.tenant("POST", "/adapters/voice/aliases/production/rollback"),
        command=lambda world: world.command("adapter", "rollback", "voice", *TENANT),
        refused_http=lambda world: world.tenant("POST", "/adapters/voice/aliases/fresh/rollback"),
        refused_command=lambda world: world.command("adapter", "rollback", "voice", "fresh", *TENANT),
    ),
    UseCase(
        function=aliases.delete,
        entries=("alias.delete",),
        given=add_aliased,
        http=lambda world: world.tenant("DELETE", "/adapters/voice/aliases/production"),
        command=lambda world: world.command("adapter", "alias", "voice", "production", "--delete", *TENANT),
        refused_http=lambda world: world.tenant("DELETE", "/adapters/voice/aliases/nonesuch"),
        refused_command=lambda world: world.command(
            "adapter", "alias", "voice", "nonesuch", "--delete", *TENANT
        ),
    ),
    UseCase(
        function=uploads.open_upload,
        entries=("upload.open",),
        given=add_aliased,
        http=_open,
        refused_http=lambda world: _open(world, "nonesuch"),
    ),
    UseCase(
        function=uploads.abort_upload,
        entries=("upload.abort",),
        given=_with_upload,
        http=_abort,
        refused_http=lambda world: world.tenant("DELETE", f"/uploads/{NO_ID}"),
    ),
)
