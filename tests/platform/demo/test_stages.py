"""The lines of a stage's child arrive as it writes them, and one that fails is quoted."""

import os
import sys

import pytest

from loraplex.platform.demo.errors import StageFailed
from loraplex.platform.demo.stages import QUOTED_LINES, run_stage


def test_lines_arrive() -> None:
    lines: list[str] = []
    run_stage("print", [sys.executable, "-c", "print('one'); print('two')"], _any_descriptor(), lines.append)
    assert lines == ["one\n", "two\n"]


def test_failure_quotes_only_the_last_lines() -> None:
    program = "import sys\nfor n in range(50): print('line', n, flush=True)\nsys.exit('it broke')"
    with pytest.raises(StageFailed) as caught:
        run_stage("conversion", [sys.executable, "-c", program], _any_descriptor())
    message = str(caught.value).splitlines()
    assert message[0] == "conversion failed with exit code 1:"
    assert "it broke" in message
    assert len(message) == 1 + QUOTED_LINES


def test_an_error_while_reading_ends_the_child() -> None:
    def refuse(line: str) -> None:
        os.kill(int(line), 0)
        seen.append(int(line))
        raise RuntimeError("stop")

    seen: list[int] = []
    program = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    with pytest.raises(RuntimeError, match="stop"):
        run_stage("sleep", [sys.executable, "-c", program], _any_descriptor(), refuse)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def _any_descriptor() -> int:
    return sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
