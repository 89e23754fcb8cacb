"""What `deploy/Dockerfile` says of the image that runs: user, environment, working directory, entry point, volumes."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DOCKERFILE: Final = Path(__file__).parents[2] / "deploy" / "Dockerfile"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a stage, in one line."""

    name: str
    text: str


@dataclass(frozen=True)
class Image:
    """A target: the instructions of its stage after those of the stages that it is made from."""

    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[str]:
        """The texts of each instruction of that name."""
        return [each.text for each in self.instructions if each.name == name]

    def listed(self, name: str) -> list[str]:
        """The last instruction of that name, in its JSON form."""
        return list(json.loads(self.all(name)[-1]))

    @property
    def uid(self) -> int:
        """The numeric user; the group has the same number."""
        user, group = self.all("USER")[-1].split(":")
        assert user == group
        return int(user)

    @property
    def environment(self) -> Mapping[str, str]:
        """ENV, with what the base image has in PATH."""
        pairs = re.findall(r"(\w+)=(\S+)", " ".join(self.all("ENV")))
        return {
            name: value.replace("$PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
            for name, value in pairs
        }

    @property
    def work_folder(self) -> str:
        return self.all("WORKDIR")[-1]

    @property
    def entry_point(self) -> list[str]:
        return self.listed("ENTRYPOINT")

    @property
    def health_check(self) -> list[str]:
        return list(json.loads(self.all("HEALTHCHECK")[-1].partition(" CMD ")[2]))


def instructions() -> list[Instruction]:
    """Every instruction of the file, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines() if line.strip()]
    return [Instruction(*line.split(maxsplit=1)) for line in lines]


def stages() -> dict[str, tuple[str, list[Instruction]]]:
    """Name of a stage -> the image it begins with, and its instructions."""
    found: dict[str, tuple[str, list[Instruction]]] = {}
    current: list[Instruction] = []
    for each in instructions():
        if each.name == "FROM":
            base, _, name = each.text.split()
            current = []
            found[name] = base, current
        else:
            current.append(each)
    return found


def image(target: str) -> Image:
    """The image of a target."""
    base, own = stages()[target]
    before = image(base).instructions if base in stages() else ()
    return Image((*before, *own))
