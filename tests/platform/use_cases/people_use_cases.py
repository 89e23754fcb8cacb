"""The rows of the walk for people. What only a signed-in person does has no other way: see `people/`."""

from typing import Final

from tests.platform.use_cases.use_case import UseCase
from tests.platform.use_cases.walked_world import NO_ID, Outcome, World
from tests.tenants.people.people_world import add_person

from loraplex.tenants.administration import console_evaluations, invitations, tenants
from loraplex.tenants.people import accounts, console_keys, sessions, sign_up, team
from loraplex.tenants.quotas import use_cases as quotas

MARA, EVE, NEW = "mara@example.com", "eve@example.com", "new@example.com"
BY_PEOPLE: Final = {
    *(sessions.end_session, sessions.end_own_session, sessions.end_all_sessions),
    *(sessions.end_member_sessions, sessions.leave_tenant, sessions.renew_session),
    *(sessions.switch_tenant, sessions.view_as_operator, sessions.open_session),
    *(console_keys.issue_console_token, console_evaluations.start),
    *(invitations.new_account, invitations.enter, team.reset_member, tenants.create_without_key),
    *(accounts.demo_link, accounts.issue_reset, team.remove_member, team.revoke_invitation),
    quotas.create_limited_key,
}
"""Use cases and their parts that only the console, the demo or `team.remove` calls."""


async def _members(world: World) -> None:
    await add_person(world.database, MARA, roles={world.tenant_id: "admin"})
    await add_person(world.database, EVE, roles={world.tenant_id: "viewer"})


async def _id_of(world: World, email: str) -> str:
    listed = await world.tenant("GET", "/users")
    return next(str(each["id"]) for each in listed.document["data"] if each["email"] == email)


async def _disabled(world: World) -> None:
    await _members(world)
    assert (await world.command("user", "disable", EVE)).accepted


async def _patch(world: World, email: str, if_match: str) -> Outcome:
    path = f"/users/{await _id_of(world, email)}"
    return await world.tenant("PATCH", path, {"role": "billing"}, if_match=if_match)


async def _remove(world: World, email: str) -> Outcome:
    return await world.tenant("DELETE", f"/users/{await _id_of(world, email)}")


async def _withdraw(world: World) -> Outcome:
    return await _remove(world, NEW)


async def _invited(world: World) -> None:
    assert (await world.tenant("POST", "/users", {"email": NEW, "role": "viewer"})).accepted


async def _open_sign_up(world: World) -> Outcome:
    return await world.command(
        *("user", "open-sign-up", "--tier", "free", "--weight", "0.5", "--limit", "tokens_per_day=5")
    )


async def _rate_card(world: World) -> None:
    body = {
        "scope": {"tier": "free"},
        "currency": "USD",
        "prices": {"prompt": 3, "cached_prompt": 1, "completion": 7},
        "effective_from": "2030-01-31T12:00:00Z",
    }
    created = await world.operator("POST", "/rate-cards", body)
    assert created.accepted, created.detail


async def _sign_up_is_open(world: World) -> None:
    await _rate_card(world)
    assert (await _open_sign_up(world)).accepted


ALL: Final = (
    UseCase(
        function=sign_up.publish_plan,
        entries=("sign_up.publish",),
        given=_rate_card,
        command=_open_sign_up,
        refused_command=lambda world: world.command("user", "open-sign-up", "--tier", "gold"),
    ),
    UseCase(
        function=sign_up.end_plan,
        entries=("sign_up.close",),
        given=_sign_up_is_open,
        command=lambda world: world.command("user", "close-sign-up"),
        refused_command=lambda world: world.command("user", "close-sign-up", "--nonsense"),
    ),
    UseCase(
        function=team.invite,
        entries=("user.invite",),
        http=lambda world: world.tenant("POST", "/users", {"email": NEW, "role": "viewer"}),
        command=lambda world: world.command("user", "create", NEW, "--tenant", "harbor", "--role", "viewer"),
        refused_http=lambda world: world.tenant("POST", "/users", {"email": NEW, "role": "owner"}),
        refused_command=lambda world: world.command("user", "create", "nonsense", "--tenant", "harbor"),
    ),
    UseCase(
        function=team.invite,
        entries=("user.invite",),
        http=lambda world: world.operator("POST", f"/tenants/{world.tenant_id}/users", {"email": NEW}),
        refused_http=lambda world: world.operator("POST", f"/tenants/{NO_ID}/users", {"email": NEW}),
    ),
    UseCase(
        function=team.change_role,
        entries=("user.change_role",),
        given=_members,
        http=lambda world: _patch(world, EVE, "1"),
        refused_http=lambda world: _patch(world, MARA, "1"),
    ),
    UseCase(
        function=team.remove,
        entries=("user.remove",),
        given=_members,
        http=lambda world: _remove(world, EVE),
        refused_http=lambda world: _remove(world, MARA),
    ),
    UseCase(
        function=team.remove,
        entries=("user.revoke_invitation",),
        given=_invited,
        http=_withdraw,
        refused_http=lambda world: world.tenant("DELETE", f"/users/{NO_ID}"),
    ),
    UseCase(
        function=accounts.invite_operator,
        entries=("user.invite",),
        command=lambda world: world.command("user", "create", "--operator"),
        refused_command=lambda world: world.command("user", "create", "nonsense", "--operator"),
    ),
    UseCase(
        function=accounts.reset_user,
        entries=("user.reset",),
        given=_members,
        command=lambda world: world.command("user", "reset", EVE, "--second-factor"),
        refused_command=lambda world: world.command("user", "reset", "nonsense"),
    ),
    UseCase(
        function=accounts.sign_in_link,
        entries=("user.sign_in_link",),
        given=_members,
        command=lambda world: world.command("open", "--user", EVE),
        refused_command=lambda world: world.command("open", "--user", "nonsense"),
    ),
    UseCase(
        function=accounts.disable_user,
        entries=("user.disable", "session.end_all"),
        given=_members,
        command=lambda world: world.command("user", "disable", EVE),
        refused_command=lambda world: world.command("user", "disable", NEW),
    ),
    UseCase(
        function=accounts.enable_user,
        entries=("user.enable",),
        given=_disabled,
        command=lambda world: world.command("user", "enable", EVE),
        refused_command=lambda world: world.command("user", "enable", NEW),
    ),
)
