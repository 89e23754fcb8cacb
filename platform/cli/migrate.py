"""`loraplex migrate`: migrates the database of DATABASE_URL, or the embedded one, to the newest schema."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from loraplex.platform.cli.command_context import run_command, store_addresses
from loraplex.platform.cli.output import print_document
from loraplex.platform.config import load_settings
from loraplex.platform.datastores.connections import ensure_schema
from loraplex.platform.datastores.migrations import current_revision, upgrade

__all__ = ["migrate", "upgrade"]


app = typer.Typer(add_completion=False)


@app.command()
def migrate(
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="The server's data directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Migrate the database to the newest schema. Running it again changes nothing."""

    async def work() -> None:
        settings = load_settings({"data_dir": data_dir})
        async with store_addresses(settings) as (url, embedded, _):
            folder = settings.data_dir if embedded else None
            await asyncio.to_thread(ensure_schema, url, migrate=True, embedded_in=folder)
            print_document({"revision": await asyncio.to_thread(current_revision, url)}, as_json)

    run_command(work())
