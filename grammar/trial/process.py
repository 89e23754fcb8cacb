"""Entry point of the process of trial compilations: `python -m loraplex.grammar.trial.process`, told on standard input.

Invariant: it has one thread whenever it forks, and it ends with its parent. The libraries are imported once, here.
"""

import gc
import signal
import time
from pathlib import Path
from typing import Final

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.parent_death import die_with_parent
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.tree import JsonValue
from loraplex.grammar.trial.child import FirstMask
from loraplex.grammar.trial.confinement import (
    lower_priority,
    resident_bytes,
    return_free_memory,
    threads,
)
from loraplex.grammar.trial.messages import CompileSpawn, Ready
from loraplex.grammar.trial.orders import OrderSource, Reporter
from loraplex.grammar.trial.server import ForkServer

STANDARD_INPUT: Final = 0
PRIORITY: Final = 7
"""A sixth of a busy core: at 10, a tenth, a trial of half a second missed its deadline of five where two engines shared two cores."""
ANY_OBJECT: Final = JsonValue({"type": "object"})
WARM_UP: Final = (
    GrammarSpec(backend="llguidance", source=emit_llguidance.emit(ANY_OBJECT)),
    GrammarSpec(backend="xgrammar", source=emit_xgrammar.emit(ANY_OBJECT)),
)


def main() -> None:
    """Prepare, then try what is ordered until standard input ends."""
    started = time.monotonic()
    report = Reporter()
    # Whoever stops a server's processes all at once stops this one by stopping its parent, which may still have to ask.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    orders = OrderSource(STANDARD_INPUT)
    spawn = orders.spawn()
    if spawn is None:
        return
    die_with_parent(spawn.parent_pid)
    first_mask = prepare(spawn)
    # Before this line it starts as fast as it can, once; after it, it is nobody's rival.
    lower_priority(PRIORITY)
    report(Ready(time.monotonic() - started, resident_bytes()))
    ForkServer(first_mask, spawn.limits, report).serve(orders)


def prepare(spawn: CompileSpawn) -> FirstMask:
    """Import, build the tokenizers and compile once by each library, so that a fork finds nothing left to set up."""
    vocabulary = read_vocabulary(spawn)
    from loraplex.grammar.trial.compilation import first_mask_of

    first_mask = first_mask_of(vocabulary)
    for spec in WARM_UP:
        first_mask(spec)
    if threads() != 1:
        raise RuntimeError(f"{threads()} threads after the start: a forked trial could hang on a lock")
    gc.collect()
    gc.freeze()
    return_free_memory()
    return first_mask


def read_vocabulary(spawn: CompileSpawn) -> Vocabulary:
    """`spawn.tokenizer` is a model folder or a `tokenizer.json`. Raises `OSError` or `ValueError`."""
    given = Path(spawn.tokenizer)
    file = given / "tokenizer.json" if given.is_dir() else given
    return Vocabulary(file.read_text("utf-8"), spawn.vocab_size, frozenset(spawn.end_token_ids))


if __name__ == "__main__":
    main()
