"""Entry point of the value-validation processes: `python -m loraplex.grammar.judge.process PARENT_PID`.

Invariant: one request per line of standard input, one result per line of standard output, and no value in any log.
The parent kills the process at its deadline, since a schema of a kilobyte can demand endless work.
"""

import json
import os
import resource
import signal
import sys

import msgspec

from loraplex.grammar.errors import GrammarInvalid, SchemaNotSatisfied
from loraplex.grammar.json_schema.validator import Validator
from loraplex.grammar.judge.messages import ValidationRequest, ValueResult, encode
from loraplex.grammar.parent_death import die_with_parent
from loraplex.grammar.trial.confinement import lower_priority

MEMORY_BYTES = 1 << 30


def main(parent_pid: int) -> None:
    """Validate until standard input ends."""
    die_with_parent(parent_pid)
    # A signal to all of a server's processes must not end this one: its parent may still need it, and ends it.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    lower_priority()
    # Error output of a library may quote the value.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    for kind, bound in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, MEMORY_BYTES)):
        resource.setrlimit(kind, (bound, bound))
    decode = msgspec.json.Decoder(ValidationRequest).decode
    while line := sys.stdin.buffer.readline():
        sys.stdout.buffer.write(encode(validate_value(decode(line))) + b"\n")
        sys.stdout.buffer.flush()


def validate_value(request: ValidationRequest) -> ValueResult:
    """Return whether the value satisfies the schema. Raises `MemoryError` only: then this process ends."""
    try:
        Validator(json.loads(request.schema)).validate(request.value)
    except (SchemaNotSatisfied, GrammarInvalid) as error:
        return ValueResult(str(error))
    except MemoryError:
        raise
    # A panic of a Rust library is not an `Exception`; the text of either may quote the value.
    except BaseException as error:  # noqa: BLE001
        return ValueResult("the value could not be validated", type(error).__name__)
    return ValueResult(None)


if __name__ == "__main__":
    main(int(sys.argv[1]))
