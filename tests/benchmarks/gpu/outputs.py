"""What may come back from a machine: so many files of such a size, in few folders, with plain names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILES = 8
MAX_MIB = 16.0
MAX_FOLDERS = 2
PLAIN = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(slots=True)
class Outputs:
    """The folder of a run. What was in it before stays, whatever it is."""

    folder: Path
    max_files: int = MAX_FILES
    max_mib: float = MAX_MIB
    _before: frozenset[Path] = field(init=False)

    def __post_init__(self) -> None:
        self._before = frozenset(self._files())

    def drop_unfit(self, kept: Path) -> Iterator[tuple[str, str]]:
        """Delete this run's files that cannot come back, the latest first; `kept` stays. Yield each name and why."""
        place = 2
        new = sorted(
            (path for path in self._files() if path not in self._before and path != kept),
            key=lambda path: path.stat().st_mtime_ns,
        )
        for path in new:
            reason = self._unfit(path, place)
            if reason is None:
                place += 1
            else:
                path.unlink()
                yield path.relative_to(self.folder).as_posix(), reason

    def _unfit(self, path: Path, place: int) -> str | None:
        parts, mib = path.relative_to(self.folder).parts, path.stat().st_size / (1 << 20)
        if mib > self.max_mib:
            return f"{mib:.1f} MiB, at most {self.max_mib:g} come back"
        if place > self.max_files:
            return f"at most {self.max_files} files come back"
        if len(parts) > MAX_FOLDERS + 1 or not all(PLAIN.fullmatch(part) for part in parts):
            return f"names have letters, digits, '.', '_' and '-' and lie at most {MAX_FOLDERS} folders deep"
        return None

    def _files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()] if self.folder.exists() else []
