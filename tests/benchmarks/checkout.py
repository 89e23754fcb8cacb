"""Where processes of benchmarks import `tests` from: they import nothing from their working directory."""

from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parents[2]
