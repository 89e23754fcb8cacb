"""A child that cannot outlive its parent: a kernel signal on Linux, and the end of standard input everywhere.

Invariant: after `die_with_parent` returns, the parent was alive when the death signal was already armed.
"""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
PARENT_GONE_STATUS = 75
READ_BYTES = 4096


def die_with_parent(parent_pid: int) -> None:
    """Arm SIGKILL upon the parent's death (Linux); exit at once if it is dead already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(PARENT_GONE_STATUS)


def die_at_end_of_input(descriptor: int) -> None:
    """Exit when the other end of `descriptor` is closed; what arrives before is ignored."""
    threading.Thread(target=_wait_for_end, args=(descriptor,), daemon=True, name="parent-watch").start()


def _wait_for_end(descriptor: int) -> None:
    while os.read(descriptor, READ_BYTES):
        continue
    os._exit(PARENT_GONE_STATUS)
