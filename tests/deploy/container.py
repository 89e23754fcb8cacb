"""Runs commands as a container engine would run the image: its user, environment and working directory, no capability, a root
that is read-only, the wheel in place of the repository, and the first process of its own process namespace.

Invariant: what the image says is read from `deploy/Dockerfile`; what a service adds comes from the caller. A container ends with
the process that started it, however that ends.
"""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.deploy.dockerfile import Image
from tests.platform.process_table import DIES_WITH_PARENT, children

ROOT: Final = Path(__file__).parents[2]
SITE: Final = "opt/loraplex/site"
BIN: Final = "opt/loraplex/bin"
NAMESPACES: Final = (*DIES_WITH_PARENT, "unshare", "--mount", "--pid", "--net", "--fork", "--kill-child")
PROGRAMS: Final = ("unshare", "nsenter", "setpriv", "ip")


def can_run() -> bool:
    """Whether this machine has the programs, and this user the right to make namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        return False
    return subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Container:
    """A folder with what containers share: the unpacked wheel and the volumes, a folder for each path in the image."""

    folder: Path
    image: Image
    volumes: tuple[str, ...]
    files: Mapping[str, Path]

    @classmethod
    def prepared(
        cls, folder: Path, wheel: Path, image: Image, volumes: Sequence[str], files: Mapping[str, Path]
    ) -> "Container":
        """Unpack the wheel, and create each volume, which gets owner and mode from the image when it is first used."""
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / SITE)
        scripts = folder / BIN
        scripts.mkdir(parents=True)
        entry = "from loraplex.platform.cli.main import main; main()"
        for name, arguments in (("python", ""), ("loraplex", f" -P -c {shlex.quote(entry)}")):
            (scripts / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{arguments} "$@"\n')
            (scripts / name).chmod(0o755)
        for path in volumes:
            volume = folder / "volumes" / path.strip("/")
            volume.mkdir(parents=True)
        return cls(folder, image, tuple(volumes), files)

    def volume(self, path: str) -> Path:
        """The folder that a volume is on this machine."""
        return self.folder / "volumes" / path.strip("/")

    @contextmanager
    def running(
        self, arguments: Sequence[str], settings: Mapping[str, str], read_only: Sequence[str] = ()
    ) -> "Iterator[Contained]":
        """Run the image's entry point with `arguments`. `read_only`: volumes that it may not write. Ends it with the block."""
        stage = self.folder / f"stage-{len(list(self.folder.glob('stage-*')))}"
        stage.mkdir()
        script = self._script(stage, [*self.image.entry_point, *arguments], settings, read_only)
        log = stage.with_suffix(".log")
        with log.open("w") as output:
            process = subprocess.Popen(
                [*NAMESPACES, "bash", "-euc", script],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield Contained(process, log, self._entered(settings))
        finally:
            process.kill()
            process.wait()

    def _script(
        self, stage: Path, command: Sequence[str], settings: Mapping[str, str], read_only: Sequence[str]
    ) -> str:
        """The mounts from the outside in, then the command in place of the shell."""
        root = f"{stage}/root"
        lines = [
            f"mount -t tmpfs none {stage}",
            f"mkdir {stage}/upper {stage}/work {root}",
            f"mount -t overlay -o lowerdir=/,upperdir={stage}/upper,workdir={stage}/work overlay {root}",
            f"mkdir -p {root}/opt/loraplex {root}{self.image.work_folder}",
            f"mount --bind {self.folder}/opt/loraplex {root}/opt/loraplex",
            f"mount -t tmpfs -o mode=1777 none {root}/tmp",
            f"mkdir -p {root}{ROOT}",
            f"mount -t tmpfs -o ro none {root}{ROOT}",
        ]
        for folder in _python_folders():
            lines += [
                f"mkdir -p {root}{folder}",
                f"mount --bind {folder} {root}{folder}",
                *(f"chmod a+x {root}{parent}" for parent in folder.parents if len(parent.parts) > 1),
            ]
        lines += [f"chroot {root} sh -ec {shlex.quote(each)}" for each in self.image.all("RUN")]
        for path in self.volumes:
            source = self.volume(path)
            lines += [
                f"mkdir -p {root}{path}",
                f"chown --reference {root}{path} {source} && chmod --reference {root}{path} {source}",
                f"mount --bind {source} {root}{path}",
            ]
            lines += [f"mount -o remount,bind,ro {root}{path}"] * (path in read_only)
        for path, source in self.files.items():
            lines += [
                f"mkdir -p {Path(root + path).parent}",
                f"[ -d {source} ] && mkdir -p {root}{path} || touch {root}{path}",
                f"mount --bind {source} {root}{path}",
            ]
        lines += [
            "ip link set lo up",
            f"mount -t proc none {root}/proc",
            f"mount --bind /dev {root}/dev",
            f"mount -o remount,ro {root}",
            f"exec chroot {root} {shlex.join([*self._entered(settings), *command])}",
        ]
        return "\n".join(lines)

    def _entered(self, settings: Mapping[str, str]) -> list[str]:
        """What goes before a command of the image: its environment, folder and user, without any capability."""
        environment = {**self.image.environment, **settings, "PYTHONPATH": f"/{SITE}"}
        assigned = [f"{name}={value}" for name, value in environment.items()]
        user = ["--reuid", str(self.image.uid), "--regid", str(self.image.uid), "--clear-groups"]
        bounds = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        # The kernel drops the death signal of `--kill-child` where the user changes.
        return ["env", "-i", "-C", self.image.work_folder, *assigned, *DIES_WITH_PARENT, *user, *bounds]


@dataclass(frozen=True)
class Contained:
    """A started container: `process` is the engine's side, `pid` its first process."""

    process: "subprocess.Popen[bytes]"
    log: Path
    entered: Sequence[str]

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in the container, as its user."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--root"]
        return subprocess.run(
            [*enter, *self.entered, *command], capture_output=True, text=True, check=False, timeout=120
        )

    @property
    def pid(self) -> int:
        (first,) = children(self.process.pid)
        return first

    @property
    def output(self) -> str:
        return self.log.read_text()


def _python_folders() -> list[Path]:
    """Where this interpreter and its packages are, beside what they import of the repository."""
    found = {Path(sys.prefix), Path(sys.base_prefix)}
    found |= {Path(entry) for entry in sys.path if Path(entry).name == "site-packages"}
    return sorted(
        each for each in found if not any(each != other and each.is_relative_to(other) for other in found)
    )
