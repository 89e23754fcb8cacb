"""The newest revision is found without alembic, and is the one that alembic leads to."""

import subprocess

from alembic.script import ScriptDirectory

from loraplex.platform.datastores.migrations import (
    alembic_config,
    current_revision,
    downgrade,
    newest_revision,
)
from loraplex.platform.processes.child_process import python_command


def test_the_newest_file_is_the_head_of_one_chain() -> None:
    scripts = ScriptDirectory.from_config(alembic_config("postgresql://u@/d"))
    chain = [script.revision for script in scripts.walk_revisions()]
    assert chain == sorted(chain, reverse=True)
    assert newest_revision() == chain[0] == scripts.get_current_head()


def test_revisions_of_a_database(database_url: str, empty_database_url: str) -> None:
    assert current_revision(empty_database_url) is None
    assert current_revision(database_url) == newest_revision()
    downgrade(database_url, "base")
    assert current_revision(database_url) is None


def test_a_database_with_nothing_to_migrate_is_checked_without_alembic(database_url: str) -> None:
    program = (
        "import sys\n"
        "from loraplex.platform.datastores.connections import ensure_schema\n"
        "ensure_schema(sys.argv[1], migrate=True)\n"
        "print('alembic' in sys.modules)"
    )
    ended = subprocess.run(
        python_command("-c", program, database_url), check=True, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "False\n"
