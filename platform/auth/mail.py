"""Mail through the SMTP server of the installation. Invariant: a password crosses the network encrypted only."""

from dataclasses import dataclass, field
from email.message import EmailMessage
from typing import Final, Self
from urllib.parse import unquote, urlsplit

import aiosmtplib

from loraplex.platform.errors import MailNotSent

TIMEOUT_S: Final = 15.0
PORTS: Final = {"smtp": 587, "smtps": 465}
HERE: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class MailServer:
    """`tls`: from the first byte on; else the connection is upgraded (STARTTLS), which a server on this machine need not offer."""

    host: str
    port: int
    tls: bool
    username: str | None
    password: str | None = field(repr=False)
    sender: str

    @classmethod
    def parse(cls, url: str, sender: str) -> Self:
        """Read `smtp://user:password@host:port`, or `smtps://…` for TLS from the first byte on."""
        parts = urlsplit(url)
        return cls(
            host=parts.hostname or "",
            port=parts.port or PORTS[parts.scheme],
            tls=parts.scheme == "smtps",
            username=None if parts.username is None else unquote(parts.username),
            password=None if parts.password is None else unquote(parts.password),
            sender=sender,
        )

    async def send(self, to: str, subject: str, text: str) -> None:
        """Send one message. Raises `MailNotSent`."""
        message = EmailMessage()
        message["From"], message["To"], message["Subject"] = self.sender, to, subject
        message.set_content(text)
        upgrade = None if self.host in HERE else True
        try:
            await aiosmtplib.send(
                message,
                hostname=self.host,
                port=self.port,
                username=self.username,
                password=self.password,
                use_tls=self.tls,
                start_tls=False if self.tls else upgrade,
                timeout=TIMEOUT_S,
            )
        except (aiosmtplib.SMTPException, OSError) as error:
            raise MailNotSent("The mail server does not accept the message now; try again.") from error
