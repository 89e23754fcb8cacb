"""Mail over SMTP, to a small server in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loraplex.platform.auth.mail import MailServer
from loraplex.platform.errors import MailNotSent

SENDER = "loraplex <no-reply@example.com>"


@asynccontextmanager
async def small_server(refusal: str | None = None) -> AsyncIterator[tuple[int, list[str]]]:
    """An SMTP server without TLS: its port and the lines that it received. `refusal`: its answer to a recipient."""
    lines: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def say(text: str) -> None:
            writer.write(f"{text}\r\n".encode())
            await writer.drain()

        await say("220 here")
        in_message = False
        while line := (await reader.readline()).decode().rstrip("\r\n") or in_message:
            text = line if isinstance(line, str) else ""
            lines.append(text)
            if in_message:
                in_message = text != "."
                if not in_message:
                    await say("250 taken")
                continue
            command = text.split(" ")[0].split(":")[0].upper()
            in_message = command == "DATA"
            replies = {"DATA": "354 go on", "QUIT": "221 bye", "RCPT": refusal or "250 ok"}
            await say(replies.get(command, "250 ok"))
            if command == "QUIT":
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], lines


async def test_a_message_is_delivered() -> None:
    async with small_server() as (port, lines):
        await MailServer.parse(f"smtp://127.0.0.1:{port}", SENDER).send("mara@example.com", "Grüße", "Text\n")
    received = "\n".join(lines)
    assert "RCPT TO:<mara@example.com>" in received and "MAIL FROM:<no-reply@example.com>" in received
    assert "Text" in lines and "Subject: =?utf-8?" in received


async def test_a_refusal_and_a_server_that_is_away_are_errors() -> None:
    async with small_server("550 no such box") as (port, _):
        server = MailServer.parse(f"smtp://127.0.0.1:{port}", SENDER)
        with pytest.raises(MailNotSent):
            await server.send("mara@example.com", "x", "x")
    with pytest.raises(MailNotSent):
        await server.send("mara@example.com", "x", "x")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("smtp://mail.example.com", ("mail.example.com", 587, False, None, None)),
        ("smtps://me%40x:p%3Aw@mail.example.com:2465", ("mail.example.com", 2465, True, "me@x", "p:w")),
    ],
)
def test_an_address_is_read(url: str, expected: tuple[object, ...]) -> None:
    server = MailServer.parse(url, SENDER)
    assert (server.host, server.port, server.tls, server.username, server.password) == expected
    assert "p:w" not in repr(server)


async def test_a_password_is_never_sent_to_a_remote_server_without_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, object] = {}

    async def send(_: object, **options: object) -> None:
        given.update(options)

    monkeypatch.setattr("aiosmtplib.send", send)
    await MailServer.parse("smtp://me:secret@mail.example.com", SENDER).send("mara@example.com", "x", "x")
    assert (given["use_tls"], given["start_tls"]) == (False, True)
    await MailServer.parse("smtps://me:secret@mail.example.com", SENDER).send("mara@example.com", "x", "x")
    assert (given["use_tls"], given["start_tls"]) == (True, False)
