"""A person's way through the console: what it takes in clicks and seconds, printed with `-s`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Page

CLICKS = "addEventListener('mousedown', event => event.isTrusted && counted(), true)"


@dataclass
class Journey:
    """`clicks` so far; `steps`: name, clicks and seconds of each."""

    name: str
    clicks: int = 0
    steps: list[tuple[str, int, float]] = field(default_factory=list)

    def watch(self, page: Page) -> Page:
        """Count the clicks of a page's browser."""
        page.context.expose_function("counted", self._click)
        page.context.add_init_script(CLICKS)
        return page

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Take what a step costs."""
        began, clicks = time.monotonic(), self.clicks
        yield
        self.steps.append((name, self.clicks - clicks, time.monotonic() - began))

    def seconds(self, *without: str) -> float:
        """All seconds but those of the steps named, in which the person waits for a machine."""
        return sum(seconds for name, _, seconds in self.steps if name not in without)

    def show(self) -> None:
        """Print the journey."""
        for name, clicks, seconds in self.steps:
            print(f"{self.name}: {name}: {clicks} clicks, {seconds:.1f} s")
        print(f"{self.name}: all: {self.clicks} clicks, {self.seconds():.1f} s")

    def _click(self) -> None:
        self.clicks += 1
