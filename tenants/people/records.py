"""The people of a tenant, and what tenants get that sign up. Invariant: the link of an invitation is in the record of its creation alone."""

from typing import Annotated, Final
from urllib.parse import urlencode
from uuid import UUID

from pydantic import Field, WithJsonSchema

from loraplex.tenants.records import OneTimeSecret, Record, UtcTime
from loraplex.tenants.scopes import ROLES

SIGN_IN_PATH: Final = "/console/sign-in"
OPERATOR_SIGN_IN_PATH: Final = "/operator/console/sign-in"
STATES: Final = ("active", "disabled", "invited")
MAX_PEOPLE: Final = 1000
"""The members and invitations that one page shows."""
Role = Annotated[str, Field(max_length=40), WithJsonSchema({"type": "string", "enum": list(ROLES)})]
State = Annotated[str, WithJsonSchema({"type": "string", "enum": list(STATES)})]


class UserDocument(Record):
    """A member (`active`, `disabled`) or an open invitation (`invited`), which has no `name` and ends at `expires_at`.

    `sessions`: how many browsers the member is signed in with here. `revision`: the ETag.
    """

    id: UUID
    email: str
    name: str | None
    role: Role
    state: State
    second_factor: bool
    sessions: int
    last_seen_at: UtcTime | None
    created_at: UtcTime
    expires_at: UtcTime | None
    revision: int


class PublishedPlan(Record):
    """What a tenant gets that signs up now. `limits`: those that are set."""

    tier: str
    weight: float
    limits: dict[str, int]
    published_at: UtcTime


class InvitationDocument(UserDocument, OneTimeSecret):
    """`invitation_path`: the path of the link on this server, which works once; it is returned here and never again."""

    invitation_path: str = Field(repr=False)

    @property
    def token(self) -> str:
        """The token of the link."""
        return self.invitation_path.partition("token=")[2]


def link_address(root: str, token: str, *, operator: bool = False) -> str:
    """Return the address of a link. `root`: scheme and host of the console; `operator`: it leads to the operator's area."""
    path = OPERATOR_SIGN_IN_PATH if operator else SIGN_IN_PATH
    return f"{root}{path}?{urlencode({'token': token})}"
