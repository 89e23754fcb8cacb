"""Ends a child process when its standard input ends, which means that its parent has died; needs no death signal."""

import os
import threading

from loraplex.grammar.parent_death import PARENT_GONE_STATUS, die_with_parent

__all__ = ["die_at_end_of_input", "die_with_parent"]

READ_BYTES = 4096


def die_at_end_of_input(descriptor: int) -> None:
    """Exit when the other end of `descriptor` is closed. Bytes that arrive before that are ignored."""
    threading.Thread(target=_wait_for_end, args=(descriptor,), daemon=True, name="parent-watch").start()


def _wait_for_end(descriptor: int) -> None:
    while os.read(descriptor, READ_BYTES):
        continue
    os._exit(PARENT_GONE_STATUS)
