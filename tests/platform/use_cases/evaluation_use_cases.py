"""The rows of the walk for suites, evaluations and gates."""

from typing import Final

from tests.platform.use_cases.adapter_use_cases import TENANT, add_aliased
from tests.platform.use_cases.use_case import UseCase
from tests.platform.use_cases.walked_world import NO_ID, Outcome, World

from loraplex.tenants.administration import gated_aliases
from loraplex.tenants.evaluations import use_cases as evaluations

ALIAS: Final = "/adapters/voice/aliases/production"
GATE: Final = f"{ALIAS}/gate"
EVALUATIONS: Final = "/adapters/voice/versions/1/evaluations"
CASE: Final = {"messages": [{"role": "user", "content": "hi"}], "expect": {"exact": "hi"}}


async def _upload(world: World, name: str = "harbor") -> Outcome:
    return await world.tenant("POST", f"/suites?name={name}", CASE)


async def _with_suite(world: World) -> None:
    assert (await _upload(world)).accepted


async def _with_evaluation(world: World) -> None:
    await add_aliased(world)
    assert (await _start(world)).accepted


async def _start(world: World, baseline: int = 2) -> Outcome:
    return await world.tenant("POST", EVALUATIONS, {"suite": "conformance", "baseline": baseline})


async def _cancel(world: World) -> Outcome:
    (evaluation,) = world.dump()["evaluations"]
    return await world.tenant("POST", f"/evaluations/{evaluation['id']}/cancel")


async def _set_gate(world: World, path: str = GATE, min_pass: float = 0.9) -> Outcome:
    return await world.tenant("PUT", path, {"suite": "conformance", "min_pass": min_pass})


async def _gated(world: World) -> None:
    await add_aliased(world)
    assert (await _set_gate(world)).accepted


ALL: Final = (
    UseCase(
        function=evaluations.add_suite,
        entries=("suite.create",),
        http=_upload,
        refused_http=lambda world: _upload(world, "conformance"),
    ),
    UseCase(
        function=evaluations.delete_suite,
        entries=("suite.delete",),
        given=_with_suite,
        http=lambda world: world.tenant("DELETE", "/suites/harbor"),
        refused_http=lambda world: world.tenant("DELETE", "/suites/nonesuch"),
    ),
    UseCase(
        function=evaluations.start,
        entries=("evaluation.start",),
        given=add_aliased,
        http=_start,
        refused_http=lambda world: _start(world, baseline=1),
    ),
    UseCase(
        function=evaluations.cancel,
        entries=("evaluation.cancel",),
        given=_with_evaluation,
        http=_cancel,
        refused_http=lambda world: world.tenant("POST", f"/evaluations/{NO_ID}/cancel"),
    ),
    UseCase(
        function=evaluations.set_gate,
        entries=("alias.gate",),
        given=add_aliased,
        http=_set_gate,
        refused_http=lambda world: _set_gate(world, "/adapters/voice/aliases/nonesuch/gate"),
    ),
    UseCase(
        function=evaluations.delete_gate,
        entries=("alias.gate.delete",),
        given=_gated,
        http=lambda world: world.tenant("DELETE", GATE),
        refused_http=lambda world: world.tenant("DELETE", "/adapters/voice/aliases/fresh/gate"),
    ),
    UseCase(
        function=gated_aliases.roll_back,
        entries=("alias.rollback",),
        given=_gated,
        http=lambda world: world.tenant("POST", f"{ALIAS}/rollback"),
        command=lambda world: world.command("adapter", "rollback", "voice", *TENANT),
        refused_http=lambda world: world.tenant("POST", "/adapters/voice/aliases/fresh/rollback"),
        refused_command=lambda world: world.command("adapter", "rollback", "voice", "fresh", *TENANT),
    ),
    UseCase(
        function=gated_aliases.move,
        entries=("alias.gate.override", "alias.move"),
        given=_gated,
        http=lambda world: world.tenant(
            *("PUT", ALIAS),
            {"version": 1, "override": {"reason": "an outage"}},
            if_match="2",
        ),
        command=lambda world: world.command(
            *("adapter", "alias", "voice", "production", "1", "--override-gate", "an outage", *TENANT)
        ),
        refused_http=lambda world: world.tenant("PUT", ALIAS, {"version": 1}, if_match="2"),
        refused_command=lambda world: world.command("adapter", "alias", "voice", "production", "1", *TENANT),
    ),
)
