"""Objects of the start-up are excluded from later garbage collections."""

import subprocess
import sys

CODE = """
import gc
from loraplex.platform.processes.gc_tuning import freeze_gc
created = [[] for _ in range(1000)]
freeze_gc()
frozen = gc.get_freeze_count()
assert frozen > 1000, frozen
assert not any(each is created for each in gc.get_objects())
"""


def test_objects_of_the_start_are_frozen() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
