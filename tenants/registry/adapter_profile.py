"""`AdapterProfile`: how one adapter version is to be asked and answered. Invariant: it holds no template and no text, only
choices from closed sets, so that a tenant's profile can never write into a prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict


@dataclass(frozen=True, slots=True)
class AdapterProfile:
    """`tool_style` None: the base model's. `defaults`: sampling parameters used where a request names none."""

    tool_style: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


class ProfileChange(TypedDict, total=False):
    """The fields to change; an absent one stays as it is."""

    tool_style: str | None
    defaults: Mapping[str, Any]
