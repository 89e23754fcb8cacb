"""A row of the walk over all use cases: one function, its way over HTTP and, where there is one, its command."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.platform.use_cases.walked_world import Outcome, World

Way: TypeAlias = Callable[[World], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UseCase:
    """A use case and the ways that lead to it. `entries`: the actions of its audit entries, in order.

    `refused_…`: ways that the use case refuses. `given`: brings the world to where the use case applies. `http` None: there is
    no route; `command` None: there is no command.
    """

    function: Callable[..., Any]
    entries: tuple[str, ...]
    http: Way | None = None
    refused_http: Way | None = None
    command: Way | None = None
    refused_command: Way | None = None
    given: Callable[[World], Awaitable[object]] | None = None

    @property
    def name(self) -> str:
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"
