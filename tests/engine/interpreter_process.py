"""Pytest under Triton's interpreter, many runs for one start: `python -m tests.engine.interpreter_process TARGET...`.

Imports what collecting the targets imports and says "ready"; then each line of standard input, a JSON list of pytest's
arguments, is a run in a fork of its own, and a line of standard output its status. What pytest prints goes to standard error.
"""

import json
import os
import sys
import threading

import pytest
from tests.engine.interpreted_types import share_shapes

BROKEN = 70


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    share_shapes()
    pytest.main(["-qq", "--collect-only", "-p", "no:cacheprovider", *sys.argv[1:]])
    assert threading.active_count() == 1, "a fork takes no other thread with it"
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(f"{_run(json.loads(line))}\n")


def _run(arguments: list[str]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = BROKEN
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
