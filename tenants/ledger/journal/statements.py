"""SQL of a journal's file: its pragmas, its tables, what is written through its views and what is read.

Invariant: a released `FORMAT` keeps its tables; another one needs a reader of the older.
"""

from typing import Final

FORMAT: Final = 1
PAGE_BYTES: Final = 4096

# No other process reads the file: the index of the log is in memory.
EXCLUSIVE: Final = "PRAGMA locking_mode = EXCLUSIVE"
# The log is checkpointed after callers have their answer.
PRAGMAS: Final = (
    f"PRAGMA page_size = {PAGE_BYTES}",
    "PRAGMA auto_vacuum = INCREMENTAL",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA fullfsync = ON",
    "PRAGMA wal_autocheckpoint = 0",
    "PRAGMA secure_delete = OFF",
    "PRAGMA temp_store = MEMORY",
)
SCHEMA: Final = (
    "CREATE TABLE admissions (position INTEGER PRIMARY KEY, reservation TEXT NOT NULL)",
    "CREATE TABLE progress (admission INTEGER PRIMARY KEY, usage TEXT NOT NULL)",
    "CREATE TABLE ends (position INTEGER PRIMARY KEY, admission INTEGER NOT NULL, usage TEXT NOT NULL)",
    "CREATE TABLE rejections (position INTEGER PRIMARY KEY, reason TEXT NOT NULL, rejected_at TEXT NOT NULL)",
    "CREATE TABLE state (shipped INTEGER NOT NULL)",
    "CREATE TABLE reserve (bytes BLOB)",
    "INSERT INTO state VALUES (0)",
    f"PRAGMA user_version = {FORMAT}",
)
LAST_POSITION: Final = """
SELECT max(shipped, (SELECT coalesce(max(position), 0) FROM admissions), (SELECT coalesce(max(position), 0) FROM ends)), shipped
FROM state
"""
RECORDS: Final = """
SELECT position, reservation, NULL FROM admissions WHERE position > ?1
UNION ALL
SELECT e.position, a.reservation, e.usage FROM ends e JOIN admissions a ON a.position = e.admission WHERE e.position > ?1
ORDER BY 1 LIMIT ?2
"""
OPEN_REQUESTS: Final = """
SELECT a.position, a.reservation, p.usage FROM admissions a LEFT JOIN progress p ON p.admission = a.position
WHERE a.position NOT IN (SELECT admission FROM ends) ORDER BY a.position
"""
DEAD_LETTERS: Final = """
SELECT r.position, a.reservation, NULL, r.reason, r.rejected_at FROM rejections r JOIN admissions a ON a.position = r.position
UNION ALL
SELECT r.position, a.reservation, e.usage, r.reason, r.rejected_at
FROM rejections r JOIN ends e ON e.position = r.position JOIN admissions a ON a.position = e.admission
ORDER BY 1
"""
REJECT: Final = """
INSERT OR REPLACE INTO rejections SELECT ?1, ?2, ?3
WHERE EXISTS (SELECT 1 FROM admissions WHERE position = ?1) OR EXISTS (SELECT 1 FROM ends WHERE position = ?1)
"""
# Requests whose end was shipped and not rejected.
FORGOTTEN: Final = """
SELECT admission FROM ends
WHERE position > new.after AND position <= new.until AND position NOT IN (SELECT position FROM rejections)
"""
# Views of this connection alone: a row that is inserted into one is a change of several tables, so that a whole transaction
# is one statement.
VIEWS: Final = (
    "CREATE TEMP VIEW writes (kind, position, admission, text) AS SELECT 0, 0, 0, 0",
    """
    CREATE TEMP TRIGGER replace_admission INSTEAD OF INSERT ON writes WHEN new.kind = 'replaced' BEGIN
        DELETE FROM admissions WHERE position = new.position;
        DELETE FROM rejections WHERE position = new.position;
        DELETE FROM progress WHERE admission = new.position;
    END
    """,
    """
    CREATE TEMP TRIGGER write_admission INSTEAD OF INSERT ON writes WHEN new.kind = 'admission' BEGIN
        INSERT INTO admissions VALUES (new.position, new.text);
    END
    """,
    """
    CREATE TEMP TRIGGER write_end INSTEAD OF INSERT ON writes WHEN new.kind = 'end' BEGIN
        INSERT INTO ends VALUES (new.position, new.admission, new.text);
    END
    """,
    """
    CREATE TEMP TRIGGER write_progress INSTEAD OF INSERT ON writes WHEN new.kind = 'progress' BEGIN
        INSERT OR REPLACE INTO progress VALUES (new.admission, new.text);
    END
    """,
    "CREATE TEMP VIEW forgotten (after, until) AS SELECT 0, 0",
    f"""
    CREATE TEMP TRIGGER forget INSTEAD OF INSERT ON forgotten BEGIN
        DELETE FROM progress WHERE admission IN ({FORGOTTEN});
        DELETE FROM rejections WHERE position IN ({FORGOTTEN});
        DELETE FROM admissions WHERE position IN ({FORGOTTEN});
        DELETE FROM ends
        WHERE position > new.after AND position <= new.until AND position NOT IN (SELECT position FROM rejections);
        UPDATE state SET shipped = new.until WHERE shipped = new.after;
    END
    """,
)
WRITE: Final = "INSERT INTO writes VALUES "
FORGET: Final = "INSERT INTO forgotten VALUES (?, ?)"
