"""Every command of the operator's page exists: functions, options, routes, metrics, and fields of the access line."""

import re
import shlex
import subprocess
from typing import Any

import pytest
from tests.deploy.test_guide import metrics
from tests.platform.web.route_table import SCOPES
from tests.runbooks.page import MAX_COMMANDS, commands, sections, shell
from tests.runbooks.situations import SITUATIONS
from typer.main import get_command

from loraplex.platform.cli.main import main

COMMANDS = [(name, line) for name in SITUATIONS for line in commands(sections()[name])]
FUNCTIONS = set(re.findall(r"^(\w+)\(\)", shell(), re.MULTILINE))
OTHERS = {"grep", "dmesg", "for"}


def called(function: str) -> list[tuple[str, str]]:
    """Section and argument of each call of a function of the page."""
    pattern = rf"(?<![-\w])(?<!loraplex ){function} (?:'([^']*)'|\"([^\"]*)\"|(\w+))"
    return [(name, "".join(found)) for name, line in COMMANDS for found in re.findall(pattern, line)]


def test_a_situation_takes_five_commands_at_most() -> None:
    for name in SITUATIONS:
        assert 1 <= len(commands(sections()[name])) <= MAX_COMMANDS, name


def test_the_commands_are_shell_and_begin_with_what_exists() -> None:
    text = "\n".join([shell(), *(line for _, line in COMMANDS)])
    assert (
        subprocess.run(["bash", "-n"], check=False, input=text, text=True, capture_output=True).stderr == ""
    )
    for _, line in COMMANDS:
        assert line.split()[0] in FUNCTIONS | OTHERS | {"loraplex"}, line


@pytest.mark.parametrize("line", [line for _, line in COMMANDS if line.startswith("loraplex ")])
def test_every_option_exists(line: str) -> None:
    command: Any = get_command(main)
    words = shlex.split(line.partition("|")[0])[1:]
    while hasattr(command, "get_command"):
        command = command.get_command(None, words.pop(0))
        assert command is not None, line
    names = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= names, line


@pytest.mark.parametrize("plane", ["operator", "tenant"])
def test_every_path_exists(plane: str) -> None:
    known = {route.removeprefix("GET ") for route in SCOPES if route.startswith("GET ")}
    found = called(plane)
    assert found
    for _, argument in found:
        path = re.sub(r"\$\w+", "{}", f"/{plane}/v1/{argument.partition('?')[0]}")
        assert path in {re.sub(r"\{\w+\}", "{}", each) for each in known}, argument


@pytest.mark.parametrize("function", ["now", "grown"])
def test_every_metric_exists(function: str) -> None:
    known = {family(name) for name in metrics()}
    for name, argument in called(function):
        for alternative in split(argument):
            assert any(each.startswith(family(alternative)) for each in known), (name, alternative)


def family(name: str) -> str:
    return re.sub(r"(?:_bucket|_total|_sum|_count)+$", "", name)


def split(pattern: str) -> list[str]:
    """The alternatives of a pattern, with those in its parentheses multiplied out."""
    found = re.search(r"\(([^()]*)\)", pattern)
    if found is None:
        return pattern.split("|")
    begin = pattern.rfind("|", 0, found.start()) + 1
    end = pattern.find("|", found.end())
    end = len(pattern) if end < 0 else end
    head, tail = pattern[begin : found.start()], pattern[found.end() : end]
    inner = "|".join(f"{head}{each}{tail}" for each in found[1].split("|"))
    return split(pattern[:begin] + inner + pattern[end:])
