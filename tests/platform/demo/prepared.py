"""The demo's tenants as a start prepares them."""

from pathlib import Path

from loraplex.adapters.push import FolderPush
from loraplex.platform.demo.demo_file import DemoAccess
from loraplex.platform.demo.tenants import prepare_demo
from loraplex.tenants.database import Database

CONSOLE = "http://127.0.0.1:8000"


async def prepare(database: Database, push: FolderPush, data_dir: Path) -> DemoAccess:
    return await prepare_demo(
        database, push, data_dir, base_url="http://127.0.0.1:8000", console_root=CONSOLE, model="smollm2"
    )
