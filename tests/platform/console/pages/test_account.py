"""One's own account: password, theme, sessions; and what the navigation counts."""

from tests.platform.console.conftest import ORIGIN, Console, Page, SignedIn
from tests.platform.services.people.people_world import PASSWORD

from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.registry.adapters import AdapterRepository

NEW = "a longer new password"


async def second_session(console: Console, email: str) -> str:
    """Sign in again and return the token."""
    http = await console.browser()
    await http.post(
        "/console/sign-in", data={"email": email, "password": PASSWORD}, headers={"origin": ORIGIN}
    )
    return http.cookies["loraplex"]


async def test_a_new_password_renews_this_session_and_ends_the_others(
    console: Console, signed_in: SignedIn
) -> None:
    person = await signed_in("viewer")
    before, other = person.http.cookies["loraplex"], await second_session(console, person.session.email)
    action = "/console/account/password"
    wrong = await person.submit("/console/account", action, {"present": "wrong", "password": NEW})
    assert wrong.status_code == 422 and Page(wrong).texts(".error") == ["Email or password is wrong."]
    short = await person.submit("/console/account", action, {"present": PASSWORD, "password": "short"})
    assert Page(short).texts(".error") == ["A password has 12 to 256 characters."]
    done = await person.submit("/console/account", action, {"present": PASSWORD, "password": NEW})
    assert done.status_code == 303 and person.http.cookies["loraplex"] != before
    assert "The new password is in force." in (await person.page("/console/account")).response.text
    for token in (before, other):
        assert (await (await console.browser({"loraplex": token})).get("/console/account")).status_code == 303


async def test_a_theme_is_of_the_browser_and_needs_no_script(console: Console, signed_in: SignedIn) -> None:
    person = await signed_in("viewer")
    page = await person.page("/console/account")
    assert "data-theme" not in page.find("html").attributes
    assert page.texts(".seg [aria-current]") == ["System"]
    for theme, attribute, scheme in (
        ("dark", "dark", "dark"),
        ("light", "light", "light"),
        ('"><script>', None, "light dark"),
    ):
        chosen = await person.submit("/console/account", "/console/account/theme", {"theme": theme})
        assert chosen.headers["location"] == "/console/account"
        for path in ("/console/account", "/console/nothing-here"):
            page = Page(await person.get(path))
            assert page.find("html").attributes.get("data-theme") == attribute, path
            assert page.find("meta[name=color-scheme]").attributes["content"] == scheme
    assert (await person.post("/console/account/theme", {"theme": "dark"})).status_code == 403
    signed_out = await (await console.browser({"loraplex-theme": "dark"})).get("/console/sign-in")
    assert Page(signed_out).find("html").attributes["data-theme"] == "dark"


async def test_navigation_counts_what_works(console: Console, signed_in: SignedIn) -> None:
    person, other = await signed_in(), await signed_in(tenant="other")
    tenant_id = person.session.tenant_id
    assert tenant_id is not None
    async with console.database.as_tenant(tenant_id) as session:
        for name in ("pirate", "coral"):
            await AdapterRepository(session, tenant_id).get_or_create(name)
        keys = KeyRepository(session)
        made = [await keys.create(tenant_id, name, ["inference"]) for name in ("app", "old")]
        await keys.revoke(tenant_id, made[1].record.key_id)
    assert (await person.page("/console/account")).texts(".side .count") == ["2", "1"]
    assert (await other.page("/console/account")).texts(".side .count") == ["0", "0"]


async def test_sessions_end_one_by_one_and_all(console: Console, signed_in: SignedIn) -> None:
    person = await signed_in("viewer")
    page = await person.page("/console/account")
    assert page.texts("[aria-disabled=true]") == ["Sign out everywhere else"]
    tokens = [await second_session(console, person.session.email) for _ in range(3)]
    page = await person.page("/console/account")
    assert len(page.all("tbody tr")) == 4
    action = next(
        str(form.attributes["action"])
        for form in page.all("tbody form")
        if str(form.attributes["action"]).endswith("/end")
    )
    await person.post(action, page.form(action))
    assert len((await person.page("/console/account")).all("tbody tr")) == 3
    await person.submit("/console/account", "/console/account/sessions/end-all")
    assert len((await person.page("/console/account")).all("tbody tr")) == 1
    for token in tokens:
        assert (await (await console.browser({"loraplex": token})).get("/console/account")).status_code == 303


async def test_a_session_of_another_person_does_not_exist(signed_in: SignedIn) -> None:
    person, other = await signed_in("viewer"), await signed_in("viewer")
    form = (await person.page("/console/account")).form("/console/account/sessions/end-all")
    assert (await person.post(f"/console/account/sessions/{other.session.id}/end", form)).status_code == 404
    assert (await other.get("/console/account")).status_code == 200
