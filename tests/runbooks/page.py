"""The commands of the operator's page. Invariant: what is tested and run is the text of the page, byte by byte."""

import re
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "deploy" / "guide" / "runbooks.md"
MAX_COMMANDS: Final = 5
_BLOCK: Final = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def shell() -> str:
    """The functions that the commands call, without the variables."""
    text = PAGE.read_text()
    begin, end = text.index("<!-- shell: begin -->"), text.index("<!-- shell: end -->")
    (block,) = _BLOCK.findall(text[begin:end])
    return "\n".join(line for line in block.splitlines() if not line.startswith("export "))


def sections() -> dict[str, str]:
    """The sections by the names that links have."""
    parts = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-"): text
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def commands(section: str) -> list[str]:
    """The commands of a section, one a line."""
    return [line for block in _BLOCK.findall(section) for line in block.splitlines()]
