"""What travels to another machine: the files that git tracks or would track, and carried folders; how large it is.

Invariant: a file counts once, also where a carried folder lies in the tree.
"""

import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

MAX_MIB = 64.0
NAMED = 5
MIB = 1 << 20


def sizes(root: Path, carried: Iterable[Path]) -> Counter[str]:
    """Bytes by part: a top folder or file of the tree, or a carried folder. Raises `CalledProcessError` outside a checkout."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    files = {root / name: Path(name).parts[0] for name in names if name}
    for folder in carried:
        files |= {path: str(folder) for path in folder.resolve().rglob("*")}
    found: Counter[str] = Counter()
    for path, part in files.items():
        # Links travel as links, and what is deleted but tracked does not travel.
        if path.is_file() and not path.is_symlink():
            found[part] += path.stat().st_size
    return found


def verdict(parts: Counter[str], max_mib: float) -> tuple[bool, str]:
    """Whether it may travel, and the sum; with the largest parts where it may not."""
    total = parts.total() / MIB
    if total <= max_mib:
        return True, f"{total:.1f} MiB travel, of {max_mib:g}"
    largest = ", ".join(f"{part} {size / MIB:.1f}" for part, size in parts.most_common(NAMED))
    return False, f"{total:.1f} MiB would travel, at most {max_mib:g} may; the largest parts: {largest}"
