"""Entry point of the compile-check process: `python -m loraplex.grammar.trial.process`, configured on standard input.

Invariant: it has one thread whenever it forks, and it ends with its parent. Libraries are imported once, before any
fork.
"""

import gc
import signal
import time
from pathlib import Path
from typing import Final

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.grammar_memory import return_free_memory
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.parent_death import die_with_parent
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.tree import JsonValue
from loraplex.grammar.trial.child import FirstMask
from loraplex.grammar.trial.confinement import (
    lower_priority,
    resident_bytes,
    threads,
)
from loraplex.grammar.trial.messages import CompileSpawn, Ready
from loraplex.grammar.trial.orders import OrderSource, Reporter
from loraplex.grammar.trial.server import ForkServer

STANDARD_INPUT: Final = 0
PRIORITY: Final = 7
"""A sixth of a busy core. At 10 (a tenth), a half-second check missed its 5 s deadline while two engines shared two cores."""
ANY_OBJECT: Final = JsonValue({"type": "object"})
WARM_UP: Final = (
    GrammarSpec(backend="llguidance", source=emit_llguidance.emit(ANY_OBJECT)),
    GrammarSpec(backend="xgrammar", source=emit_xgrammar.emit(ANY_OBJECT)),
)


def main() -> None:
    """Prepare, then run checks until standard input ends."""
    started = time.monotonic()
    report = Reporter()
    # A signal to all of a server's processes must not end this one: its parent may still need it, and ends it.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    orders = OrderSource(STANDARD_INPUT)
    spawn = orders.spawn()
    if spawn is None:
        return
    die_with_parent(spawn.parent_pid)
    first_mask = prepare(spawn)
    # The start runs at full priority, once; checks must not compete with engines.
    lower_priority(PRIORITY)
    report(Ready(time.monotonic() - started, resident_bytes()))
    ForkServer(first_mask, spawn.limits, report).serve(orders)


def prepare(spawn: CompileSpawn) -> FirstMask:
    """Import, build the tokenizers and compile once with each library, so that a fork needs no set-up."""
    vocabulary = read_vocabulary(spawn)
    from loraplex.grammar.trial.compilation import first_mask_of

    first_mask = first_mask_of(vocabulary)
    for spec in WARM_UP:
        first_mask(spec)
    if threads() != 1:
        raise RuntimeError(f"{threads()} threads after the start: a forked check could hang on a lock")
    gc.collect()
    gc.freeze()
    return_free_memory()
    return first_mask


def read_vocabulary(spawn: CompileSpawn) -> Vocabulary:
    """Read a model folder or a `tokenizer.json`. Raises `OSError` or `ValueError`."""
    given = Path(spawn.tokenizer)
    file = given / "tokenizer.json" if given.is_dir() else given
    return Vocabulary(file.read_text("utf-8"), spawn.vocab_size, frozenset(spawn.end_token_ids))


if __name__ == "__main__":
    main()
