"""How a quantized checkpoint stores the weights of its modules, and which modules its targets match. Free of torch.

Invariant: a name is matched as compressed-tensors does, exact names before patterns before classes, in bounded time.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import regex

from loraplex.engine.errors import ModelError

LINEAR, EMBEDDING = "Linear", "Embedding"
"""The classes of modules that have a weight to quantize."""

_PATTERN = "re:"
MAX_PATTERNS = 256
MAX_PATTERN_LENGTH = 1024
MATCHING_TIMEOUT_S = 5.0
"""Time limit in seconds for all patterns and modules of a model together; a plain pattern takes microseconds."""


class Sharing(Enum):
    """How many weights share one scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight: integers (or float8_e4m3fn) of `num_bits`, packed into int32 words or one per element.

    `group_size` inputs share a scale where `sharing` is GROUP. Symmetric: its zero points are 0.
    """

    num_bits: int
    is_float: bool
    is_packed: bool
    sharing: Sharing
    group_size: int | None
    symmetric: bool


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """`targets` names modules, patterns (`re:`) and classes; `ignored` modules are never quantized, even if a target
    matches them.
    """

    targets: Mapping[str, StoredWeight]
    ignored: tuple[str, ...]

    def __post_init__(self) -> None:
        patterns = [name for name in (*self.targets, *self.ignored) if name.startswith(_PATTERN)]
        if len(patterns) > MAX_PATTERNS:
            raise ModelError(
                f"'quantization_config' has {len(patterns)} patterns; {MAX_PATTERNS} are allowed"
            )
        for pattern in patterns:
            _compiled(pattern)

    def of(self, modules: Iterable[tuple[str, str]]) -> dict[str, StoredWeight]:
        """Return the stored weights of `modules`, given as (name, class), without unquantized ones. Raises `ModelError`."""
        targets, ignored = _Matcher(self.targets), _Matcher(self.ignored)
        deadline = time.monotonic() + MATCHING_TIMEOUT_S
        found: dict[str, StoredWeight] = {}
        for name, kind in modules:
            target = targets.match(name, kind, deadline)
            if target is not None and ignored.match(name, kind, deadline) is None:
                found[name] = self.targets[target]
        return found


class _Matcher:
    """Finds the first of some targets that matches a module."""

    def __init__(self, targets: Iterable[str]) -> None:
        self._names = frozenset(targets)
        self._patterns = [
            (target, _compiled(target)) for target in sorted(self._names) if target.startswith(_PATTERN)
        ]

    def match(self, name: str, kind: str, deadline: float) -> str | None:
        if name in self._names:
            return name
        for target, pattern in self._patterns:
            if _matches(pattern, name, deadline):
                return target
        return kind if kind in self._names else None


def _compiled(target: str) -> "regex.Pattern[str]":
    pattern = target.removeprefix(_PATTERN)
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ModelError(
            f"'quantization_config' has a pattern of {len(pattern)} characters; {MAX_PATTERN_LENGTH} are allowed"
        )
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ModelError(f"'quantization_config': {pattern!r} is not a valid pattern: {error}") from error


def _matches(pattern: "regex.Pattern[str]", name: str, deadline: float) -> bool:
    left = deadline - time.monotonic()
    try:
        if left <= 0:
            # Many matches, each of them short, may together take as long as one that never ends.
            raise TimeoutError
        return pattern.match(name, timeout=left) is not None
    except TimeoutError as error:
        raise ModelError(
            f"'quantization_config': matching {pattern.pattern!r} takes longer than {MATCHING_TIMEOUT_S:g} s"
        ) from error
