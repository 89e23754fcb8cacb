"""The attackers against a stub server: what they send, and that they end."""

import asyncio
import re
from collections import Counter

from tests.benchmarks.attackers.floods import PROMPTS, Attack, flood_with_forged_keys, flood_with_prompts

from loraplex.tenants.api_keys.key_format import parse_key

REFUSAL = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
TOKEN = re.compile(rb"authorization: bearer (\S+)", re.IGNORECASE)


async def attacked(attack: Attack) -> tuple[list[bytes], Counter[int]]:
    """The requests that a server with nothing but refusals gets, and how the attacker counts them."""
    seen: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = LENGTH.search(head)
                seen.append(head + await reader.readexactly(int(length[1]) if length else 0))
                writer.write(REFUSAL)
        except asyncio.IncompleteReadError:
            writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        answers = await attack(f"http://127.0.0.1:{port}", "lpx_live_x", 0.2)
    return seen, answers


async def test_prompts() -> None:
    seen, answers = await attacked(flood_with_prompts)
    assert answers == {503: len(seen)} and len(seen) >= 40
    assert {request.count(b"[1,2,3,4]") for request in seen} == {PROMPTS}


async def test_forged_keys() -> None:
    seen, answers = await attacked(flood_with_forged_keys)
    assert answers == {503: len(seen)}
    found = [TOKEN.search(request) for request in seen]
    ids = {parse_key(match[1].decode()).key_id for match in found if match}
    assert len(ids) == len(seen)
