"""Stylesheets and scripts: their names, their cache, and that the vendored ones are what their packages have."""

import gzip
import hashlib
import re

from tests.platform.web.browser import Console, SignedIn

from loraplex.platform.web.console_app import STATIC

ROW = re.compile(r"\| `(vendor/[^`]+)` \| [^|]+ \| [^|]+ \| `([0-9a-f]{64})` \|")


def test_vendored_files_are_those_of_their_packages() -> None:
    written = dict(ROW.findall((STATIC / "VENDORED.md").read_text()))
    found = {
        path.relative_to(STATIC).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (STATIC / "vendor").iterdir()
        if path.suffix in (".js", ".css")
    }
    assert written == found


async def test_files_are_kept_for_a_year_and_sent_compressed(console: Console, signed_in: SignedIn) -> None:
    page = await (await signed_in()).page("/console/account")
    http = await console.browser()
    for address in [node.attributes["href"] for node in page.all("link[rel=stylesheet]")]:
        response = await http.get(str(address), headers={"accept-encoding": "gzip"})
        assert response.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert response.headers["content-encoding"] == "gzip"
        assert response.headers["content-type"].startswith("text/css")
        plain = await http.get(str(address), headers={"accept-encoding": "identity"})
        assert plain.content == response.content
        assert len(gzip.compress(plain.content)) < 8000


async def test_neither_licences_nor_files_without_their_digest_are_served(console: Console) -> None:
    http = await console.browser()
    for name in ("tokens.css", "VENDORED.md", "vendor/htmx.LICENSE.txt", "../app.py"):
        assert (await http.get(f"/console/static/{name}")).status_code == 404


def test_the_script_of_every_page_is_small() -> None:
    assert len(gzip.compress((STATIC / "console.js").read_bytes())) <= 3000
