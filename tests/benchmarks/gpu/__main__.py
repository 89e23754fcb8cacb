"""`python -m tests.benchmarks.gpu first|second|rest --out DIR`: what a card at hand for minutes is to answer, in order of value.

Invariant: a command ends within the sum of its stages' caps, and whatever was measured is on disk when something dies.
`--dry` runs it without a GPU: tiny shapes, kernels interpreted.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.benchmarks.gpu.children import forking_context
from tests.benchmarks.gpu.machine import Machine, unknown
from tests.benchmarks.gpu.outputs import MAX_FILES, MAX_MIB, Outputs
from tests.benchmarks.gpu.plans import LEAST_LEFT_S, PLANS, REST_S, caps_of_jobs, plan_of, texts
from tests.benchmarks.gpu.record import Recorder
from tests.benchmarks.gpu.state import card_of, counted, done, read_lines

from loraplex.platform.bench.report import commit

BEGAN = time.monotonic()
"""The first stage's seconds include what is imported behind this."""
TOO_LITTLE_TIME, NO_DEVICE = 3, 4
"""Exit statuses; 1 is that something failed, 2 that the arguments are wrong."""
DRY_S = 3600.0
FILES = {
    "--resume": "lines of earlier runs: what they hold is not run again",
    "--report": "print the report of these lines and run nothing",
}


def main(arguments: Sequence[str]) -> int:
    """Run the plan and print the report; 1 if anything failed."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.report:
        _print_reports(read_lines(asked.report))
        return 0
    if asked.plan is None or asked.out is None:
        parser.error("a plan and --out are needed, or --report")
    least = LEAST_LEFT_S.get(asked.plan, 0.0)
    if least and asked.left is None:
        parser.error(f"{asked.plan} needs --left: how many seconds are left")
    if least and asked.left < least:
        print(f"not begun: {asked.left:g} s are left, and {asked.plan} needs {least:g}")
        return TOO_LITTLE_TIME
    return _run(asked)


def _run(asked: argparse.Namespace) -> int:
    # Counting devices by the driver's library leaves CUDA uninitialised in the server: its forks could not use it else.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Both go on while this process imports torch.
    machine, context = Machine(is_dry=asked.dry), forking_context(is_dry=asked.dry)
    from tests.benchmarks.gpu.stages import Choice, Run

    plan = plan_of(asked.plan, caps_of_jobs(asked.out))
    left = asked.left or REST_S
    print("\n".join(texts(plan, left)), flush=True)
    head = machine.head(BEGAN + plan[0].seconds - time.monotonic()) or unknown()
    if not asked.dry and head["hardware"]["gpu"] is None:
        print("not begun: no CUDA device; --dry runs without one")
        return NO_DEVICE
    head |= {"run": uuid4().hex[:12], "commit": asked.commit or commit()}
    card = card_of(head | {"dry": asked.dry})
    known = [line for line in read_lines(asked.resume) if card_of(line) == card]
    finished = done(known, head["cache"], _parts(asked.again))
    outputs = Outputs(asked.out, asked.max_files, asked.max_mib)
    recorder = Recorder(asked.out, head, is_dry=asked.dry, known=known)
    deadline = BEGAN + (DRY_S if asked.dry else left)
    choice = Choice(plan, _parts(asked.only))
    Run(choice, finished, asked.dry, BEGAN, deadline, recorder, context, outputs).all_stages()
    _print_reports(recorder.lines)
    print(f"{time.monotonic() - BEGAN:.0f} s, {recorder.path}")
    return int(any(line["ok"] is False for line in recorder.lines[len(known) :]))


def _print_reports(lines: Sequence[dict[str, Any]]) -> None:
    """One for each card, with the lines that count."""
    from tests.benchmarks.gpu.report import report

    for card in dict.fromkeys(map(card_of, lines)):
        print(f"\n{card}\n")
        print("\n".join(report(counted([line for line in lines if card_of(line) == card]))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("plan", choices=PLANS, nargs="?")
    parser.add_argument("--out", type=Path, help="folder of the lines and traces")
    parser.add_argument("--left", type=float, help="seconds left for this command, at most")
    for name, purpose in FILES.items():
        parser.add_argument(name, type=_file, nargs="+", default=[], metavar="FILE", help=purpose)
    parser.add_argument("--again", default="", help="run again what of it has one of these in its name")
    parser.add_argument(
        "--only", default="", help="only cases, tests and jobs whose name contains one of these"
    )
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--commit", help="of the lines, where git does not say it")
    parser.add_argument("--max-files", type=int, default=MAX_FILES, help="in the folder, that come back")
    parser.add_argument("--max-mib", type=float, default=MAX_MIB, help="of each of them")
    return parser


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file")
    return path


def _parts(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
