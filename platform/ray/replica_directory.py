"""What the router of a gateway's process last heard of the replicas, for the engine client in the same process.

Invariant: the router's thread replaces the whole mapping, and readers on other threads never see a part of a change.
"""

from collections.abc import Mapping
from typing import Final

from loraplex.platform.ray.messages import ReplicaReport


class ReplicaDirectory:
    """`reports` of the replicas that take requests, by replica; None of one that has not reported yet."""

    def __init__(self) -> None:
        self.reports: Mapping[str, ReplicaReport | None] = {}


_DIRECTORIES: Final[dict[str, ReplicaDirectory]] = {}


def directory_of(app_name: str) -> ReplicaDirectory:
    """The one directory of an application in this process."""
    return _DIRECTORIES.setdefault(app_name, ReplicaDirectory())
