"""Which series a PromQL expression asks for, and whether a scrape has any."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import promql_parser
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import MatchOp

VARIABLES: Final = {
    "$__rate_interval": "5m",
    "$__range": "1h",
    "$job": ".*",
    "$instance": ".*",
    "$engine": ".*",
    "$tenant": ".*",
}
OF_PROMETHEUS: Final = frozenset(("job", "instance"))
"""Labels that Prometheus adds to a scrape."""


@dataclass(frozen=True)
class Selector:
    """A metric and what its labels must be. `recorded`: a rule makes it, no scrape has it."""

    name: str
    matchers: tuple[tuple[str, MatchOp, str], ...]

    @property
    def recorded(self) -> bool:
        return self.name.startswith("loraplex:")

    def found_in(self, scrape: "Scrape") -> bool:
        return any(
            all(self._matches(labels, each) for each in self.matchers) for labels in scrape.of(self.name)
        )

    def _matches(self, labels: Mapping[str, str], matcher: tuple[str, MatchOp, str]) -> bool:
        name, op, wanted = matcher
        if name in OF_PROMETHEUS:
            return True
        value = labels.get(name, "")
        if op in (MatchOp.Equal, MatchOp.NotEqual):
            return (value == wanted) is (op == MatchOp.Equal)
        return (re.fullmatch(wanted, value) is not None) is (op == MatchOp.Re)


class Scrape:
    """The samples of one answer of `/metrics`."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                self.samples.setdefault(sample.name, {})[labels] = sample.value

    def of(self, name: str) -> Iterable[Mapping[str, str]]:
        return (dict(labels) for labels in self.samples.get(name, {}))

    @property
    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {(name, labels) for name, found in self.samples.items() for labels in found}


def filled(expression: str, model_name: str) -> str:
    """An expression of a dashboard with values in place of its variables."""
    for name, value in {**VARIABLES, "$model_name": model_name}.items():
        expression = expression.replace(name, value)
    return expression


def selectors(expression: str) -> list[Selector]:
    """All selectors of an expression. Raises `ValueError` where it is none."""
    found: list[Selector] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            matchers = tuple((each.name, each.op, each.value) for each in node.matchers.matchers)
            found.append(Selector(str(node.name), matchers))
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found
