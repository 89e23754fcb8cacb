"""`loraplex migrate`: migrates the database of DATABASE_URL, or the embedded one, to the newest schema."""

import asyncio

import typer

from loraplex.platform.cli.command_context import DataDir, async_command, store_addresses
from loraplex.platform.cli.output import AsJson, print_document
from loraplex.platform.config import load_settings
from loraplex.platform.datastores.connections import ensure_schema
from loraplex.platform.datastores.migrations import current_revision, upgrade

__all__ = ["migrate", "upgrade"]


app = typer.Typer(add_completion=False)


@app.command()
@async_command
async def migrate(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Migrate the database to the newest schema. Running it again changes nothing."""
    settings = load_settings({"data_dir": data_dir})
    async with store_addresses(settings) as (url, embedded, _):
        folder = settings.data_dir if embedded else None
        await asyncio.to_thread(ensure_schema, url, migrate=True, embedded_in=folder)
        print_document({"revision": await asyncio.to_thread(current_revision, url)}, as_json)
