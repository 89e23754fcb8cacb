"""What an attacker's process is asked to do."""

import msgspec


class AttackJob(msgspec.Struct, frozen=True):
    """Attack the server at `base_url` for `seconds` with the key of a tenant.

    `number` makes the requests of each round different.
    """

    attack: str
    base_url: str
    api_key: str
    model: str
    number: int
    seconds: float
