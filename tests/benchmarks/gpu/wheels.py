"""Lists, and downloads, the packages that must travel to a machine with torch and Triton: `python -m tests.benchmarks.gpu.wheels`.

Invariant: what is listed is what the installed versions of here need, without what the machine has. With the tree it is no more
than may travel.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from tests.benchmarks.gpu import travel

from loraplex.platform.bench.report import commit

ROOT = Path(__file__).parents[3]
TESTS = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "safetensors",
    "msgspec",
    "structlog",
    "cachetools",
    "pytest",
)
"""What GPU tests import, directly; the engine's caches are `cachetools`."""
RUNNER = (*TESTS, "rich")
"""What the runner needs beside them: benchmark lines are `loraplex bench`'s."""
GRAMMARS = ("llguidance", "xgrammar")
"""JSON traffic goes through the masks of the product: without these its job says that they are not installed."""
PEERS = {"gemlite": "0.6.0.post2", "humming-kernels": "0.1.19"}
"""Optional: without one its cases say that it is not installed."""
PRESENT = (
    *(
        "torch",
        "triton",
        "transformers",
        "tokenizers",
        "safetensors",
        "peft",
        "accelerate",
        "numpy",
        "pytest",
    ),
    *(
        "rich",
        "regex",
        "psutil",
        "jinja2",
        "packaging",
        "huggingface-hub",
        "pyyaml",
        "tqdm",
        "cuda-bindings",
        "typing-extensions",
        "tabulate",
    ),
)
"""What an image with torch 2.11 and Triton 3.6 for models has; another list: `--present FILE`, lines as of `pip freeze`."""
PLATFORMS = tuple(
    f"manylinux{tag}_x86_64"
    for tag in ("_2_35", "_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "2014")
)


def closure(names: Iterable[str], present: Iterable[str] = ()) -> dict[str, str | None]:
    """These distributions and all they need, by their installed version; what needs only `present` ones is left out."""
    have, left = {canonical(name) for name in present}, [canonical(name) for name in names]
    found: dict[str, str | None] = {}
    while left:
        name = left.pop()
        if name in found or name in have:
            continue
        found[name] = _version(name)
        for text in _requires(name):
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                left.append(canonical(need.name))
    return found


def link(names: Iterable[str], folder: Path) -> None:
    """Fill an empty folder with links to these installed distributions and to what they need: an environment of its own."""
    for name in closure(names):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))


def canonical(name: str) -> str:
    """The form in which two names of one distribution are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return PEERS.get(name)


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def download(packages: dict[str, str | None], folder: Path, python: str) -> int:
    """Fetch each one's wheel for that Python; of a peer without wheels its source. How many could not be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    platforms = [option for tag in PLATFORMS for option in ("--platform", tag)]
    wheels = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    missing = 0
    for name, pinned in packages.items():
        wanted = name if pinned is None else f"{name}=={pinned}"
        forms = [wheels, ["--no-binary=:all:"]] if name in PEERS else [wheels]
        missing += not any(
            subprocess.run([*command, *form, wanted], check=False).returncode == 0 for form in forms
        )
    return missing


def main(arguments: list[str]) -> int:
    """Print NAME==VERSION of each package, one a line, then what travels and which commit it is.

    1 if a package could not be downloaded, or if more would travel than may.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu.wheels", description=__doc__)
    parser.add_argument("--present", type=Path, help="`pip freeze` of the machine, or names alone")
    parser.add_argument("--download", type=Path, help="folder for the wheels")
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--max-mib", type=float, default=travel.MAX_MIB, help="of the tree and the wheels")
    asked = parser.parse_args(arguments)
    present = PRESENT if asked.present is None else _names(asked.present.read_text())
    packages = closure((*RUNNER, *GRAMMARS, *PEERS), present)
    for name, pinned in sorted(packages.items()):
        print(name if pinned is None else f"{name}=={pinned}")
    folder = asked.download
    missing = 0 if folder is None else download(packages, folder, asked.python)
    may_travel, found = travel.verdict(travel.sizes(ROOT, [] if folder is None else [folder]), asked.max_mib)
    print(f"{found}; --commit {commit()}")
    return int(missing > 0 or not may_travel)


def _names(frozen: str) -> list[str]:
    return [re.split(r"[=@ ]", line)[0] for line in frozen.splitlines() if line and not line.startswith("#")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
