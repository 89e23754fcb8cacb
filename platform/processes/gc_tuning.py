"""Excludes start-up objects from garbage collection, because a full collection stops all streams of a process.

With the libraries' half a million objects, each large request body triggered a collection that took 120 to 220 ms. During the
imports of a start nearly nothing is garbage, and collections took a fifth of their time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Import in this block without collections, which begin after it, however it ends. They exclude what was imported.

    For imports alone: a model that loads, or a start that waits for one, may leave tensors to a collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_gc() -> None:
    """Run `gc.collect()` and `gc.freeze()`, which exclude start-up objects from later collections. Call once, before serving."""
    gc.collect()
    gc.freeze()
