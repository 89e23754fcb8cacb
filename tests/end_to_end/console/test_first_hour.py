"""The first hour: a newcomer, a tenant's admin, an operator and a finance person each get to their result; and a lost network."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tests.end_to_end.console.conftest import PASSWORD, People, Visit, first_admin_link
from tests.end_to_end.console.journeys import Journey
from tests.end_to_end.console.test_first_day_journey import ANSWERED_MS, FILES, VALIDATED_MS
from tests.end_to_end.live_server import RUN, environment, until

ROOT = Path(__file__).resolve().parents[3]
TORCH = re.compile(r"torch==[\d.]+")
START = re.compile(r"```bash\n(pip install -e \. && loraplex serve[^\n]*)\n```")
BY_ITSELF = ["python3.11", "-m", "venv", "--upgrade-deps"]


def test_a_form_outlives_a_lost_network(visit: Visit) -> None:
    watched = visit("operator")
    watched.expected.append("ERR_INTERNET_DISCONNECTED")
    page = watched.open("/operator/console/tenants/new")
    page.get_by_label("Name", exact=True).fill("outlives")
    page.context.set_offline(True)
    create = page.get_by_role("button", name="Create tenant")
    create.click()
    expect(page.get_by_role("alert")).to_contain_text("Nothing was sent, and what you typed is still here")
    expect(page.get_by_label("Name", exact=True)).to_have_value("outlives")
    watched.check_access()
    page.context.set_offline(False)
    create.click()
    expect(page.get_by_role("heading", name="outlives is created", level=1)).to_be_visible()


def test_a_slow_form_shows_that_it_is_sent(visit: Visit) -> None:
    page = visit("operator").open("/operator/console/tenants/new")
    page.get_by_label("Name", exact=True).fill("slow")
    held: list[Route] = []
    # The probe is held, not the form: Playwright reads no attribute while a page is being left.
    page.route("**/livez", lambda route: held.append(route))
    create = page.get_by_role("button", name="Create tenant")
    with page.expect_request("**/livez"):
        create.click()
    expect(create).to_have_attribute("aria-busy", "true")
    create.click()
    [probe] = held
    probe.continue_()
    expect(page.get_by_role("heading", name="slow is created", level=1)).to_be_visible()


@pytest.mark.long
def test_an_admin_from_the_invitation_to_an_adapter_that_answers(visit: Visit, people: People) -> None:
    journey, watched = Journey("admin"), visit(None)
    link = first_admin_link(people, "invited")
    page = journey.watch(watched.page)
    with journey.step("join"):
        watched.open(link)
        page.get_by_label("Your name").fill("Ada")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Join").click()
        expect(page.get_by_role("heading", name="Four steps to the first answer")).to_be_visible()
    with journey.step("upload"):
        page.get_by_role("link", name="Upload an adapter").click()
        page.get_by_role("link", name=re.compile("New adapter|Upload")).first.click()
        page.get_by_label("Name", exact=True).fill("parrot")
        page.get_by_role("button", name="Create adapter").click()
        page.locator("#files").set_input_files(FILES)
    uploaded, report = journey.clicks, page.locator("#report")
    with journey.step("validation"):
        expect(report.get_by_text("ready", exact=True)).to_be_visible(timeout=VALIDATED_MS)
    with journey.step("alias"):
        report.get_by_role("link", name="Move production here").click()
        page.get_by_role("button", name=re.compile("Create alias|Move alias")).click()
        expect(page.get_by_role("heading", name="parrot:production")).to_be_visible()
    with journey.step("answer"):
        watched.open("/console/playground?model=parrot:production")
        page.get_by_label("Message").fill("Hello")
        page.get_by_label("max_tokens").fill("16")
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.locator("article.msg [data-slot=cost]")).to_contain_text("$", timeout=ANSWERED_MS)
    journey.show()
    assert journey.clicks - uploaded <= 8 and journey.seconds("validation") <= 60


@pytest.mark.long
def test_an_operator_from_a_tenant_to_its_price_and_the_live_page(visit: Visit, people: People) -> None:
    journey, watched = Journey("operator"), visit("operator")
    page = journey.watch(watched.page)
    with journey.step("tenant"):
        watched.open("/operator/console")
        page.get_by_role("link", name="New tenant").click()
        page.get_by_label("Name", exact=True).fill("priced")
        page.get_by_role("button", name="Create tenant").click()
        page.get_by_label("I have stored it").check()
        page.get_by_role("button", name="Done").click()
        page.get_by_label("Email of an admin").fill("admin@priced.example")
        page.get_by_role("button", name="Invite").click()
        expect(page.locator("#link")).to_contain_text("/console/sign-in?token=")
    with journey.step("price"):
        page.get_by_role("link", name="Done").click()
        page.get_by_role("link", name="Set prices of priced").click()
        for name, price in (("Prompt", "0.20"), ("Cached prompt", "0.02"), ("Completion", "0.80")):
            page.get_by_label(name, exact=True).fill(price)
        page.get_by_role("button", name="Preview").click()
        page.get_by_role("button", name="Publish these prices").click()
        expect(page.get_by_role("region", name="Versions for priced, USD")).to_contain_text("$0.200")
    with journey.step("live"):
        page.get_by_role("link", name="Live").click()
        expect(page.get_by_role("heading", name="Time to first token")).to_be_visible()
        expect(page.locator("figure.chart canvas")).to_have_count(6)
    watched.check_access()
    journey.show()


@pytest.mark.long
def test_finance_from_a_draft_to_a_verified_final_invoice(
    visit: Visit, people: People, tmp_path: Path
) -> None:
    """The demo's sample of last month is final: it is voided, drafted again and closed as a person closes it."""
    tenant = people.demo.access.tenants[-1].name
    watched = visit("operator")
    page = watched.open(f"/operator/console/invoices?tenant={tenant}&state=final")
    page.locator("tbody th a").first.click()
    page.get_by_role("link", name="Void…").click()
    page.get_by_role("textbox").fill(tenant)
    page.get_by_role("button", name="Void invoice").click()
    expect(page.get_by_text("The invoice is void")).to_be_visible()

    journey = Journey("finance")
    page = journey.watch(watched.page)
    folder = tmp_path / "export"
    with journey.step("draft"):
        watched.open("/operator/console/invoices")
        page.get_by_role("link", name="Close a month").click()
        page.get_by_label("Tenant", exact=True).fill(tenant)
        page.get_by_label("Month", exact=True).fill(last_month())
        page.get_by_role("button", name="Preview").click()
        expect(page.get_by_role("heading", name=re.compile("^Draft"))).to_be_visible()
    with journey.step("final"):
        page.get_by_role("button", name="Make it final").click()
        expect(page.get_by_text("The invoice is final and has its number.")).to_be_visible()
        watched.check_access()
    with journey.step("export"):
        line = page.locator("#verify").inner_text().splitlines()[0].replace("FOLDER", str(folder))
        assert loraplex(line, people.demo.data_dir) == 0
    with journey.step("verify"):
        assert loraplex(f"loraplex invoice verify {folder}") == 0
    with journey.step("tampered copy"):
        tamper(folder)
        assert loraplex(f"loraplex invoice verify {folder}") == 1
    journey.show()
    assert journey.seconds() <= 90


@pytest.mark.long
def test_a_newcomer_from_a_clone_to_the_first_answer(chromium: Browser, tmp_path: Path) -> None:
    """README's start in a new virtual environment, with wheels that pip has cached. PyPI's index stands in for that of torch."""
    journey, clone = Journey("newcomer"), tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    readme = (clone / "README.md").read_text()
    [torch, *_], [start] = TORCH.findall(readme), START.findall(readme)
    subprocess.run([*BY_ITSELF, str(tmp_path / "venv")], check=True)
    own = environment({}) | {"PATH": f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    own["VIRTUAL_ENV"] = str(tmp_path / "venv")
    own.pop("PYTHONPATH", None)
    with journey.step("install"):
        install, _, serve = start.partition(" && ")
        subprocess.run(
            f"pip install {torch} && {install}", shell=True, check=True, cwd=clone, env=own, stdout=sys.stderr
        )
    output = tmp_path / "output"
    with output.open("w") as out:
        server = subprocess.Popen([*serve.split(), "--port", "0"], cwd=clone, env=own, stdout=out)
    try:
        with journey.step("start"):
            until(lambda: "Serving" in output.read_text() or server.poll() is not None, 150, "it serves")
        link = re.search(r"http://\S+/console/sign-in\?token=\S+", output.read_text().split("Serving")[1])
        assert link, output.read_text()
        with journey.step("first answer"):
            answered(journey.watch(chromium.new_context().new_page()), link[0])
    finally:
        server.terminate()
        server.wait(90)
    journey.show()
    assert journey.seconds() <= 150


def answered(page: Page, link: str) -> None:
    page.goto(link)
    page.get_by_role("link", name="Playground").first.click()
    page.get_by_label("Message").fill("What is the capital of Italy?")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("article.msg [data-slot=text]")).to_have_text(re.compile(r"\w"), timeout=ANSWERED_MS)


def last_month() -> str:
    now = time.gmtime()
    return f"{now.tm_year - (now.tm_mon == 1)}-{(now.tm_mon - 2) % 12 + 1:02}"


def loraplex(line: str, data_dir: Path | None = None) -> int:
    """Run a command as it is shown, and return its status."""
    command = [sys.executable, "-c", RUN, *line.split()[1:]]
    own = environment({}) | ({} if data_dir is None else {"LORAPLEX_DATA_DIR": str(data_dir)})
    return subprocess.run(command, check=False, env=own).returncode


def tamper(folder: Path) -> None:
    """Change one digit of the total."""
    path = folder / "invoice.json"
    invoice = json.loads(path.read_text())
    invoice["total_micro"] += 1
    path.write_text(json.dumps(invoice))
