"""The authors of changes, as the audit log names them."""

import os
import pwd
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Actor:
    """The author of a change: a key or an operator by the key's public id, a person of the console by the email address, the
    user who runs a command, or a part of the system.

    `address` is the client's; None where it has none, as on a unix socket.
    """

    kind: Literal["key", "operator", "command", "system", "user"]
    name: str
    address: str | None = None
    request_id: str | None = None


def command_actor() -> Actor:
    """Return the user of the operating system who runs this command. A user without a name, as in a container, is `uid N`."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"uid {uid}"
    return Actor("command", name)


def system_actor(component: str) -> Actor:
    """Return a part of the server that acts by itself, such as `demo`."""
    return Actor("system", component)
