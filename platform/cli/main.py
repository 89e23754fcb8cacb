"""`loraplex`: the command line. A command's module is imported when the command runs, so help is fast and imports no torch."""

import importlib
from importlib.metadata import version
from types import SimpleNamespace
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

# Name -> (module of this package and its attribute, one line of help).
COMMANDS: Final = {
    "serve": ("serve:serve_command", "Serve a base model and its tenants' adapters."),
    "chat": ("chat:chat_command", "Chat with the base model or an adapter of a running server."),
    "open": ("open:open_command", "Open the console, signed in by a link that works once."),
    "logs": ("logs:logs_command", "Print the log lines of the processes that serve."),
    "tour": (
        "tour:tour_command",
        "Try nine claims on the running demo, each with the request that repeats it.",
    ),
    "engine": ("engine:app", "List, add and drain the engines of a running server."),
    "tenant": ("tenant:app", "Create, list, show, suspend, resume and delete tenants."),
    "user": ("user:app", "Invite, list, reset, disable and enable people of the console."),
    "key": ("key:app", "Create, list, rotate and revoke API keys."),
    "adapter": ("adapter:app", "Push, list, alias, roll back and delete adapters."),
    "eval": ("eval:app", "Evaluate adapters and models by suites of cases."),
    "decision": ("decision:app", "Calibrate the probabilities of an adapter's decisions."),
    "rate-card": ("billing.rate_card:app", "Create, list and preview prices."),
    "credit": ("billing.credit:app", "Grant and list credits."),
    "invoice": ("billing.invoice:app", "Preview, finalize, list, pay, void, export and verify invoices."),
    "usage": ("billing.usage:app", "Export the usage ledger, and compare its sums."),
    "migrate": ("migrate:app", "Bring the database to the newest schema."),
    "backup": ("backup:backup_command", "Back up database, journals and adapters while servers run."),
    "restore": ("backup:restore_command", "Restore a backup into a new installation."),
    "bench": ("bench:app", "Measure speed: load generator and benchmarks."),
    "drill": ("drill:app", "Make a fault on purpose in a running installation, and report what it cost."),
    "grammar": ("grammar:app", "Check how schemas are enforced and which documents they accept."),
    "quantize": ("quantize:quantize_command", "Quantize a base model, if it passes the quality gate."),
    "release": ("release:app", "Check whether a release may replace another one."),
    "plan": ("plan:plan_command", "Work out the memory of a model, its adapters and its KV cache."),
    "doctor": ("doctor:app", "Check this machine and its configuration."),
}

COMPLETION: Final = ("install_completion", "show_completion")


class LazyCommands(TyperGroup):
    """Imports a command's module when the command is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Of these names Typer suggests one that resembles a mistyped command.
        self.commands = cast(Any, dict.fromkeys(COMMANDS))

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of this file."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the command of that name; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(f"loraplex.platform.cli.{module}"), attribute)
        return _as_command(cmd_name, found)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a command without importing any, or an option."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        names = (name for name in COMMANDS if name.startswith(incomplete))
        return [SimpleNamespace(value=name, help=COMMANDS[name][1], type="plain") for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list in `--help`, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _as_command(name: str, found: Any) -> Any:
    """The command of a typer application or of a typed function."""
    app = found
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
        app.command(name)(found)
    command = get_command(app)
    command.name = name
    # Completion is installed once, for all commands.
    command.params = [each for each in command.params if each.name not in COMPLETION]
    return command


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"loraplex {version('loraplex')}")
        raise typer.Exit


# Locals in a traceback could show a key or a prompt.
main = typer.Typer(
    cls=LazyCommands,
    name="loraplex",
    help="Serve one base model with the LoRA adapters of many tenants.",
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@main.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve one base model with the LoRA adapters of many tenants."""
