"""Settings and flags that files of `deploy/` name, checked against the code."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer.main

from loraplex.platform.cli.main import COMMANDS
from loraplex.platform.cli.serve import serve_command
from loraplex.platform.config import Settings


def require_setting_variable(name: str) -> None:
    """An environment variable of loraplex must be that of a setting."""
    setting = name.lower().removeprefix("loraplex_")
    assert setting in Settings.model_fields, name


def require_settings(values: Mapping[str, Any]) -> None:
    """Names and values, as `loraplex.toml` has them, must be what the settings allow."""
    assert values.keys() <= Settings.model_fields.keys(), values
    Settings.model_validate(dict(values))


def serve_flags() -> set[str]:
    """Every flag of `loraplex serve`."""
    app = typer.Typer()
    app.command()(serve_command)
    return {option for parameter in typer.main.get_command(app).params for option in parameter.opts}


def require_command(arguments: Sequence[str]) -> None:
    """The words after `loraplex` must be a command, those of `serve` its flags with values that settings allow."""
    assert arguments[0] in COMMANDS, arguments
    if arguments[0] != "serve":
        return
    flags = dict(_flags(arguments[1:]))
    assert set(flags) <= serve_flags(), arguments
    given: dict[str, Any] = {
        name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()
    }
    given.pop("config", None)
    if "engine" in given:
        given["engine"] = (given["engine"],)
    require_settings(given)


def _flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    assert len(arguments) % 2 == 0, arguments
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    assert all(re.fullmatch(r"--[a-z-]+", name) for name, _ in pairs), arguments
    return pairs
