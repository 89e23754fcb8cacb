"""The team: invited, joined, given another role, signed out, removed; never without an admin."""

import re
from uuid import uuid4

import pytest
from tests.platform.web.browser import ORIGIN, Console, Page, SignedIn
from tests.tenants.people.people_world import PASSWORD

POST = {"origin": ORIGIN}


async def test_a_person_is_invited_joins_and_may_only_look(console: Console, signed_in: SignedIn) -> None:
    admin = await signed_in("admin")
    fields = (await admin.page("/console/team/invite")).form("/console/team/invite")
    assert fields["role"] == "developer"
    fields |= {"email": "vera@harbor.example", "role": "viewer"}
    shown = [Page(await admin.post("/console/team/invite", fields)) for _ in range(2)]
    assert shown[0].find("#link").text() == shown[1].find("#link").text()
    team = await admin.page("/console/team")
    assert len(team.texts("section:nth-of-type(2) tbody tr")) == 1
    address = shown[0].find("#link").text()
    assert address.startswith(f"{ORIGIN}/console/sign-in?token=") and address not in team.response.text
    http = await console.browser()
    page = Page(await http.get(address))
    assert page.find("h1").text() == "Join harbor"
    sent = page.form("/console/accept") | {"name": "Vera", "password": PASSWORD}
    joined = await http.post("/console/accept", data=sent, headers=POST)
    assert joined.headers["location"] == "/console"
    refused = await http.get("/console/team")
    assert refused.status_code == 403 and "tenant:admin" in refused.text
    assert "An admin of harbor" in refused.text
    assert "/console/team" not in Page(await http.get("/console/account")).texts("nav a")
    members = (await admin.page("/console/team")).texts("section:nth-of-type(1) tbody th")
    assert members[-1] == "vera@harbor.example"


async def test_wrong_invitations_keep_what_was_typed(signed_in: SignedIn) -> None:
    admin = await signed_in("admin")
    for email in ("no address", admin.session.email):
        response = await admin.submit("/console/team/invite", "/console/team/invite", {"email": email})
        assert response.status_code == 422
        assert Page(response).find("#email").attributes["value"] == email


async def test_a_change_of_a_member_ends_its_sessions(signed_in: SignedIn) -> None:
    admin, viewer = await signed_in("admin"), await signed_in("viewer")
    path = f"/console/team/{viewer.session.user_id}"
    fields = (await admin.page(path)).form(f"{path}/role")
    changed = await admin.post(f"{path}/role", {**fields, "role": "developer"})
    assert changed.headers["location"] == "/console/team"
    toast = (await admin.page("/console/team")).texts(".toast")
    assert toast == [f"{viewer.session.email} has the role developer from the next sign-in on."]
    assert (await admin.page("/console/team")).texts(".toast") == []
    assert (await viewer.get("/console/account")).status_code == 303
    fields["idempotency_key"] = "another"
    stale = await admin.post(f"{path}/role", {**fields, "role": "billing"})
    assert stale.status_code == 422 and "changed since it was read" in stale.text


async def test_signing_a_member_out_and_making_a_reset_link(signed_in: SignedIn) -> None:
    admin, viewer = await signed_in("admin"), await signed_in("viewer")
    path = f"/console/team/{viewer.session.user_id}"
    await admin.submit(path, f"{path}/sign-out")
    assert (await viewer.get("/console/account")).status_code == 303
    link = Page(await admin.submit(path, f"{path}/reset")).find("#link").text()
    assert re.fullmatch(rf"{ORIGIN}/console/sign-in\?token=\S+", link)


async def test_the_team_says_who_is_here_and_how_people_sign_in(signed_in: SignedIn) -> None:
    admin, viewer = await signed_in("admin"), await signed_in("viewer")
    page = await admin.page("/console/team")
    facts = dict(zip(page.texts("dl.pairs dt"), page.texts("dl.pairs dd"), strict=True))
    assert facts["Identity provider"] == "none" and facts["Self sign-up"] == "closed"
    assert facts["Reset by mail"] == "closed: an admin makes a link"
    assert "/console/keys?state=working" in [each.attributes["href"] for each in page.all("main a")]
    await admin.submit("/console/team", f"/console/team/{viewer.session.user_id}/sign-out")
    assert (await viewer.get("/console/account")).status_code == 303


async def test_the_last_admin_stays_and_the_page_says_why(signed_in: SignedIn) -> None:
    admin, viewer = await signed_in("admin"), await signed_in("viewer")
    path = f"/console/team/{admin.session.user_id}"
    page = await admin.page(path)
    assert page.texts("button[aria-disabled=true]") == ["Change role", "Remove member"]
    assert "without an admin" in page.text
    for action in ("role", "remove"):
        fields = page.form(f"{path}/{action}") | {"role": "viewer"}
        assert (await admin.post(f"{path}/{action}", fields)).status_code == 422
    other = f"/console/team/{viewer.session.user_id}"
    assert (await admin.submit(other, f"{other}/remove")).status_code == 303
    assert (await viewer.get("/console/account")).status_code == 303


@pytest.mark.parametrize("role", ["developer", "billing", "viewer"])
async def test_only_admins_manage_the_team(signed_in: SignedIn, role: str) -> None:
    person = await signed_in(role)
    form = (await person.page("/console/account")).form("/console/account/sessions/end-all")
    path = f"/console/team/{person.session.user_id}"
    for url in ("/console/team", "/console/team/invite", path):
        assert (await person.get(url)).status_code == 403
    for action in ("role", "sign-out", "reset", "remove"):
        assert (await person.post(f"{path}/{action}", form)).status_code == 403
    assert (await person.post("/console/team/invite", form)).status_code == 403


async def test_another_tenants_member_does_not_exist(signed_in: SignedIn) -> None:
    admin, foreign = await signed_in("admin"), await signed_in("admin", "quay")
    form = (await admin.page("/console/team/invite")).form("/console/team/invite")
    for entry in (foreign.session.user_id, uuid4()):
        path = f"/console/team/{entry}"
        assert (await admin.get(path)).status_code == 404
        for action in ("role", "sign-out", "reset", "remove"):
            fields = {**form, "role": "viewer", "revision": "1", "idempotency_key": uuid4().hex}
            assert (await admin.post(f"{path}/{action}", fields)).status_code == 404
    assert (await foreign.get("/console/account")).status_code == 200
