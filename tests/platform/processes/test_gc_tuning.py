"""Collections pause during a start; its objects are excluded from those that follow."""

import subprocess
import sys

CODE = """
import gc
from loraplex.platform.processes.gc_tuning import freeze_gc, pause_gc
pause_gc()
assert not gc.isenabled()
created = [[] for _ in range(1000)]
freeze_gc()
frozen = gc.get_freeze_count()
assert frozen > 1000, frozen
assert not any(each is created for each in gc.get_objects())
assert gc.isenabled()
"""


def test_objects_of_the_start_are_frozen() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
