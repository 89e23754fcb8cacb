"""Collections pause during the imports of a start, however these end; its objects are excluded from those that follow."""

import subprocess
import sys

CODE = """
import gc
from loraplex.platform.processes.gc_tuning import freeze_gc, paused_gc
try:
    with paused_gc():
        assert not gc.isenabled()
        imported = []
        raise ImportError
except ImportError:
    assert gc.isenabled()
assert not any(each is imported for each in gc.get_objects())
created = [[] for _ in range(1000)]
freeze_gc()
frozen = gc.get_freeze_count()
assert frozen > 1000, frozen
assert not any(each is created for each in gc.get_objects())
assert gc.isenabled()
"""


def test_objects_of_the_start_are_frozen() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
