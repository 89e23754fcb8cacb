"""The authors of changes, as the audit log names them."""

import os
import pwd

from loraplex.tenants.audit_log import Actor

__all__ = ["Actor", "command_actor", "key_actor", "operator_actor", "system_actor"]


def key_actor(key_id: str, address: str | None, request_id: str | None) -> Actor:
    """Return a tenant's key, by its public id, that sent a request from `address`."""
    return Actor("key", key_id, address, request_id)


def operator_actor(key_id: str, address: str | None, request_id: str | None) -> Actor:
    """Return an operator, by the public id of the key or by the email address, who sent a request from `address`."""
    return Actor("operator", key_id, address, request_id)


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
