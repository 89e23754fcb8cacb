"""A child that ends when its standard input does: whoever started it is gone then, wherever there is no death signal."""

import os
import threading

from loraplex.grammar.parent_death import PARENT_GONE_STATUS

READ_BYTES = 4096


def die_at_end_of_input(descriptor: int) -> None:
    """Exit when the other end of `descriptor` is closed; what arrives before is ignored."""
    threading.Thread(target=_wait_for_end, args=(descriptor,), daemon=True, name="parent-watch").start()


def _wait_for_end(descriptor: int) -> None:
    while os.read(descriptor, READ_BYTES):
        continue
    os._exit(PARENT_GONE_STATUS)
