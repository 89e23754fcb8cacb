"""`loraplex tour`: tries nine claims on a running demo and prints each with what was sent, what came back and how to repeat it.

Exit codes: 0 every claim held, 1 otherwise.
"""

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from loraplex.adapters.errors import AdaptersError
from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.cli.tour import claims
from loraplex.platform.cli.tour.visitor import Found, Visitor
from loraplex.platform.config import load_settings
from loraplex.platform.demo.demo_file import DEMO_FILE, read_demo_file
from loraplex.platform.drills.installation import find_installation
from loraplex.platform.startup_errors import StartError
from loraplex.tenants.errors import TenantsError

Claim: TypeAlias = Callable[[Visitor], Awaitable[Found]]
CLAIMS: Final[tuple[tuple[str, Claim], ...]] = (
    ("One step computes three tenants' adapters and the base model.", claims.one_step),
    ("Another tenant's adapter does not exist, and no cached prompt is shared.", claims.isolation),
    ("A schema holds at temperature 2.", claims.schema),
    ("A model calls a tool with valid arguments.", claims.tool),
    ("A limit of 10 admits exactly 10 of 30 requests, and says why.", claims.limit),
    ("A split alias is undone by one request; a header names what served.", claims.alias),
    ("A killed engine comes back, and the ledger has what clients know.", claims.engine_kill),
    ("A final invoice is recomputed offline, and a changed copy refused.", claims.invoice),
    ("Rows of three adapters run beside each other as rows of one do.", claims.mixing),
)
TIMEOUT_S: Final = 120.0
FAILURES: Final = (httpx.HTTPError, TenantsError, AdaptersError, StartError)
READ_KEYS: Final = (
    "import json; d = json.load(open({path!r})); t = d['tenants'][0]; "
    "print(t['api_key'], t['admin_key'], d['operator_key'])"
)


def tour_command(
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="The demo's data directory.")] = None,
) -> None:
    """Try nine claims on the running demo, in about 40 seconds. It kills the demo's engine once; what it makes it removes."""
    with exit_codes():
        if not asyncio.run(_tour(data_dir)):
            raise typer.Exit(1)


async def _tour(data_dir: Path | None) -> bool:
    """Try every claim; return whether all held. Raises `StartError` where no demo runs."""
    settings, console = load_settings({"data_dir": data_dir}), Console(soft_wrap=True, highlight=False)
    access = read_demo_file(settings.data_dir)
    if access is None:
        raise StartError(f"no demo in {settings.data_dir}: start one with `loraplex serve --demo`")
    installation, held = await find_installation(settings, (access.base_url,)), 0
    program = shlex.quote(READ_KEYS.format(path=str(installation.data_dir / DEMO_FILE)))
    console.print("The keys of the commands below, in bash:")
    console.print(f"   read -r KEY ADMIN_KEY OPERATOR_KEY < <(python3 -c {program})", markup=False)
    async with httpx.AsyncClient(base_url=access.base_url, timeout=TIMEOUT_S) as http:
        for number, (text, claim) in enumerate(CLAIMS, 1):
            began = time.monotonic()
            try:
                async with AsyncExitStack() as made:
                    found = await claim(
                        Visitor(access=access, http=http, installation=installation, cleanup=made)
                    )
            except FAILURES as error:
                found = Found(False, "-", f"{type(error).__name__}: {error}", "-")
            held += found.held
            verdict = "[green]held[/green]" if found.held else "[red]BROKEN[/red]"
            console.print(f"{number}. {escape(text)} {verdict}, {time.monotonic() - began:.1f} s")
            for name, value in zip(("sent", "got", "repeat"), found[1:], strict=True):
                console.print(f"   {name:<6} {value}", markup=False)
    console.print(f"{held} of {len(CLAIMS)} claims held.")
    return held == len(CLAIMS)
