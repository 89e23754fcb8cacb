"""Messages on a real connection: where they go, what counts as received, and what a receiver cannot make the server do."""

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.platform.certificates import certificate_of
from tests.platform.jobs.receiver import LOCAL, OK, FakeResolver, fixed, receiving

from loraplex.platform.jobs.receiver_client import ReceiverClient, SendResult, ThreadedResolver

PUBLIC = "93.184.215.14"
RECEIVED = SendResult(204, None)
REFUSED_ADDRESS = SendResult(None, "address_not_allowed")


def private_client(resolver: FakeResolver, total_s: float = 60.0) -> ReceiverClient:
    return ReceiverClient(resolver, allow_private=True, total_s=total_s)


async def test_a_message_arrives_whole_and_names_its_host() -> None:
    resolver = FakeResolver([[LOCAL]])
    async with receiving(fixed(OK)) as receiver:
        url = f"http://hooks.example:{receiver.port}/in?x=1"
        sent = await private_client(resolver).post(url, {"webhook-id": "e"}, b'{"a": 1}')
    assert sent == RECEIVED and resolver.asked == [("hooks.example", receiver.port)]
    head, _, body = receiver.requests[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /in?x=1 HTTP/1.1" and body == b'{"a": 1}'
    assert f"host: hooks.example:{receiver.port}" in lines and "webhook-id: e" in lines


@pytest.mark.parametrize("status", [301, 302, 307, 400, 404, 410, 500, 503])
async def test_only_success_is_a_receipt_and_no_redirect_is_followed(status: int) -> None:
    async with receiving(fixed(OK)) as trap:
        target = f"http://{LOCAL}:{trap.port}/"
        moved = f"HTTP/1.1 {status} Status\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n".encode()
        async with receiving(fixed(moved)) as receiver:
            sent = await private_client(FakeResolver([[LOCAL]])).post(
                f"http://a.example:{receiver.port}/", {}, b""
            )
    assert sent == SendResult(status, "refused") and trap.requests == []


@pytest.mark.parametrize(
    "addresses",
    [
        [LOCAL],
        [PUBLIC, LOCAL],
        ["::1"],
        ["::ffff:8.8.8.8"],
        ["169.254.169.254"],
        ["64:ff9b::7f00:1"],
        ["fe80::1%lo"],
    ],
    ids=str,
)
async def test_a_name_with_any_private_address_gets_nothing(addresses: list[str]) -> None:
    async with receiving(fixed(OK)) as receiver:
        client = ReceiverClient(FakeResolver([addresses]), allow_private=False, total_s=60.0)
        assert await client.post(f"https://a.example:{receiver.port}/", {}, b"") == REFUSED_ADDRESS
    assert receiver.requests == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "0x7f000001", "2130706433", "0177.0.0.1", "localhost", "[::1]"]
)
async def test_every_spelling_of_this_machine_is_refused(host: str) -> None:
    resolver = ThreadedResolver(1)
    client = ReceiverClient(resolver, allow_private=False)
    async with receiving(fixed(OK)) as receiver:
        sent = await client.post(f"https://{host}:{receiver.port}/", {}, b"")
    resolver.close()
    assert sent == REFUSED_ADDRESS and receiver.requests == []


async def test_an_answer_that_changes_after_the_check_is_never_asked_for() -> None:
    """DNS rebinding: the second answer of the resolver would be this machine."""
    resolver = FakeResolver([[PUBLIC], [LOCAL]])
    connected: list[str] = []

    class Watched(ReceiverClient):
        async def _exchange(self, address: object, *_: object) -> SendResult:
            connected.append(str(address))
            return RECEIVED

    client = Watched(resolver, allow_private=False)
    assert await client.post("https://rebinds.example/", {}, b"") == RECEIVED
    assert connected == [PUBLIC] and len(resolver.asked) == 1


async def test_the_next_address_is_tried_where_one_accepts_no_connection() -> None:
    async with receiving(fixed(OK)) as receiver:
        resolver = FakeResolver([["127.0.0.2", LOCAL]])
        sent = await private_client(resolver).post(f"http://a.example:{receiver.port}/", {}, b"")
    assert sent == RECEIVED and len(receiver.requests) == 1


async def test_failures_have_a_name_of_a_closed_set() -> None:
    async def unknown(host: str, port: int) -> Sequence[str]:
        raise OSError("no such name")

    client = ReceiverClient(unknown, allow_private=True, total_s=60.0)
    assert await client.post("http://nonesuch.example/", {}, b"") == SendResult(None, "name_not_resolved")
    resolver = ThreadedResolver(1)
    long_label = f"http://{'a' * 64}.example/"
    client = ReceiverClient(resolver, allow_private=True)
    assert await client.post(long_label, {}, b"") == SendResult(None, "name_not_resolved")
    resolver.close()
    async with receiving(fixed(b"not HTTP\r\n\r\n")) as receiver:
        sent = await private_client(FakeResolver([[LOCAL]])).post(
            f"http://a.example:{receiver.port}/", {}, b""
        )
    assert sent == SendResult(None, "connection_failed")
    closed = await private_client(FakeResolver([[LOCAL]])).post(f"http://a.example:{receiver.port}/", {}, b"")
    assert closed == SendResult(None, "connection_failed")


async def test_a_silent_receiver_costs_the_time_limit_and_no_more() -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def dripping(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    for answer in (silent, dripping):
        async with receiving(answer) as receiver:
            client = private_client(FakeResolver([[LOCAL]]), total_s=0.2)
            async with asyncio.timeout(60):
                sent = await client.post(f"http://a.example:{receiver.port}/", {}, b"")
        assert sent == SendResult(None, "timeout")


async def test_an_endless_body_is_not_read_and_endless_headers_are_cut_off() -> None:
    written = 0

    async def endless_body(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            await writer.drain()
            written += 0x10000

    async with receiving(endless_body) as receiver:
        sent = await private_client(FakeResolver([[LOCAL]])).post(
            f"http://a.example:{receiver.port}/", {}, b""
        )
    assert sent == SendResult(200, None) and written < 64 << 20

    async def endless_head(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x: " + b"y" * 1000 + b"\r\n")
            await writer.drain()

    async with receiving(endless_head) as receiver:
        sent = await private_client(FakeResolver([[LOCAL]])).post(
            f"http://a.example:{receiver.port}/", {}, b""
        )
    assert sent == SendResult(None, "connection_failed")


async def test_the_certificate_must_be_of_the_name_in_the_url(tmp_path: Path) -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate_of("hooks.example", tmp_path))
    trusting = ssl.create_default_context(cafile=str(tmp_path / "hooks.example.pem"))
    async with receiving(fixed(OK), server_side) as receiver:

        async def post(host: str, tls: ssl.SSLContext | None) -> SendResult:
            resolver = FakeResolver([[LOCAL]])
            client = ReceiverClient(resolver, allow_private=True, total_s=60.0, tls=tls)
            return await client.post(f"https://{host}:{receiver.port}/", {}, b"")

        assert await post("hooks.example", trusting) == RECEIVED
        assert await post("other.example", trusting) == SendResult(None, "connection_failed")
        assert await post("hooks.example", None) == SendResult(None, "connection_failed")


async def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving(fixed(OK)) as proxy, receiving(fixed(OK)) as receiver:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://{LOCAL}:{proxy.port}")
        sent = await private_client(FakeResolver([[LOCAL]])).post(
            f"http://a.example:{receiver.port}/", {}, b""
        )
    assert sent == RECEIVED and proxy.requests == [] and len(receiver.requests) == 1
