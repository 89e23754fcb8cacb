"""A process that admits and ends requests in a journal as fast as it can, and prints each when it is durable."""

import asyncio
import sys
from pathlib import Path
from uuid import uuid4

from tests.tenants.ledger.journal.fixtures import MAX_BYTES, progressed, reservation, used

from loraplex.tenants.ledger.journal.journal import Journal


async def main(folder: Path) -> None:
    """Write until the process is killed."""
    journal = await Journal.open(folder, uuid4(), max_bytes=MAX_BYTES)

    async def write() -> None:
        while True:
            each = reservation()
            await journal.admit(each)
            print("admitted", each.id, flush=True)
            journal.progress(each.id, progressed(1))
            await journal.end(each.id, used(2))
            print("ended", each.id, flush=True)

    await asyncio.gather(*(write() for _ in range(4)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
