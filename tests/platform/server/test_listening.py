"""The address of a listener is one that a client on its machine reaches."""

import pytest

from loraplex.platform.server.listening import root_url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::7", "http://[fd00::7]:8000"),
        ("gpu.example", "http://gpu.example:8000"),
    ],
)
def test_root_url_can_be_reached(host: str, url: str) -> None:
    assert root_url(host, 8000) == url
