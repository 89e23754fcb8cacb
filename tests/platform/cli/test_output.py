"""Tables for people: short ids, times relative to now, at most 80 columns, and whole rows without a terminal."""

import io
import sys
from datetime import UTC, datetime, timedelta

import pytest

from loraplex.platform.cli import key
from loraplex.platform.cli.output import brief, print_rows


def row(name: str) -> dict[str, object]:
    now = datetime.now(UTC)
    times = {"created_at": now - timedelta(minutes=3), "last_used_at": now, "expires_at": now + timedelta(90)}
    facts = {"key_id": "4hT9abcd1234", "name": name, "scopes": ["inference", "adapters:write"]}
    return facts | {each: time.isoformat() for each, time in times.items()} | {"revoked_at": None}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_of_80_columns_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    print_rows([row("production")], False, key.COLUMNS)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    for word in ("4hT9abcd1234", "production", "inference,", "adapters:write", "last used", "3\u00a0min ago"):
        assert word in text
    assert "revoked" not in text, "no row has it"


def test_a_pipe_gets_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([row("n" * 200), row("second")], False, key.COLUMNS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "n" * 200 in lines[2]


def test_a_name_that_looks_like_a_time_or_a_digest_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("2026-11-20T14:28 rollout", "ab" * 32)
    print_rows([row(name) for name in names], False, key.COLUMNS)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert brief("digest", "ab" * 32) == "abababababab…" and brief("revoked_at", None) is None
