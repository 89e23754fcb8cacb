"""People of the console: users, memberships, invitations, sessions, one-time links, slowed sign-ins, the sign-up plan.

A person is an author in the audit log. A console key is a short-lived credential of a session and counts among no keys.
Revision 0018, after 0017.
"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

EMAIL = r"^[a-z0-9.!#$%&''*+/=?^_`{|}~-]+@[a-z0-9-]+(\.[a-z0-9-]+)*$"
ROLES = "'admin', 'developer', 'billing', 'viewer'"
TABLES = (
    f"""
    CREATE TABLE users (
        id uuid NOT NULL,
        email text NOT NULL,
        name text NOT NULL,
        password_hash text,
        totp_secret bytea,
        totp_confirmed_at timestamptz,
        totp_last_step bigint,
        is_operator boolean NOT NULL DEFAULT false,
        created_at timestamptz NOT NULL DEFAULT now(),
        last_seen_at timestamptz,
        disabled_at timestamptz,
        oidc_issuer text,
        oidc_subject text,
        CONSTRAINT pk_users PRIMARY KEY (id),
        CONSTRAINT uq_users_email UNIQUE (email),
        CONSTRAINT uq_users_oidc_issuer_oidc_subject UNIQUE (oidc_issuer, oidc_subject),
        CONSTRAINT ck_users_email CHECK (email ~ '{EMAIL}' AND length(email) <= 254),
        CONSTRAINT ck_users_oidc CHECK ((oidc_issuer IS NULL) = (oidc_subject IS NULL)),
        CONSTRAINT ck_users_totp CHECK (totp_confirmed_at IS NULL OR totp_secret IS NOT NULL)
    )
    """,
    f"""
    CREATE TABLE memberships (
        tenant_id uuid NOT NULL,
        user_id uuid NOT NULL,
        role text NOT NULL,
        revision integer NOT NULL DEFAULT 1,
        created_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT pk_memberships PRIMARY KEY (tenant_id, user_id),
        CONSTRAINT fk_memberships_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
        CONSTRAINT fk_memberships_user_id_users FOREIGN KEY (user_id) REFERENCES users (id) ON DELETE CASCADE,
        CONSTRAINT ck_memberships_role CHECK (role IN ({ROLES}))
    )
    """,
    f"""
    CREATE TABLE invitations (
        id uuid NOT NULL,
        tenant_id uuid,
        purpose text NOT NULL,
        email text,
        role text,
        token_sha256 bytea NOT NULL,
        invited_by text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        accepted_at timestamptz,
        revoked_at timestamptz,
        CONSTRAINT pk_invitations PRIMARY KEY (id),
        CONSTRAINT uq_invitations_token_sha256 UNIQUE (token_sha256),
        CONSTRAINT fk_invitations_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
        CONSTRAINT ck_invitations_purpose CHECK (purpose IN ('member', 'operator', 'sign_up')),
        CONSTRAINT ck_invitations_tenant CHECK ((purpose = 'member') = (tenant_id IS NOT NULL)),
        CONSTRAINT ck_invitations_role CHECK ((purpose = 'member') = (role IS NOT NULL) AND role IN ({ROLES})),
        CONSTRAINT ck_invitations_addressee CHECK (purpose = 'operator' OR email IS NOT NULL),
        CONSTRAINT ck_invitations_email CHECK (email ~ '{EMAIL}' AND length(email) <= 254),
        CONSTRAINT ck_invitations_token_sha256 CHECK (octet_length(token_sha256) = 32)
    )
    """,
    """
    CREATE TABLE sessions (
        id uuid NOT NULL,
        token_sha256 bytea NOT NULL,
        user_id uuid NOT NULL,
        tenant_id uuid,
        viewing boolean NOT NULL DEFAULT false,
        second_factor boolean NOT NULL DEFAULT false,
        created_at timestamptz NOT NULL DEFAULT now(),
        last_seen_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        address inet,
        user_agent text,
        CONSTRAINT pk_sessions PRIMARY KEY (id),
        CONSTRAINT uq_sessions_token_sha256 UNIQUE (token_sha256),
        CONSTRAINT fk_sessions_user_id_users FOREIGN KEY (user_id) REFERENCES users (id) ON DELETE CASCADE,
        CONSTRAINT fk_sessions_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
        CONSTRAINT ck_sessions_viewing CHECK (NOT viewing OR tenant_id IS NOT NULL),
        CONSTRAINT ck_sessions_token_sha256 CHECK (octet_length(token_sha256) = 32)
    )
    """,
    """
    CREATE TABLE one_time_links (
        id uuid NOT NULL,
        token_sha256 bytea NOT NULL,
        purpose text NOT NULL,
        user_id uuid NOT NULL,
        removes_second_factor boolean NOT NULL DEFAULT false,
        created_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        used_at timestamptz,
        CONSTRAINT pk_one_time_links PRIMARY KEY (id),
        CONSTRAINT uq_one_time_links_token_sha256 UNIQUE (token_sha256),
        CONSTRAINT fk_one_time_links_user_id_users FOREIGN KEY (user_id) REFERENCES users (id) ON DELETE CASCADE,
        CONSTRAINT ck_one_time_links_purpose CHECK (purpose IN ('reset', 'demo')),
        CONSTRAINT ck_one_time_links_token_sha256 CHECK (octet_length(token_sha256) = 32)
    )
    """,
    """
    CREATE TABLE sign_in_throttles (
        subject bytea NOT NULL,
        failures integer NOT NULL,
        updated_at timestamptz NOT NULL,
        CONSTRAINT pk_sign_in_throttles PRIMARY KEY (subject),
        CONSTRAINT ck_sign_in_throttles_subject CHECK (octet_length(subject) = 32),
        CONSTRAINT ck_sign_in_throttles_failures CHECK (failures >= 0)
    )
    """,
    """
    CREATE TABLE sign_up_plans (
        id uuid NOT NULL,
        tier text NOT NULL,
        weight double precision NOT NULL DEFAULT 1,
        limits jsonb NOT NULL,
        published_at timestamptz NOT NULL DEFAULT now(),
        ended_at timestamptz,
        CONSTRAINT pk_sign_up_plans PRIMARY KEY (id),
        CONSTRAINT ck_sign_up_plans_tier CHECK (tier ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
        CONSTRAINT ck_sign_up_plans_weight CHECK (weight > 0 AND weight <= 1000)
    )
    """,
)
INDEXES = (
    "CREATE INDEX ix_memberships_user_id ON memberships (user_id)",
    """
    CREATE UNIQUE INDEX uq_invitations_open ON invitations (tenant_id, email)
    WHERE accepted_at IS NULL AND revoked_at IS NULL
    """,
    "CREATE INDEX ix_invitations_expires_at ON invitations (expires_at)",
    "CREATE INDEX ix_sessions_user_id ON sessions (user_id)",
    "CREATE INDEX ix_sessions_tenant_id ON sessions (tenant_id)",
    "CREATE INDEX ix_sessions_expires_at ON sessions (expires_at)",
    "CREATE INDEX ix_one_time_links_user_id ON one_time_links (user_id)",
    "CREATE INDEX ix_one_time_links_expires_at ON one_time_links (expires_at)",
    "CREATE INDEX ix_sign_in_throttles_updated_at ON sign_in_throttles (updated_at)",
    "CREATE UNIQUE INDEX uq_sign_up_plans_published ON sign_up_plans ((true)) WHERE ended_at IS NULL",
)
REVISION = """
CREATE TRIGGER bump_revision BEFORE UPDATE OF role ON memberships FOR EACH ROW EXECUTE FUNCTION bump_revision()
"""
OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
ALL = "SELECT, INSERT, UPDATE, DELETE"
# Digests and secrets are read by `app_writer` alone, which signs people in before a tenant is known.
USER_COLUMNS = (
    "id, email, name, totp_confirmed_at, is_operator, created_at, last_seen_at, disabled_at, oidc_issuer"
)
INVITATION_COLUMNS = (
    "id, tenant_id, purpose, email, role, invited_by, created_at, expires_at, accepted_at, revoked_at"
)
SESSION_COLUMNS = "id, user_id, tenant_id, viewing, second_factor, created_at, last_seen_at, expires_at, address, user_agent"
LINK_COLUMNS = "id, purpose, user_id, removes_second_factor, created_at, expires_at, used_at"
GRANTS = {
    "users": {
        "app_tenant": f"SELECT ({USER_COLUMNS})",
        "app_operator": f"SELECT ({USER_COLUMNS}), INSERT, UPDATE, DELETE",
        "app_writer": "SELECT, UPDATE",
    },
    "memberships": {
        "app_tenant": "SELECT, INSERT, UPDATE (role), DELETE",
        "app_operator": ALL,
        "app_writer": "SELECT",
    },
    "invitations": {
        "app_tenant": f"SELECT ({INVITATION_COLUMNS}), INSERT, UPDATE (revoked_at)",
        "app_operator": f"SELECT ({INVITATION_COLUMNS}), INSERT, UPDATE, DELETE",
        "app_writer": "SELECT, UPDATE (accepted_at)",
    },
    "sessions": {
        "app_tenant": f"SELECT ({SESSION_COLUMNS}), DELETE",
        "app_operator": f"SELECT ({SESSION_COLUMNS}), DELETE",
        "app_writer": ALL,
    },
    "one_time_links": {
        "app_operator": f"SELECT ({LINK_COLUMNS}), DELETE",
        "app_writer": "SELECT, INSERT, UPDATE",
    },
    "sign_in_throttles": {"app_operator": "SELECT, DELETE", "app_writer": ALL},
    "sign_up_plans": {"app_operator": ALL, "app_writer": "SELECT"},
}
OF_TENANTS = ("memberships", "invitations", "sessions")
ACTORS = "ALTER TABLE audit_entries DROP CONSTRAINT ck_audit_entries_actor_kind, ADD CONSTRAINT ck_audit_entries_actor_kind"
KINDS = "'key', 'operator', 'command', 'system'"


def upgrade() -> None:
    for statement in (*TABLES, *INDEXES, REVISION):
        op.execute(statement)
    for table, grants in GRANTS.items():
        for role, rights in grants.items():
            op.execute(f"GRANT {rights} ON {table} TO {role}")
    for table in ("users", *OF_TENANTS):
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY all_rows ON {table} TO app_operator, app_writer USING (true) WITH CHECK (true)"
        )
    for table in OF_TENANTS:
        op.execute(f"CREATE POLICY own_rows ON {table} TO app_tenant USING ({OWN}) WITH CHECK ({OWN})")
    members = f"EXISTS (SELECT FROM memberships WHERE user_id = users.id AND {OWN})"
    op.execute(f"CREATE POLICY own_members ON users FOR SELECT TO app_tenant USING ({members})")
    op.execute(f"{ACTORS} CHECK (actor_kind IN ({KINDS}, 'user'))")
    op.execute("ALTER TABLE api_keys ADD COLUMN kind text NOT NULL DEFAULT 'key'")
    op.execute("ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_kind CHECK (kind IN ('key', 'console'))")
    op.execute("GRANT SELECT (kind) ON api_keys TO app_tenant, app_operator, app_writer")
    op.execute("GRANT UPDATE (revoked_at) ON api_keys TO app_writer")


def downgrade() -> None:
    op.execute("REVOKE UPDATE (revoked_at) ON api_keys FROM app_writer")
    op.execute("ALTER TABLE api_keys DROP COLUMN kind")
    # Entries by people stay: the log only grows.
    op.execute(f"{ACTORS} CHECK (actor_kind IN ({KINDS})) NOT VALID")
    op.execute("DROP POLICY own_members ON users")
    for table in (
        *("sign_up_plans", "sign_in_throttles", "one_time_links", "sessions", "invitations"),
        *("memberships", "users"),
    ):
        op.execute(f"DROP TABLE {table}")
