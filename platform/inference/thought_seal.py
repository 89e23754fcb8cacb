"""Seals thought for clients that keep it between turns: encrypted (Fernet) for one tenant and one model of it.

Invariant: what was sealed is opened for the tenant and the model that it was sealed for, unchanged, or not at all.
"""

import base64
import re
from collections.abc import Callable
from typing import Final
from uuid import UUID

from cryptography.fernet import Fernet, InvalidToken

from loraplex.platform.errors import InvalidParameter

DOMAIN: Final = b"loraplex/thought/v1"
_VERSION_OR_ALIAS: Final = re.compile(r"[:@][^/]*$")


class ThoughtSeal:
    """The seal of one tenant. `derive_key`: byte strings, the first of which names the purpose -> 32 bytes."""

    def __init__(self, derive_key: Callable[..., bytes], tenant_id: UUID) -> None:
        self._derive_key = derive_key
        self._tenant_id = tenant_id
        self._fernets: dict[bytes, Fernet] = {}

    def seal(self, model: str, thought: str) -> str:
        """Return the thought as a text that tells nobody its content. All versions of an adapter have one key."""
        return self._fernet(model).encrypt(thought.encode()).decode()

    def open(self, model: str, sealed: str, param: str) -> str:
        """Return the thought. `param`: the field that has it. Raises `InvalidParameter` for what was not sealed here."""
        try:
            return self._fernet(model).decrypt(sealed.encode()).decode()
        except (InvalidToken, UnicodeError):
            message = (
                f"`{param}` was not sealed by this server for this tenant and model, or was changed since; "
                "send it unchanged, or leave it out."
            )
            raise InvalidParameter(message, param=param) from None

    def _fernet(self, model: str) -> Fernet:
        name = _VERSION_OR_ALIAS.sub("", model).encode()
        if name not in self._fernets:
            key = self._derive_key(DOMAIN, self._tenant_id.bytes, name)
            self._fernets[name] = Fernet(base64.urlsafe_b64encode(key))
        return self._fernets[name]
