"""Ends a child process when its parent dies: by the kernel's death signal (Linux), or by the end of its standard input.

Invariant: when `die_with_parent` has returned, the parent was alive after the death signal was armed.
"""

import ctypes
import os
import signal
import sys
import threading
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PARENT_GONE_STATUS: Final = 75
READ_BYTES: Final = 4096


def die_with_parent(parent_pid: int) -> None:
    """Arm SIGKILL for the parent's death (Linux); exit at once if the parent is dead already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(PARENT_GONE_STATUS)


def die_at_end_of_input(descriptor: int) -> None:
    """Exit when the other end of `descriptor` is closed. Bytes that arrive before that are ignored."""
    threading.Thread(target=_wait_for_end, args=(descriptor,), daemon=True, name="parent-watch").start()


def _wait_for_end(descriptor: int) -> None:
    while os.read(descriptor, READ_BYTES):
        continue
    os._exit(PARENT_GONE_STATUS)
