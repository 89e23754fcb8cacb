"""Sends one message to a receiver. Invariant: the connection goes to an address that was checked, the name of the URL is
resolved once for it, and neither a redirect nor a proxy leads anywhere else.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

import httpx

from loraplex.tenants.api_keys.networks import Address
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.webhooks.receiver_urls import ReceiverUrl, is_public, parse_literal, parse_receiver_url

CONNECT_S: Final = 5.0
TOTAL_S: Final = 15.0
"""From the connection to the status line and headers of the response. Its body is never read."""
MAX_ADDRESSES: Final = 4
"""Addresses of one name that are tried, in the order of the resolver."""
USER_AGENT: Final = "loraplex"

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port -> its addresses as text. Raises `OSError` for a name without any."""


class ThreadedResolver:
    """The resolver of the operating system, in threads of its own: names that resolve slowly delay nothing else."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="resolver")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _addresses, host, port)
        return found

    def close(self) -> None:
        """End the threads, without waiting for names in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class SendResult:
    """`status`: that of the response, None without one. `error`: why it does not count as received, None if it does."""

    status: int | None
    error: str | None


class ReceiverClient:
    """Posts messages. `allow_private`: also to addresses of private networks, and without TLS."""

    def __init__(
        self,
        resolve: Resolver,
        *,
        allow_private: bool,
        total_s: float = TOTAL_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._resolve = resolve
        self._allow_private = allow_private
        self._total_s = total_s
        self._tls = tls or ssl.create_default_context()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> SendResult:
        """Send `body` once. Any status of 200 to 299 is a receipt; every other outcome is an error of a closed set."""
        try:
            target = parse_receiver_url(url, allow_private=self._allow_private)
            addresses = [parse_literal(each) for each in await self._resolve(target.host, target.port)]
        except InvalidField:
            return SendResult(None, "address_not_allowed")
        except (OSError, UnicodeError):
            # A label of more than 63 characters is a `UnicodeError`.
            return SendResult(None, "name_not_resolved")
        checked = [each for each in addresses if each is not None and self._is_allowed(each)]
        if not checked or len(checked) < len(addresses):
            return SendResult(None, "address_not_allowed")
        try:
            async with asyncio.timeout(self._total_s):
                return await self._post_to(checked[:MAX_ADDRESSES], target, headers, body)
        except (TimeoutError, httpx.TimeoutException):
            return SendResult(None, "timeout")
        except (httpx.TransportError, OSError):
            return SendResult(None, "connection_failed")

    def _is_allowed(self, address: Address) -> bool:
        return self._allow_private or is_public(address)

    async def _post_to(
        self, addresses: Sequence[Address], target: ReceiverUrl, headers: Mapping[str, str], body: bytes
    ) -> SendResult:
        """Use the first address that accepts a connection."""
        *others, last = addresses
        for address in others:
            try:
                return await self._exchange(address, target, headers, body)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._exchange(last, target, headers, body)

    async def _exchange(
        self, address: Address, target: ReceiverUrl, headers: Mapping[str, str], body: bytes
    ) -> SendResult:
        """One request on a connection of its own, so that two receivers behind one address never share one."""
        request = httpx.Request(
            "POST",
            httpx.URL(
                scheme=target.scheme, host=str(address), port=target.port, raw_path=target.path.encode()
            ),
            headers={**headers, "host": target.authority, "user-agent": USER_AGENT, "connection": "close"},
            content=body,
            extensions={
                # The certificate must be that of the URL's name.
                "sni_hostname": target.host,
                "timeout": httpx.Timeout(self._total_s, connect=CONNECT_S).as_dict(),
            },
        )
        async with httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False) as transport:
            response = await transport.handle_async_request(request)
            await response.aclose()
        return SendResult(response.status_code, None if response.is_success else "refused")


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
