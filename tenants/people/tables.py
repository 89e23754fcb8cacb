"""People of the console: users, their memberships, invitations, sessions, one-time links, slowed sign-ins, the sign-up plan.

Invariant: of a password, a recovery code, a session's token and a link only digests are stored, and of a TOTP secret only its
encrypted form.
"""

from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import INET
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.names import EMAIL, TENANT_NAME
from loraplex.tenants.scopes import ROLES
from loraplex.tenants.tables import Base, BigInt, Revision, one_of

INVITATION_PURPOSES = ("member", "operator", "sign_up")
LINK_PURPOSES = ("reset", "demo")
EMAIL_CHECK = "email ~ '{}' AND length(email) <= 254".format(EMAIL.replace("'", "''"))
DIGEST = "octet_length(token_sha256) = 32"


class User(Base):
    """A person, by the email address in lower case. `password_hash` null: signs in through the identity provider only.

    `totp_last_step`: the newest time step whose code was used, so that no code works twice. A disabled user cannot sign in.
    """

    __tablename__ = "users"
    __table_args__ = (
        UniqueConstraint("email"),
        UniqueConstraint("oidc_issuer", "oidc_subject"),
        CheckConstraint(EMAIL_CHECK, name="email"),
        CheckConstraint("(oidc_issuer IS NULL) = (oidc_subject IS NULL)", name="oidc"),
        CheckConstraint("totp_confirmed_at IS NULL OR totp_secret IS NOT NULL", name="totp"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    email: Mapped[str]
    name: Mapped[str]
    password_hash: Mapped[str | None] = mapped_column(deferred=True, deferred_raiseload=True)
    totp_secret: Mapped[bytes | None] = mapped_column(deferred=True, deferred_raiseload=True)
    totp_confirmed_at: Mapped[datetime | None]
    totp_last_step: Mapped[BigInt | None] = mapped_column(deferred=True, deferred_raiseload=True)
    is_operator: Mapped[bool] = mapped_column(server_default=text("false"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_seen_at: Mapped[datetime | None]
    disabled_at: Mapped[datetime | None]
    oidc_issuer: Mapped[str | None]
    oidc_subject: Mapped[str | None] = mapped_column(deferred=True, deferred_raiseload=True)


class RecoveryCode(Base):
    """A recovery code of a user that was not used. `code_digest` is keyed with the server secret."""

    __tablename__ = "recovery_codes"
    __table_args__ = (CheckConstraint("octet_length(code_digest) = 32", name="code_digest"),)

    user_id: Mapped[UUID] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), primary_key=True)
    code_digest: Mapped[bytes] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Membership(Base):
    """A person's role in a tenant."""

    __tablename__ = "memberships"
    __table_args__ = (
        Index("ix_memberships_user_id", "user_id"),
        CheckConstraint(one_of("role", ROLES), name="role"),
    )

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    user_id: Mapped[UUID] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), primary_key=True)
    role: Mapped[str]
    revision: Mapped[Revision]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Invitation(Base):
    """A link that makes its bearer a member of a tenant, an operator, or the first admin of a new tenant (`sign_up`).

    `email` null: the bearer chooses it, as the first operator does. `invited_by`: the author, as in the audit log.
    """

    __tablename__ = "invitations"
    __table_args__ = (
        UniqueConstraint("token_sha256"),
        Index(
            "uq_invitations_open",
            "tenant_id",
            "email",
            unique=True,
            postgresql_where=text("accepted_at IS NULL AND revoked_at IS NULL"),
        ),
        Index("ix_invitations_expires_at", "expires_at"),
        CheckConstraint(one_of("purpose", INVITATION_PURPOSES), name="purpose"),
        CheckConstraint("(purpose = 'member') = (tenant_id IS NOT NULL)", name="tenant"),
        CheckConstraint(
            f"(purpose = 'member') = (role IS NOT NULL) AND {one_of('role', ROLES)}", name="role"
        ),
        CheckConstraint("purpose = 'operator' OR email IS NOT NULL", name="addressee"),
        CheckConstraint(EMAIL_CHECK, name="email"),
        CheckConstraint(DIGEST, name="token_sha256"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    purpose: Mapped[str]
    email: Mapped[str | None]
    role: Mapped[str | None]
    token_sha256: Mapped[bytes] = mapped_column(deferred=True, deferred_raiseload=True)
    invited_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    accepted_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class UserSession(Base):
    """A signed-in browser. `tenant_id` null: the operator's area. `viewing`: an operator looks into the tenant, read-only."""

    __tablename__ = "sessions"
    __table_args__ = (
        UniqueConstraint("token_sha256"),
        Index("ix_sessions_user_id", "user_id"),
        Index("ix_sessions_tenant_id", "tenant_id"),
        Index("ix_sessions_expires_at", "expires_at"),
        CheckConstraint("NOT viewing OR tenant_id IS NOT NULL", name="viewing"),
        CheckConstraint(DIGEST, name="token_sha256"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    token_sha256: Mapped[bytes] = mapped_column(deferred=True, deferred_raiseload=True)
    user_id: Mapped[UUID] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"))
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    viewing: Mapped[bool] = mapped_column(server_default=text("false"))
    second_factor: Mapped[bool] = mapped_column(server_default=text("false"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    address: Mapped[str | None] = mapped_column(INET)
    user_agent: Mapped[str | None]


class OneTimeLink(Base):
    """A link that resets the password of a user, or signs the demo's user in. It works once.

    `removes_second_factor`: a reset also removes the user's second factor.
    """

    __tablename__ = "one_time_links"
    __table_args__ = (
        UniqueConstraint("token_sha256"),
        Index("ix_one_time_links_user_id", "user_id"),
        Index("ix_one_time_links_expires_at", "expires_at"),
        CheckConstraint(one_of("purpose", LINK_PURPOSES), name="purpose"),
        CheckConstraint(DIGEST, name="token_sha256"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    token_sha256: Mapped[bytes] = mapped_column(deferred=True, deferred_raiseload=True)
    purpose: Mapped[str]
    user_id: Mapped[UUID] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"))
    removes_second_factor: Mapped[bool] = mapped_column(server_default=text("false"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]


class SignInThrottle(Base):
    """The failed sign-ins of an account, of a client network, or of an account from a network that it is known from.

    `subject` is a digest: what people type by mistake is not stored.
    """

    __tablename__ = "sign_in_throttles"
    __table_args__ = (
        Index("ix_sign_in_throttles_updated_at", "updated_at"),
        CheckConstraint("octet_length(subject) = 32", name="subject"),
        CheckConstraint("failures >= 0", name="failures"),
    )

    subject: Mapped[bytes] = mapped_column(primary_key=True)
    failures: Mapped[int]
    updated_at: Mapped[datetime]


class SignUpPlan(Base):
    """What a tenant gets that signs up by itself: its tier, by which its rate card is chosen, its share and its limits.

    One plan is published at a time. Without one, sign-up is closed.
    """

    __tablename__ = "sign_up_plans"
    __table_args__ = (
        Index(
            "uq_sign_up_plans_published",
            text("(true)"),
            unique=True,
            postgresql_where=text("ended_at IS NULL"),
        ),
        CheckConstraint(f"tier ~ '{TENANT_NAME}'", name="tier"),
        CheckConstraint("weight > 0 AND weight <= 1000", name="weight"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tier: Mapped[str]
    weight: Mapped[float] = mapped_column(server_default="1")
    limits: Mapped[dict[str, Any]]
    published_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
