"""Request and response schemas of `/tenant/v1/users`. Invariant: the link of an invitation is in the response to it alone."""

from typing import Annotated
from uuid import UUID

from pydantic import Field, WithJsonSchema

from loraplex.platform.services.people.link_addresses import link_address
from loraplex.platform.services.people.team import Invited, TeamEntry
from loraplex.platform.web.request_bodies import RequestModel
from loraplex.platform.web.responses import ResponseModel
from loraplex.tenants.models import ROLES
from loraplex.tenants.names import EMAIL_MAX_LENGTH
from loraplex.tenants.people.team import STATES
from loraplex.tenants.records import UtcTime

Email = Annotated[str, Field(min_length=3, max_length=EMAIL_MAX_LENGTH)]
Role = Annotated[str, Field(max_length=40), WithJsonSchema({"type": "string", "enum": list(ROLES)})]
State = Annotated[str, WithJsonSchema({"type": "string", "enum": list(STATES)})]


class NewUserBody(RequestModel):
    """The person to invite. `role`: what the person may do here."""

    email: Email
    role: Role


class UserPatch(RequestModel):
    """`role`: what the member may do from now on."""

    role: Role


class UserDocument(ResponseModel):
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


class InvitationDocument(UserDocument):
    """`invitation_path`: the path of the link on this server, which works once; it is returned here and never again."""

    invitation_path: str


def user_document(entry: TeamEntry) -> UserDocument:
    return UserDocument(**{name: getattr(entry, name) for name in UserDocument.model_fields})


def invitation_document(invited: Invited) -> InvitationDocument:
    path = link_address("", invited.token)
    return InvitationDocument(**user_document(invited.entry).model_dump(), invitation_path=path)
