"""Aliases that split their requests among versions, with a history; versions that wait for their validation; uploads in parts.

Revision 0004, after 0003.
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

VERSIONS = """
ALTER TABLE adapter_versions
    ALTER COLUMN digest DROP NOT NULL,
    ALTER COLUMN rank DROP NOT NULL,
    ALTER COLUMN config DROP NOT NULL,
    ADD COLUMN blob_deleted_at timestamptz,
    ADD CONSTRAINT ck_adapter_versions_validated CHECK (
        num_nulls(digest, rank, config) = 0 OR state IN ('uploading', 'validating', 'rejected', 'deleting')
    )
"""
# What validation finds is written once, over nothing.
KEEP_VERSIONS_TRIGGER = """
CREATE TRIGGER keep_adapter_version
BEFORE UPDATE OF id, tenant_id, adapter_id, version, digest, size_bytes, rank, config, created_at ON adapter_versions
FOR EACH ROW WHEN (
    (OLD.id, OLD.tenant_id, OLD.adapter_id, OLD.version, OLD.size_bytes, OLD.created_at)
    IS DISTINCT FROM
    (NEW.id, NEW.tenant_id, NEW.adapter_id, NEW.version, NEW.size_bytes, NEW.created_at)
    OR OLD.digest IS NOT NULL AND OLD.digest IS DISTINCT FROM NEW.digest
    OR OLD.rank IS NOT NULL AND OLD.rank IS DISTINCT FROM NEW.rank
    OR OLD.config IS NOT NULL AND OLD.config IS DISTINCT FROM NEW.config
) EXECUTE FUNCTION keep_adapter_version()
"""
OLD_KEEP_VERSIONS_TRIGGER = """
CREATE TRIGGER keep_adapter_version
BEFORE UPDATE OF id, tenant_id, adapter_id, version, digest, size_bytes, rank, config, created_at ON adapter_versions
FOR EACH ROW WHEN (
    (OLD.id, OLD.tenant_id, OLD.adapter_id, OLD.version, OLD.digest, OLD.size_bytes, OLD.rank, OLD.config, OLD.created_at)
    IS DISTINCT FROM
    (NEW.id, NEW.tenant_id, NEW.adapter_id, NEW.version, NEW.digest, NEW.size_bytes, NEW.rank, NEW.config, NEW.created_at)
) EXECUTE FUNCTION keep_adapter_version()
"""
ALIASES = """
ALTER TABLE adapter_aliases
    ADD COLUMN generation integer NOT NULL DEFAULT 1,
    ADD COLUMN previous_generation integer,
    ADD CONSTRAINT ck_adapter_aliases_generation CHECK (generation >= 1 AND previous_generation < generation)
"""
TARGETS = """
CREATE TABLE alias_targets (
    adapter_id uuid NOT NULL,
    alias text NOT NULL,
    generation integer NOT NULL,
    version integer NOT NULL,
    tenant_id uuid NOT NULL,
    weight integer NOT NULL,
    CONSTRAINT pk_alias_targets PRIMARY KEY (adapter_id, alias, generation, version),
    CONSTRAINT fk_alias_targets_adapter_id_alias_adapter_aliases FOREIGN KEY (adapter_id, alias)
        REFERENCES adapter_aliases (adapter_id, alias) ON DELETE CASCADE,
    CONSTRAINT fk_alias_targets_adapter_id_version_adapter_versions FOREIGN KEY (adapter_id, version)
        REFERENCES adapter_versions (adapter_id, version) ON DELETE CASCADE,
    CONSTRAINT fk_alias_targets_tenant_id_adapter_id_adapters FOREIGN KEY (tenant_id, adapter_id)
        REFERENCES adapters (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_alias_targets_weight CHECK (weight BETWEEN 1 AND 100)
)
"""
MOVE_PREVIOUS = """
INSERT INTO alias_targets SELECT adapter_id, alias, 1, previous_version, tenant_id, 100
FROM adapter_aliases WHERE previous_version IS NOT NULL
"""
MARK_MOVED = """
UPDATE adapter_aliases SET generation = 2, previous_generation = 1 WHERE previous_version IS NOT NULL
"""
MOVE_CURRENT = """
INSERT INTO alias_targets SELECT adapter_id, alias, generation, version, tenant_id, 100 FROM adapter_aliases
"""
DROP_VERSIONS = "ALTER TABLE adapter_aliases DROP COLUMN version, DROP COLUMN previous_version"
NOTE_FIRST_ALIAS_TRIGGER = """
CREATE TRIGGER note_first_alias AFTER INSERT ON alias_targets FOR EACH ROW EXECUTE FUNCTION note_first_alias()
"""
KEEP_TARGETS = """
CREATE FUNCTION keep_alias_target() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'alias targets are immutable' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
KEEP_TARGETS_TRIGGER = """
CREATE TRIGGER keep_alias_target BEFORE UPDATE ON alias_targets
FOR EACH ROW EXECUTE FUNCTION keep_alias_target()
"""
CHECK_WEIGHTS = """
CREATE FUNCTION check_alias_weights() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT sum(weight) FROM alias_targets
        WHERE adapter_id = NEW.adapter_id AND alias = NEW.alias AND generation = NEW.generation) <> 100 THEN
        RAISE EXCEPTION 'the weights of an alias sum to 100' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$
"""
CHECK_WEIGHTS_TRIGGER = """
CREATE CONSTRAINT TRIGGER check_alias_weights AFTER INSERT ON alias_targets DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION check_alias_weights()
"""
UPLOADS = """
CREATE TABLE uploads (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    adapter_id uuid NOT NULL,
    files jsonb NOT NULL,
    size_bytes bigint NOT NULL,
    part_size integer NOT NULL,
    state text NOT NULL,
    version integer,
    created_by text,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_uploads PRIMARY KEY (id),
    CONSTRAINT uq_uploads_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT fk_uploads_tenant_id_adapter_id_adapters FOREIGN KEY (tenant_id, adapter_id)
        REFERENCES adapters (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_uploads_state CHECK (state IN ('open', 'completed', 'aborted', 'expired')),
    CONSTRAINT ck_uploads_size_bytes CHECK (size_bytes >= 0),
    CONSTRAINT ck_uploads_part_size CHECK (part_size >= 1),
    CONSTRAINT ck_uploads_version CHECK ((state = 'completed') = (version IS NOT NULL))
)
"""
PARTS = """
CREATE TABLE upload_parts (
    upload_id uuid NOT NULL,
    file text NOT NULL,
    number integer NOT NULL,
    tenant_id uuid NOT NULL,
    size_bytes bigint NOT NULL,
    sha256 char(64) NOT NULL,
    received_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_upload_parts PRIMARY KEY (upload_id, file, number),
    CONSTRAINT fk_upload_parts_tenant_id_upload_id_uploads FOREIGN KEY (tenant_id, upload_id)
        REFERENCES uploads (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_upload_parts_file CHECK (file IN ('adapter_config.json', 'adapter_model.safetensors')),
    CONSTRAINT ck_upload_parts_number CHECK (number >= 1),
    CONSTRAINT ck_upload_parts_size_bytes CHECK (size_bytes >= 0),
    CONSTRAINT ck_upload_parts_sha256 CHECK (sha256 ~ '^[0-9a-f]{64}$')
)
"""
INDEXES = (
    "CREATE INDEX ix_alias_targets_tenant_id ON alias_targets (tenant_id)",
    "CREATE INDEX ix_uploads_open ON uploads (expires_at) WHERE state = 'open'",
    "CREATE INDEX ix_upload_parts_tenant_id ON upload_parts (tenant_id)",
)
RESTORE_ALIASES = """
ALTER TABLE adapter_aliases
    ADD COLUMN version integer,
    ADD COLUMN previous_version integer,
    ADD CONSTRAINT fk_adapter_aliases_adapter_id_version_adapter_versions FOREIGN KEY (adapter_id, version)
        REFERENCES adapter_versions (adapter_id, version)
"""
# An alias that split its requests goes back to the version that had most of them.
RESTORE_VERSION = """
UPDATE adapter_aliases SET {column} = (
    SELECT version FROM alias_targets
    WHERE alias_targets.adapter_id = adapter_aliases.adapter_id AND alias_targets.alias = adapter_aliases.alias
    AND alias_targets.generation = adapter_aliases.{generation}
    ORDER BY weight DESC, version DESC LIMIT 1
)
"""
OLD_NOTE_TRIGGER = """
CREATE TRIGGER note_first_alias AFTER INSERT OR UPDATE OF version ON adapter_aliases
FOR EACH ROW EXECUTE FUNCTION note_first_alias()
"""


def upgrade() -> None:
    op.execute("DROP TRIGGER keep_adapter_version ON adapter_versions")
    for statement in (
        VERSIONS,
        KEEP_VERSIONS_TRIGGER,
        ALIASES,
        TARGETS,
        MOVE_PREVIOUS,
        MARK_MOVED,
        MOVE_CURRENT,
    ):
        op.execute(statement)
    op.execute("DROP TRIGGER note_first_alias ON adapter_aliases")
    for statement in (DROP_VERSIONS, NOTE_FIRST_ALIAS_TRIGGER, KEEP_TARGETS, KEEP_TARGETS_TRIGGER):
        op.execute(statement)
    for statement in (CHECK_WEIGHTS, CHECK_WEIGHTS_TRIGGER, UPLOADS, PARTS, *INDEXES):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TABLE upload_parts")
    op.execute("DROP TABLE uploads")
    op.execute(RESTORE_ALIASES)
    op.execute(RESTORE_VERSION.format(column="version", generation="generation"))
    op.execute(RESTORE_VERSION.format(column="previous_version", generation="previous_generation"))
    op.execute("DELETE FROM adapter_aliases WHERE version IS NULL")
    op.execute("DROP TABLE alias_targets")
    op.execute("DROP FUNCTION keep_alias_target()")
    op.execute("DROP FUNCTION check_alias_weights()")
    op.execute("ALTER TABLE adapter_aliases ALTER COLUMN version SET NOT NULL")
    op.execute("ALTER TABLE adapter_aliases DROP COLUMN generation, DROP COLUMN previous_generation")
    op.execute(OLD_NOTE_TRIGGER)
    op.execute("DROP TRIGGER keep_adapter_version ON adapter_versions")
    op.execute("DELETE FROM adapter_versions WHERE num_nulls(digest, rank, config) > 0")
    op.execute(
        "ALTER TABLE adapter_versions DROP CONSTRAINT ck_adapter_versions_validated, "
        "DROP COLUMN blob_deleted_at, ALTER COLUMN digest SET NOT NULL, ALTER COLUMN rank SET NOT NULL, "
        "ALTER COLUMN config SET NOT NULL"
    )
    op.execute(OLD_KEEP_VERSIONS_TRIGGER)
