"""`/docs` is complete without any other server."""

import hashlib
import re
from typing import Any

from tests.platform.web.route_table import in_process

from loraplex.platform.web.transport.docs import STATIC

ROW = re.compile(r"\| `([^`]+)` \| [^|]+ \| [^|]+ \| `([0-9a-f]{64})` \|")


def test_vendored_files_are_those_that_are_named() -> None:
    written = dict(ROW.findall((STATIC / "VENDORED.md").read_text()))
    assert written == {
        name: hashlib.sha256((STATIC / name).read_bytes()).hexdigest()
        for name in ("swagger-ui.css", "swagger-ui-bundle.js")
    }


async def test_the_page_loads_from_this_server_alone(start_gateway: Any) -> None:
    gateway = await start_gateway()
    async with in_process(gateway.app) as client:
        page = await client.get("/docs")
        addresses = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        loaded = [address for address in addresses if address.startswith("/docs/")]
        assert len(loaded) == 4 and set(addresses) == {*loaded, "/favicon.ico", "/openapi.json"}
        for address in loaded:
            assert (await client.get(address)).status_code == 200
        assert (await client.get("/docs/static/VENDORED.md")).status_code == 404
        assert (await client.get("/docs/")).headers["location"] == "/docs"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    style = (STATIC / "swagger-ui.css").read_text()
    assert not re.findall(r"url\((?![\"']?data:)", style) and "@import" not in style
