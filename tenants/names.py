"""Names of tenants, people, keys, adapters and aliases. Invariant: check constraints of the database have the same patterns."""

import re

from loraplex.tenants.errors import InvalidName

TENANT_NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
ADAPTER_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
ALIAS_NAME = ADAPTER_NAME
EMAIL = r"^[a-z0-9.!#$%&'*+/=?^_`{|}~-]+@[a-z0-9-]+(\.[a-z0-9-]+)*$"
"""As HTML defines a valid address, in lower case."""
EMAIL_MAX_LENGTH = 254
KEY_NAME_MAX_LENGTH = 100
TENANT_RULE = "1-63 lower-case letters, digits and hyphens, beginning with a letter or digit"
ADAPTER_RULE = "1-63 of a-z 0-9 . _ - and a letter or digit first"


def check_tenant_name(name: str) -> str:
    return check_pattern("name", name, TENANT_NAME, TENANT_RULE)


def check_tier(tier: str) -> str:
    return check_pattern("tier", tier, TENANT_NAME, TENANT_RULE)


def check_adapter_name(name: str) -> str:
    return check_pattern("adapter name", name, ADAPTER_NAME, ADAPTER_RULE)


def check_alias_name(name: str) -> str:
    return check_pattern("alias", name, ALIAS_NAME, ADAPTER_RULE)


def check_key_name(name: str) -> str:
    if not 1 <= len(name) <= KEY_NAME_MAX_LENGTH or not name.isprintable():
        raise InvalidName("name", f"a key's name is 1 to {KEY_NAME_MAX_LENGTH} printable characters")
    return name


def check_email(email: str) -> str:
    """Return the address in lower case. Raises `InvalidName`."""
    address = email.strip().lower()
    if len(address) > EMAIL_MAX_LENGTH:
        raise InvalidName("email", f"an email address has at most {EMAIL_MAX_LENGTH} characters")
    return check_pattern("email", address, EMAIL, "an address such as mara@example.com")


def check_person_name(name: str) -> str:
    """Return the name without surrounding spaces. Raises `InvalidName`."""
    stripped = name.strip()
    if not 1 <= len(stripped) <= KEY_NAME_MAX_LENGTH or not stripped.isprintable():
        raise InvalidName("name", f"a name is 1 to {KEY_NAME_MAX_LENGTH} printable characters")
    return stripped


def check_pattern(field: str, value: str, pattern: str, rule: str) -> str:
    """Returns `value`; raises `InvalidName` naming `field` and the rule."""
    if not is_name(value, pattern):
        raise InvalidName(field, f"{field} {value[:80]!r} is not allowed: {rule}")
    return value


def is_name(value: str, pattern: str) -> bool:
    """Whether the database can store `value`; a query with another text, such as a NUL byte, would be an error."""
    return re.fullmatch(pattern.strip("^$"), value) is not None
