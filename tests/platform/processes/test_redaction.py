"""A corpus of secrets through every way a line reaches the log: none of them is in it."""

import io
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from loraplex.platform.processes.logs import LibraryLines, configure_logs
from loraplex.tenants.api_keys.key_format import generate_key
from loraplex.tenants.webhooks.signature import new_secret

KEYS = [generate_key(environment) for environment in ("live", "test", "op")]
SECRETS = {
    **{key.plaintext: key.secret for key in KEYS},
    # Cut off in the middle, as a client's log might.
    KEYS[0].plaintext[:-7]: KEYS[0].secret,
    (webhook := new_secret()): webhook.removeprefix("whsec_"),
    "Authorization: Bearer eyJhbGciOi.eyJzdWIi.c2lnbg": "eyJzdWIi",
    "bearer  abcdefgh12345678": "abcdefgh12345678",
    "postgresql://loraplex:p4ssw0rd@db.example/loraplex": "p4ssw0rd",
    "redis://:p4ssw0rd@cache.example:6379/0": "p4ssw0rd",
    "GET /console/sign-in?token=Zm9vYmFyYmF6&next=/console": "Zm9vYmFyYmF6",
    "https://issuer.example/callback?state=abc&code=4%2F0Adeu5": "4%2F0Adeu5",
    "cookie: __Host-loraplex=c2Vzc2lvbnRva2Vu; a=b": "c2Vzc2lvbnRva2Vu",
    "cookie: loraplex-operator=c2Vzc2lvbnRva2Vu": "c2Vzc2lvbnRva2Vu",
}
HARMLESS = (
    "request 0b9c status 200",
    "https://example.com/v1/chat/completions?limit=10",
    "loraplex=demo",
    "ipc:///run/engine.sock",
)


class Output(io.StringIO):
    """A standard error that is a terminal, or none."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(params=[False, True], ids=["json", "terminal"])
def output(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Output]:
    """What configured logs write; what was before is back after the test."""
    before, handlers = structlog.get_config(), set(logging.getLogger().handlers)
    found = Output(is_terminal=request.param)
    monkeypatch.setattr(sys, "stderr", found)
    for _ in range(2):
        configure_logs("info")
    yield found
    structlog.configure(**before)
    for handler in set(logging.getLogger().handlers) - handlers:
        logging.getLogger().removeHandler(handler)


def raised(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        structlog.get_logger("test").exception("failed")


# Ids that do not differ from process to process.
@pytest.mark.parametrize("text", SECRETS, ids=range(len(SECRETS)))
def test_no_secret_is_in_a_line(output: Output, text: str) -> None:
    log = structlog.get_logger("test")
    log.info(text)
    log.warning("a field", reason=text, nested={"deep": [text]})
    raised(text)
    logging.getLogger("some.library").warning("it said %s", text)
    written = output.getvalue()
    assert SECRETS[text] not in written
    assert written.count("[redacted]") >= 4


def test_public_ids_of_keys_stay(output: Output) -> None:
    structlog.get_logger("test").info("used", by=KEYS[0].plaintext)
    assert f"lpx_live_{KEYS[0].key_id}_[redacted]" in output.getvalue()


def test_fields_that_would_have_content_are_hidden(output: Output) -> None:
    structlog.get_logger("test").info("x", messages=[{"content": "hello"}], prompt="hello", password="hello")
    written = output.getvalue()
    assert "hello" not in written and written.count("[redacted]") == 3


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_lines_stay_as_they_are(output: Output, text: str) -> None:
    structlog.get_logger("test").info(text)
    assert text in output.getvalue()


def test_lines_of_libraries_are_like_all_others(output: Output) -> None:
    odd = logging.LogRecord("a.library", 35, __file__, 1, "it said %s", ("so",), None)
    (handler,) = [each for each in logging.getLogger().handlers if isinstance(each, LibraryLines)]
    handler.emit(odd)
    written = output.getvalue()
    assert "warning" in written and "it said so" in written and "a.library" in written
