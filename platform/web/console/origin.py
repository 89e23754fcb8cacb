"""How browsers reach this server: its origin, and whether a request comes from a page of it."""

from dataclasses import dataclass

from starlette.requests import Request

from loraplex.platform.auth.client_address import ClientAddresses
from loraplex.platform.errors import FormRefused
from loraplex.platform.web.console.allowed_hosts import is_direct

PROTOCOL_HEADER = "x-forwarded-proto"


@dataclass(frozen=True, slots=True)
class PublicOrigin:
    """`public_url`: the address that people use, such as `https://llm.example.com`; None: that of each request.

    Without it the protocol is taken from a trusted proxy's `X-Forwarded-Proto`.
    """

    public_url: str | None
    addresses: ClientAddresses

    def of(self, request: Request) -> str:
        """Return scheme and host, without a slash at the end."""
        if self.public_url is not None:
            return self.public_url
        return self._asked(request)

    def host(self, request: Request) -> str:
        """Return the host, with its port unless that is the scheme's own."""
        return self.of(request).partition("://")[2]

    def is_secure(self, request: Request) -> bool:
        """Return whether the browser speaks TLS."""
        return self.of(request).startswith("https://")

    def require(self, request: Request) -> None:
        """Raise `FormRefused` unless a page of this origin sent the request. Browsers name it in every POST.

        Beside `public_url` that is the address of the request, where it is that of an operator's tunnel. By the public name it is
        not: a proxy may have left out its port, at which another service speaks.
        """
        origins = {self.of(request)}
        if is_direct(request.headers.get("host", "")):
            origins.add(self._asked(request))
        if request.headers.get("origin") not in origins:
            raise FormRefused(
                "This form was sent from another site. Open the page again on this server and repeat it."
            )

    def _asked(self, request: Request) -> str:
        return f"{self._scheme(request)}://{request.headers.get('host', '')}"

    def _scheme(self, request: Request) -> str:
        if self.addresses.is_proxied(request):
            return request.headers.get(PROTOCOL_HEADER, request.url.scheme)
        return request.url.scheme
