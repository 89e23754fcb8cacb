"""`Fields`: typed, checked access to a model's config.json, an untrusted file; every error names the field."""

from collections.abc import Mapping
from typing import Any

from loraplex.engine.errors import ModelError

MAX_DIMENSION = 1 << 24


class Fields:
    """Reads fields. `values` overrides `defaults`, which are what `transformers` assumes for an absent key. null counts as
    absent.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = values
        self._defaults = defaults

    def get(self, name: str) -> Any:
        value = self._values.get(name)
        return self._defaults.get(name) if value is None else value

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def size(self, name: str, most: int = MAX_DIMENSION) -> int:
        """A dimension or a count: 1 to `most`, never above 2**24. Required: absent raises `ModelError`."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(name, f"an integer from 1 to {most}")
        return value

    def number(self, name: str) -> float:
        """A finite number above 0. Required."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, "a finite number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """A boolean; absent is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false")
        return bool(value)

    def listing(self, name: str, length: int) -> list[Any]:
        """A list with at least `length` entries; the first `length` are returned."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) < length:
            raise self.error(name, f"a list of at least {length} entries")
        return value[:length]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; absent is empty."""
        value = self.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in listed):
            raise self.error(name, "a token id or a list of token ids")
        return tuple(listed)

    def error(self, name: str, allowed: str) -> ModelError:
        return ModelError(f"config.json: {name!r} must be {allowed}, got {self.get(name)!r}")
