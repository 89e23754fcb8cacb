"""A transaction is one statement: each statement hands the interpreter lock over, and waits for it again."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tenants.ledger.journal.fixtures import MAX_BYTES, progressed, reservation, used

from loraplex.tenants.ledger.journal.commits import Admit, End, JournalCommits, JournalRecorder, Progress
from loraplex.tenants.ledger.journal.file import Cursor, JournalConfig, JournalFile, connect
from loraplex.tenants.ledger.journal.records import reservation_text, usage_text


class CountedConnection:
    """A connection that keeps the statements that it ran."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(path)
        self.statements: list[str] = []

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        self.statements.append(sql)
        return self._connection.execute(sql, parameters)

    def close(self) -> None:
        self._connection.close()


def test_a_group_of_rows_is_written_and_forgotten_by_one_statement_each(tmp_path: Path) -> None:
    connection = CountedConnection(tmp_path / "journal.sqlite")
    file = JournalFile(
        tmp_path / "journal.sqlite", JournalConfig(max_bytes=MAX_BYTES), lambda path: connection
    )
    commits = JournalCommits(lambda: file, JournalRecorder())
    commits.load()
    first, second = reservation(), reservation()
    commits.write([Admit(first.id, reservation_text(first))])
    connection.statements.clear()
    answers = commits.write(
        [
            Admit(second.id, reservation_text(second)),
            Progress({second.id: progressed(1)}),
            End(first.id, usage_text(used(2))),
        ]
    )
    assert answers == [None, None, True]
    assert len(connection.statements) == 1
    commits.maintain(is_idle=False)
    assert len(connection.statements) == 1
    commits.call(lambda opened: opened.forget(commits.position))
    assert len(connection.statements) == 2
    assert [request.usage for _, request in file.open_requests()] == [progressed(1)]
    commits.close()


def test_progress_that_waited_for_the_disk_is_one_row_per_request(tmp_path: Path) -> None:
    """All of it has more values than SQLite takes in one statement."""
    connection = connect(tmp_path / "journal.sqlite")
    connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)
    file = JournalFile(
        tmp_path / "journal.sqlite", JournalConfig(max_bytes=MAX_BYTES), lambda path: connection
    )
    commits = JournalCommits(lambda: file, JournalRecorder())
    commits.load()
    running = [reservation() for _ in range(256)]
    commits.write([Admit(each.id, reservation_text(each)) for each in running])
    noted = [Progress({each.id: progressed(tokens) for each in running}) for tokens in range(1, 41)]
    assert commits.write(noted) == [None] * 40
    assert [request.usage for _, request in file.open_requests()] == [progressed(40)] * 256
    commits.close()
