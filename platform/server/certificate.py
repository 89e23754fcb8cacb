"""The certificate of a server, read from the files that the settings name.

Invariant: a certificate that cannot be served stops the start with the name of its setting, and never a running server.
"""

import asyncio
import signal
import ssl
from pathlib import Path

import structlog

from loraplex.platform.config import Settings
from loraplex.platform.startup_errors import SettingsError

LOG = structlog.get_logger("loraplex.serve")


class ServerCertificate:
    """The certificate and the key of the settings, as a context of TLS 1.2 and newer."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read both files. Raises `SettingsError`, which names the setting of a file that is not usable."""
        self._certificate = certificate
        self._key = key
        self.context = self._read()

    def reload(self) -> None:
        """Read the files again, for connections to come. Raises `SettingsError`, and keeps what was read before."""
        self.context = self._read()

    def _read(self) -> ssl.SSLContext:
        for name, path in (("tls_certificate", self._certificate), ("tls_key", self._key)):
            try:
                path.open("rb").close()
            except OSError as error:
                raise SettingsError(f"setting `{name}`: {path}: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a password's source OpenSSL would ask for it on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (ssl.SSLError, ValueError):
            raise SettingsError(
                f"settings `tls_certificate` and `tls_key`: {self._certificate} must be the server's certificate with those"
                f" between it and its root, and {self._key} its key without a password, both as PEM"
            ) from None
        return context


def reload_at_hangup(certificate: ServerCertificate) -> None:
    """Read the files again at SIGHUP, as after a renewal. Files that are not usable change nothing and are logged."""

    def reload() -> None:
        try:
            certificate.reload()
        except SettingsError as error:
            LOG.error("the certificate was not reloaded; the earlier one stays", reason=str(error))
        else:
            LOG.info("the certificate was reloaded")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def read_certificate(settings: Settings) -> ServerCertificate | None:
    """Read the certificate of the settings; None without one. Raises `SettingsError`."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return ServerCertificate(settings.tls_certificate, settings.tls_key)
