"""The attacks by name."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from tests.benchmarks.attackers.grammars import send_growing_grammars
from tests.benchmarks.attackers.job import AttackJob

Attacker = Callable[[AttackJob, "Counter[str]"], Awaitable[None]]
"""Attacks until it is cancelled and counts the responses by status."""

ATTACKERS: Final[Mapping[str, Attacker]] = {"growing grammars": send_growing_grammars}
