"""Entry point of the analysis process: `python -m loraplex.platform.preparation.process PARENT_PID`.

Invariant: it sends one reply per task, in order. It yields its core to other processes, and ends with its parent.
"""

import gc
import os
import resource
import signal
import sys
from typing import BinaryIO

from loraplex.grammar.errors import GrammarRefused
from loraplex.grammar.parent_death import die_with_parent
from loraplex.grammar.trial.confinement import lower_priority
from loraplex.platform.errors import GatewayError
from loraplex.platform.parameters.json_object import parse_object
from loraplex.platform.preparation.composed import build_plan
from loraplex.platform.preparation.messages import (
    LENGTH_BYTES,
    BuildPlan,
    CheckBody,
    Refusal,
    Reply,
    Setup,
    Task,
    decode_setup,
    decode_task,
    frame,
    length,
)
from loraplex.platform.preparation.packed_form import unpack_constraints

MEMORY_BYTES = 2 << 30


def main(parent_pid: int) -> None:
    """Perform tasks until standard input ends."""
    die_with_parent(parent_pid)
    # A signal to the process group must not end this process: its parent may still need it while draining, and ends it.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    lower_priority()
    # Messages of libraries may quote untrusted content.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    for kind, bound in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, MEMORY_BYTES)):
        resource.setrlimit(kind, (bound, bound))
    gc.freeze()
    message = _read_message(sys.stdin.buffer)
    if message is None:
        return
    setup = decode_setup(message)
    while (message := _read_message(sys.stdin.buffer)) is not None:
        sys.stdout.buffer.write(frame(perform(setup, decode_task(message))))
        sys.stdout.buffer.flush()


def perform(setup: Setup, task: Task) -> Reply:
    """Perform one task. Raises `MemoryError` only: then this process ends."""
    try:
        match task:
            case CheckBody(body=body):
                parse_object(body, setup.body)
                return Reply()
            case BuildPlan(packed=packed):
                constraints, style = unpack_constraints(packed)
                return Reply(build_plan(constraints, style, setup.grammar, setup.control_tokens))
    except (GatewayError, GrammarRefused) as refusal:
        return Reply(refusal=Refusal.of(refusal))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - reported by class: its text may quote untrusted content
        return Reply(broken=type(error).__name__)


def _read_message(stream: BinaryIO) -> bytes | None:
    """Read the next message; None at the end of input."""
    head = stream.read(LENGTH_BYTES)
    return stream.read(length(head)) if len(head) == LENGTH_BYTES else None


if __name__ == "__main__":
    main(int(sys.argv[1]))
