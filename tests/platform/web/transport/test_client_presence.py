"""The context that ends with its client: what the client's leaving cancels."""

import asyncio

import pytest
from starlette.types import Message

from loraplex.platform.errors import ClientGone
from loraplex.platform.web.transport.client_presence import UnlessDisconnected


class Client:
    """A client that leaves once `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_a_client_that_leaves_ends_the_block() -> None:
    client = Client()
    with pytest.raises(ClientGone):
        async with UnlessDisconnected({}, client.receive):
            client.gone.set()
            await asyncio.sleep(60)


async def test_nothing_behind_the_block_is_cancelled() -> None:
    client = Client()
    async with UnlessDisconnected({}, client.receive):
        await asyncio.sleep(0)
        client.gone.set()
        # The watching task ends in this turn of the event loop, the block right behind it.
        await asyncio.sleep(0)
    await asyncio.sleep(0)
