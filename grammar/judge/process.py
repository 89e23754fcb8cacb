"""Entry point of the processes that judge finished values: `python -m loraplex.grammar.judge.process PARENT_PID`.

Invariant: one question a line on standard input, one answer a line on standard output; whoever asks kills it when it takes
too long, since a schema of a kilobyte can ask for more work than ends. No value is told to a log.
"""

import json
import os
import resource
import signal
import sys

import msgspec

from loraplex.grammar.errors import GrammarInvalid, SchemaNotSatisfied
from loraplex.grammar.json_schema.validator import Validator
from loraplex.grammar.judge.messages import Question, ValueResult, encode
from loraplex.grammar.parent_death import die_with_parent
from loraplex.grammar.trial.confinement import yield_to_others

MEMORY_BYTES = 1 << 30


def main(parent_pid: int) -> None:
    """Judge until standard input ends."""
    die_with_parent(parent_pid)
    # Whoever stops a server's processes all at once stops this one by stopping its parent, which may still have to ask.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    yield_to_others()
    # What breaks down inside a library may show the value.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    for kind, bound in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, MEMORY_BYTES)):
        resource.setrlimit(kind, (bound, bound))
    decode = msgspec.json.Decoder(Question).decode
    while line := sys.stdin.buffer.readline():
        sys.stdout.buffer.write(encode(answer(decode(line))) + b"\n")
        sys.stdout.buffer.flush()


def answer(question: Question) -> ValueResult:
    """Whether the value satisfies the schema."""
    try:
        Validator(json.loads(question.schema)).judge(question.value)
    except (SchemaNotSatisfied, GrammarInvalid) as error:
        return ValueResult(str(error))
    return ValueResult(None)


if __name__ == "__main__":
    main(int(sys.argv[1]))
