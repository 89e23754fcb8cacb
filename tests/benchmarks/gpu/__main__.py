"""`python -m tests.benchmarks.gpu --stages probe,build,check,time --budget SECONDS --out DIR`: one command for a GPU at hand.

Invariant: nothing starts whose estimate does not fit the budget, and whatever was measured is on disk when something dies.
Without a GPU every stage runs as a dry run: tiny shapes, kernels interpreted.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tests.benchmarks.gpu.cases import OPERATIONS
from tests.benchmarks.gpu.children import forking_context
from tests.benchmarks.gpu.record import Recorder, read_lines
from tests.benchmarks.gpu.report import report
from tests.benchmarks.gpu.stages import STAGES, Choice, Run


def main(arguments: Sequence[str]) -> int:
    """Run the stages and print the report; 1 if anything failed."""
    asked = _parser().parse_args(arguments)
    if asked.report:
        print("\n".join(report(read_lines(asked.report))))
        return 0
    is_dry = asked.dry or not torch.cuda.is_available()
    recorder = Recorder(asked.out, is_dry=is_dry, driver=_driver())
    began = time.monotonic()
    choice = Choice(
        tuple(asked.stages), tuple(asked.operations), tuple(filter(None, asked.only.split(","))), asked.out
    )
    Run(choice, is_dry, began + asked.budget, recorder, forking_context(is_dry=is_dry)).all_stages()
    print("\n".join(report(recorder.lines)))
    print(f"{time.monotonic() - began:.0f} s, {recorder.path}")
    return int(any(line["ok"] is False for line in recorder.lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--stages", default=STAGES, type=_list_of(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all of it")
    folder = Path("tests/benchmarks/results")
    parser.add_argument("--out", type=Path, default=folder, help="folder of the lines")
    parser.add_argument(
        "--operations", default=OPERATIONS, type=_list_of(OPERATIONS), help="kernels, in order"
    )
    parser.add_argument(
        "--only", default="", help="only cases, tests and jobs whose name contains one of these"
    )
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes on the CPU, also where there is a GPU"
    )
    parser.add_argument(
        "--report", type=Path, nargs="+", help="print the report of these files and run nothing"
    )
    return parser


def _list_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"allowed are {', '.join(known)}")
        return names

    return parse


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
