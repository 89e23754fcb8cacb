"""Bodies that clients compress: gzip is read within the bounds of plain bodies, everything else is refused by name."""

import asyncio
import gzip
import json
import random
import tracemalloc
import zlib
from typing import Any

import httpx
import pytest

from loraplex.platform.errors import BodyTooLarge, InvalidBody
from loraplex.platform.web.transport.content_encoding import MAX_EXPANSION, PIECE_BYTES, decompressed

BODY = {"model": "demo/base", "messages": [{"role": "user", "content": "Zip me."}], "max_tokens": 3}
MIB = 1 << 20


async def post(
    gateway: Any, content: bytes, encoding: str, path: str = "/v1/chat/completions"
) -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.key}", "content-encoding": encoding}
    async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
        return await client.post(path, content=content, headers=headers)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
async def test_a_gzip_body_is_answered_as_the_plain_one(start_gateway: Any, encoding: str) -> None:
    gateway = await start_gateway()
    packed = gzip.compress(json.dumps(BODY).encode())
    answered = await post(gateway, packed, encoding)
    plain = await post(gateway, json.dumps(BODY).encode(), "identity")
    assert (answered.status_code, plain.status_code) == (200, 200)
    first, second = gateway.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert (await post(gateway, packed, encoding, "/v1/tokenize")).status_code == 400, (
        "its table, not its JSON"
    )


@pytest.mark.parametrize("encoding", ["br", "zstd", "deflate", "gzip, gzip", "gzip, br", "compress"])
async def test_other_encodings_are_refused_by_name(start_gateway: Any, encoding: str) -> None:
    gateway = await start_gateway()
    refused = await post(gateway, gzip.compress(json.dumps(BODY).encode()), encoding)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (415, "unsupported_content_encoding")
    assert repr(encoding) in error["message"] and refused.headers["accept-encoding"] == "gzip"
    assert gateway.engine.requests == [] and gateway.admissions.settled == []


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (json.dumps(BODY).encode(), 400, "not gzip"),
        (zlib.compress(json.dumps(BODY).encode()), 400, "not gzip"),
        (gzip.compress(json.dumps(BODY).encode())[:-9], 400, "ends within"),
        (gzip.compress(b"{}") + gzip.compress(b"{}"), 400, "goes on"),
        (gzip.compress(b"{}") + b"x", 400, "goes on"),
        (b"", 400, "ends within"),
        (gzip.compress(b'"' + b" " * (2 * MIB) + b'"'), 413, "100 times"),
        (gzip.compress(random.Random(0).randbytes(6 * MIB).hex().encode()), 413, "once decompressed"),
    ],
    ids=["plain", "zlib", "cut", "two members", "trailing", "empty", "bomb", "above the bound"],
)
async def test_what_is_no_bounded_gzip_is_refused(
    start_gateway: Any, content: bytes, status: int, says: str
) -> None:
    gateway = await start_gateway()
    refused = await post(gateway, content, "gzip")
    assert refused.status_code == status and says in refused.json()["error"]["message"]
    assert gateway.engine.requests == []


async def test_below_a_piece_any_ratio_is_read(start_gateway: Any) -> None:
    gateway = await start_gateway()
    padded = json.dumps(BODY).encode() + b" " * 60_000
    packed = gzip.compress(padded)
    assert len(padded) > MAX_EXPANSION * len(packed)
    assert (await post(gateway, packed, "gzip")).status_code == 200


async def chunks_of(content: bytes, size: int) -> Any:
    for at in range(0, len(content), size):
        yield content[at : at + size]


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
async def test_pieces_are_bounded_however_the_bytes_arrive(size: int) -> None:
    content = b"".join(b"%d," % number for number in range(60_000))
    packed = gzip.compress(content)
    pieces = [piece async for piece in decompressed(chunks_of(packed, size), MIB)]
    assert b"".join(pieces) == content and max(map(len, pieces)) <= PIECE_BYTES
    for cut in (1, 8):
        with pytest.raises(InvalidBody, match="ends within"):
            [piece async for piece in decompressed(chunks_of(packed[:-cut], size), MIB)]
    with pytest.raises(InvalidBody, match="goes on"):
        [piece async for piece in decompressed(chunks_of(packed + b"x", size), MIB)]


async def test_a_bomb_is_refused_before_it_has_grown() -> None:
    packed = gzip.compress(bytes(256 * MIB))
    tracemalloc.start()
    with pytest.raises(BodyTooLarge):
        [piece async for piece in decompressed(chunks_of(packed, 4096), 1 << 30)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MIB


async def test_decompressed_bytes_are_taken_from_the_budget(start_gateway: Any) -> None:
    gateway = await start_gateway()
    budget = gateway.app.state.body_budget
    taken: list[int] = []
    take = budget.take

    def watch(tenant_id: Any, size: int) -> None:
        taken.append(size)
        take(tenant_id, size)

    budget.take = watch
    words = " ".join(f"w{number}" for number in range(60_000))
    content = json.dumps({**BODY, "messages": [{"role": "user", "content": words}]}).encode()
    await asyncio.wait_for(post(gateway, gzip.compress(content), "gzip"), 60)
    assert sum(taken) == len(content) and max(taken) <= PIECE_BYTES
