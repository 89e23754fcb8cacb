"""SQL of the usage ledger: each statement is one transaction over many rows, passed as one JSON text.

Invariant (tenants/admission/README.md, "Epochs"): a statement that writes usage, or a reservation that no counters admitted,
locks its tenant's epoch row until the commit. A counter rebuild, which takes the next epoch, therefore sees all of it or nothing.
"""

from typing import Final, LiteralString

from sqlalchemy import text

from loraplex.tenants.ledger.histograms import BUCKETS

REQUESTED: Final[tuple[LiteralString, ...]] = (
    *("id", "tenant_id", "api_key_id", "adapter_id", "digest"),
    *("prompt_tokens", "completion_tokens", "amount_nano", "sequences"),
)
ADMITTED: Final[tuple[LiteralString, ...]] = ("day", "month", "admitted_at")
"""What the row of a reservation has of its request, and of its admission."""
STORED_RESERVATION: Final = (*REQUESTED, *ADMITTED)
STORED_USAGE: Final[dict[LiteralString, LiteralString]] = {
    "outcome": "outcome",
    "prompt_tokens": "uncached_tokens + cached_tokens",
    "cached_tokens": "cached_tokens",
    "completion_tokens": "completion_tokens",
    "reasoning_tokens": "reasoning_tokens",
    "amount_pico": "amount_pico",
}
"""Fields of `SettledUsage`, and where they come from in a row of the ledger."""
RESERVATION_COLUMNS: Final = """
    SELECT * FROM json_to_recordset(%s::json) AS a (
        id uuid, tenant_id uuid, api_key_id uuid, adapter_id uuid, digest text, prompt_tokens bigint, completion_tokens bigint,
        amount_nano bigint, sequences integer, policy_epoch bigint, day text, month text, admitted_at timestamptz, epoch bigint,
        gateway_id uuid, lease_s double precision
    )
"""
# An admission without counters belongs to the current epoch; zero before the first rebuild.
CURRENT_EPOCHS: Final = """
    INSERT INTO admission_epochs AS e (tenant_id, epoch)
    SELECT DISTINCT a.tenant_id, 0 FROM asked a JOIN tenants t ON t.id = a.tenant_id ORDER BY a.tenant_id
    ON CONFLICT (tenant_id) DO UPDATE SET epoch = e.epoch
    RETURNING tenant_id, epoch
"""
INSERT_RESERVATIONS: Final = """
    INSERT INTO reservations (
        id, tenant_id, api_key_id, adapter_id, digest, gateway_id, prompt_tokens, completion_tokens, amount_nano,
        day, month, admitted_at, expires_at, sequences
    )
    SELECT a.id, a.tenant_id, a.api_key_id, a.adapter_id, a.digest, a.gateway_id, a.prompt_tokens,
        a.completion_tokens, a.amount_nano, a.day, a.month, a.admitted_at, now() + make_interval(secs => a.lease_s),
        a.sequences
    FROM asked a JOIN tenants t ON t.id = a.tenant_id
"""
# Shipped reservations, whichever the epoch and the policy are by now. A request whose record was shipped before has ended.
RESERVE: Final = f"""
WITH asked AS MATERIALIZED ({RESERVATION_COLUMNS}), kept AS (
    {INSERT_RESERVATIONS} WHERE NOT EXISTS (SELECT FROM usage_records u WHERE u.id = a.id)
    ON CONFLICT (id) DO NOTHING
)
SELECT a.id, t.policy_epoch > a.policy_epoch FROM asked a JOIN tenants t ON t.id = a.tenant_id
"""
RESERVE_WITHOUT_COUNTERS: Final = f"""
WITH asked AS MATERIALIZED ({RESERVATION_COLUMNS}), locked AS MATERIALIZED ({CURRENT_EPOCHS}), kept AS (
    {INSERT_RESERVATIONS} AND t.policy_epoch = a.policy_epoch JOIN locked l ON l.tenant_id = a.tenant_id
    ON CONFLICT (id) DO NOTHING
    RETURNING id
)
SELECT a.id, k.id IS NOT NULL, l.epoch
FROM asked a LEFT JOIN kept k ON k.id = a.id LEFT JOIN locked l ON l.tenant_id = a.tenant_id
"""

# A row's amount as the counters have it: rounded up, and that of a correction down by as much.
AMOUNT_NANO: Final = "(r.amount_pico + CASE WHEN r.amount_pico < 0 THEN -999 ELSE 999 END) / 1000"
NO_ID: Final = "'00000000-0000-0000-0000-000000000000'::uuid"
RECORD_COLUMNS: Final = """
    id, tenant_id, kind, reverses_id, reason, client_request_id, api_key_id, adapter_id, adapter_version, digest, outcome,
    uncached_tokens, cached_tokens, completion_tokens, price_version_id, currency, amount_pico, day, month, admitted_at,
    ttft_ms, duration_ms, system_fingerprint, reasoning_tokens, session, alias, unsatisfied
"""
ADD_TO_ROLLUPS: Final = f"""
    INSERT INTO usage_rollups AS u (
        tenant_id, hour, adapter_id, api_key_id, price_version_id, currency, requests, uncached_tokens, cached_tokens,
        completion_tokens, amount_pico, reasoning_tokens
    )
    SELECT w.tenant_id, w.hour, w.model_id, w.api_key_id, coalesce(w.price_version_id, {NO_ID}), w.currency,
        count(*) FILTER (WHERE w.kind = 'usage'), sum(w.uncached_tokens)::bigint, sum(w.cached_tokens)::bigint,
        sum(w.completion_tokens)::bigint, sum(w.amount_pico), sum(w.reasoning_tokens)::bigint
    FROM written w GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6
    ON CONFLICT (tenant_id, hour, adapter_id, api_key_id, price_version_id, currency) DO UPDATE SET
        requests = u.requests + excluded.requests, uncached_tokens = u.uncached_tokens + excluded.uncached_tokens,
        cached_tokens = u.cached_tokens + excluded.cached_tokens,
        completion_tokens = u.completion_tokens + excluded.completion_tokens,
        amount_pico = u.amount_pico + excluded.amount_pico, reasoning_tokens = u.reasoning_tokens + excluded.reasoning_tokens
"""


def _array(element: LiteralString) -> LiteralString:
    """An array with one element per bucket; `element` has {index} from 0 and {place} from 1."""
    elements = [
        element.replace("{index}", str(index)).replace("{place}", str(index + 1)) for index in range(BUCKETS)
    ]
    return f"ARRAY[{', '.join(elements)}]"


ADD_BUCKETS: Final = ", ".join(
    f"{column} = " + _array(f"u.{column}[{{place}}] + excluded.{column}[{{place}}]")
    for column in ("ttft_buckets", "gap_buckets")
)
COUNT_ONCE_MORE: Final = f"""
    ON CONFLICT (tenant_id, hour, adapter_id, api_key_id, status)
    DO UPDATE SET requests = u.requests + excluded.requests, {ADD_BUCKETS}
"""
COUNT_REQUESTS: Final = f"""
    INSERT INTO request_rollups AS u (
        tenant_id, hour, adapter_id, api_key_id, status, requests, ttft_buckets, gap_buckets
    )
    SELECT w.tenant_id, w.hour, w.model_id, w.api_key_id, w.outcome, count(*),
        {_array("count(*) FILTER (WHERE g.ttft_bucket = {index})")},
        {_array("coalesce(sum(g.gap_buckets[{place}]), 0)::bigint")}
    FROM written w JOIN given g USING (id) WHERE w.kind = 'usage'
    GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5 {COUNT_ONCE_MORE}
"""
# Whether keys stand below this root: then its limits are those of the group.
IS_GROUP: Final = "EXISTS (SELECT FROM api_keys c WHERE c.limit_root = {root} AND c.id <> c.limit_root)"
CROSSED: Final = """
    INSERT INTO quota_events (id, tenant_id, level, subject_id, limit_name, period, threshold, used, limit_value)
    SELECT gen_random_uuid(), u.tenant_id, u.level, u.subject_id, b.limit_name, u.period, h.threshold, b.used,
        b.limit_value
    FROM {totals} u
    CROSS JOIN LATERAL (
        SELECT * FROM quotas q WHERE u.level = 'tenant' AND q.tenant_id = u.tenant_id
            AND q.api_key_id IS NULL AND q.adapter_id IS NULL
        UNION ALL
        SELECT * FROM quotas q WHERE u.level = 'key' AND q.tenant_id = u.tenant_id AND q.api_key_id = u.subject_id
            {of_keys}
        UNION ALL
        SELECT * FROM quotas q WHERE u.level = 'adapter' AND q.tenant_id = u.tenant_id
            AND q.api_key_id IS NULL AND q.adapter_id = u.subject_id
    ) q
    CROSS JOIN LATERAL (VALUES
        ('tokens_per_day', 'd', u.tokens, q.tokens_per_day, 1),
        ('tokens_per_month', 'm', u.tokens, q.tokens_per_month, 1),
        ('budget_per_day', 'd', (u.amount_nano + 999) / 1000, q.budget_per_day, 1000),
        ('budget_per_month', 'm', (u.amount_nano + 999) / 1000, q.budget_per_month, 1000)
    ) b (limit_name, kind, used, limit_value, unit)
    CROSS JOIN (VALUES (80), (100)) h (threshold)
    WHERE b.kind = left(u.period, 1) AND b.limit_value > 0
        AND (CASE b.unit WHEN 1 THEN u.tokens ELSE u.amount_nano END)::numeric * 100
            >= b.limit_value::numeric * b.unit * h.threshold
    ON CONFLICT DO NOTHING
"""
# Rows without an outcome are cancelled: their reservation is removed and no record is written. Epochs are locked before rollups
# and totals, and each in one order, so that two statements never deadlock.
SETTLE: Final = f"""
WITH given AS MATERIALIZED (
    SELECT DISTINCT ON (g.id) * FROM json_to_recordset(%s::json) AS g (
        id uuid, tenant_id uuid, kind text, reverses_id uuid, reason text, client_request_id text, api_key_id uuid,
        adapter_id uuid, adapter_version integer, digest text, outcome text, uncached_tokens bigint, cached_tokens bigint,
        completion_tokens bigint, price_version_id uuid, currency text, amount_pico bigint, day text, month text,
        admitted_at timestamptz, ttft_ms integer, duration_ms integer, ttft_bucket integer, gap_buckets bigint[],
        phases jsonb, limits jsonb, system_fingerprint text, reasoning_tokens bigint, session text,
        alias text, unsatisfied boolean
    ) ORDER BY g.id
), locked AS MATERIALIZED (
    SELECT e.tenant_id, e.epoch FROM admission_epochs e
    WHERE e.tenant_id IN (SELECT g.tenant_id FROM given g) ORDER BY e.tenant_id FOR SHARE
), written AS (
    INSERT INTO usage_records AS r ({RECORD_COLUMNS})
    SELECT g.id, g.tenant_id, g.kind, g.reverses_id, g.reason, g.client_request_id, g.api_key_id, g.adapter_id,
        g.adapter_version, g.digest, g.outcome, g.uncached_tokens, g.cached_tokens, g.completion_tokens,
        g.price_version_id, g.currency, g.amount_pico, g.day, g.month, g.admitted_at, g.ttft_ms, g.duration_ms, g.system_fingerprint,
        g.reasoning_tokens, g.session, g.alias, coalesce(g.unsatisfied, false)
    FROM given g LEFT JOIN locked l ON l.tenant_id = g.tenant_id
    WHERE g.outcome IS NOT NULL ORDER BY g.id
    ON CONFLICT (id) DO NOTHING
    RETURNING id, tenant_id, kind, api_key_id, adapter_id, coalesce(adapter_id, {NO_ID}) AS model_id, price_version_id,
        currency, outcome, uncached_tokens, cached_tokens, completion_tokens, reasoning_tokens, amount_pico,
        {AMOUNT_NANO} AS amount_nano, day, month, date_trunc('hour', admitted_at, 'UTC') AS hour
), removed AS (
    DELETE FROM reservations r USING given g WHERE r.id = g.id
), rolled_up AS ({ADD_TO_ROLLUPS}), counted AS ({COUNT_REQUESTS}), phased AS (
    INSERT INTO request_phases (id, tenant_id, phases, limits)
    SELECT g.id, g.tenant_id, g.phases, g.limits FROM written w JOIN given g USING (id) WHERE g.phases IS NOT NULL ORDER BY g.id
    ON CONFLICT (id) DO NOTHING
), sums AS (
    SELECT w.tenant_id, s.level, s.subject_id, p.period, count(*) FILTER (WHERE w.kind = 'usage') AS requests,
        sum(w.uncached_tokens + w.cached_tokens + w.completion_tokens)::bigint AS tokens,
        sum(w.amount_nano)::bigint AS amount_nano
    FROM written w
    CROSS JOIN LATERAL (
        VALUES ('tenant', w.tenant_id), ('key', w.api_key_id), ('adapter', w.adapter_id)
    ) s (level, subject_id)
    CROSS JOIN LATERAL (VALUES (w.day), (w.month)) p (period)
    WHERE s.subject_id IS NOT NULL
    GROUP BY w.tenant_id, s.level, s.subject_id, p.period
), totals AS (
    INSERT INTO usage_totals AS u (tenant_id, level, subject_id, period, requests, tokens, amount_nano)
    SELECT * FROM sums ORDER BY tenant_id, level, subject_id, period
    ON CONFLICT (tenant_id, level, subject_id, period) DO UPDATE SET requests = u.requests + excluded.requests,
        tokens = u.tokens + excluded.tokens, amount_nano = u.amount_nano + excluded.amount_nano
    RETURNING tenant_id, level, subject_id, period, tokens, amount_nano
), crossed AS ({CROSSED.format(totals="totals", of_keys=f"AND NOT {IS_GROUP.format(root='u.subject_id')}")})
SELECT g.id, w.id IS NOT NULL AS written, l.epoch,
    (SELECT k.limit_root FROM api_keys k WHERE k.id = g.api_key_id AND {IS_GROUP.format(root="k.limit_root")}) AS limit_root
FROM given g LEFT JOIN written w ON w.id = g.id LEFT JOIN locked l ON l.tenant_id = g.tenant_id
"""
# After the commit of what was settled: of two gateways that settle at once for one group, the later one sees both.
CROSSED_BY_GROUPS: Final = (
    CROSSED.format(
        totals="""(
        SELECT k.tenant_id, 'key' AS level, k.limit_root AS subject_id, t.period, sum(t.tokens)::bigint AS tokens,
            sum(t.amount_nano)::bigint AS amount_nano
        FROM api_keys k JOIN usage_totals t ON t.tenant_id = k.tenant_id AND t.level = 'key' AND t.subject_id = k.id
        WHERE k.limit_root = ANY(%s) AND t.period = ANY(%s) GROUP BY 1, 2, 3, 4
    )""",
        of_keys="",
    )
    + "RETURNING id"
)
# What the keys below each root used, to be counted for the root.
USED_BELOW: Final = text("""
SELECT k.limit_root, t.period, sum(t.tokens)::bigint, sum(t.amount_nano)::bigint
FROM api_keys k JOIN usage_totals t ON t.tenant_id = k.tenant_id AND t.level = 'key' AND t.subject_id = k.id
WHERE k.tenant_id = :tenant_id AND k.limit_root <> k.id AND t.period = ANY(:periods) GROUP BY 1, 2
""")

# A tenant that was removed in the meantime has no refusals.
COUNT_REFUSALS: Final = f"""
INSERT INTO request_rollups AS u (tenant_id, hour, adapter_id, api_key_id, status, requests, ttft_buckets, gap_buckets)
SELECT g.tenant_id, g.hour, coalesce(g.adapter_id, {NO_ID}), g.api_key_id, g.status, g.requests, {_array("0::bigint")},
    {_array("0::bigint")}
FROM json_to_recordset(%s::json) AS g (
    tenant_id uuid, hour timestamptz, adapter_id uuid, api_key_id uuid, status text, requests bigint
) JOIN tenants t ON t.id = g.tenant_id
ORDER BY 1, 2, 3, 4, 5 {COUNT_ONCE_MORE} RETURNING u.status
"""
# What a row omits grows until its minute ends. Retention bounds the rows of a tenant.
KEEP_FAILED: Final = """
INSERT INTO failed_requests
SELECT g.* FROM json_populate_recordset(NULL::failed_requests, %s::json) g JOIN tenants t ON t.id = g.tenant_id AND t.deleted_at IS NULL
ON CONFLICT (tenant_id, id) DO UPDATE SET omitted = excluded.omitted RETURNING id
"""
RENEW: Final = """
UPDATE reservations SET expires_at = now() + make_interval(secs => %s) WHERE id = ANY(%s)
RETURNING id
"""
# Expired reservations, oldest first. Their lease is extended, so that no other gateway takes them at the same time.
EXPIRED: Final = """
UPDATE reservations r SET expires_at = now() + make_interval(secs => %s)
FROM (
    SELECT id FROM reservations WHERE expires_at < %s ORDER BY expires_at LIMIT %s FOR UPDATE SKIP LOCKED
) e
WHERE r.id = e.id
RETURNING """ + ", ".join(f"r.{name}" for name in STORED_RESERVATION)
# A row without an outcome is an open request.
KNOWN: Final = f"""
SELECT id, {", ".join(STORED_USAGE.values())} FROM usage_records WHERE id = ANY(%s)
UNION ALL SELECT id, {", ".join("NULL" for _ in STORED_USAGE)} FROM reservations WHERE id = ANY(%s)
"""
# What the counters should have settled at a moment that has just passed: totals less the records of requests that were open
# then or admitted later. Ids contain their gateway's time, so the index finds the later ones. The last column: whether one of
# them has a time that is still in the future, from a clock that is ahead. The least of all these ids spares older partitions.
SETTLED: Final = f"""
WITH later AS MATERIALIZED (
    SELECT r.day, r.month, r.admitted_at, r.uncached_tokens + r.cached_tokens + r.completion_tokens AS tokens,
        {AMOUNT_NANO} AS amount_nano
    FROM usage_records r
    WHERE r.tenant_id = %s AND r.id >= %s AND (r.id = ANY(%s) OR (r.id >= %s AND r.admitted_at > %s))
)
SELECT e.epoch, p.period,
    (coalesce(u.tokens, 0) - coalesce(sum(l.tokens), 0))::bigint,
    (coalesce(u.amount_nano, 0) - coalesce(sum(l.amount_nano), 0))::bigint,
    coalesce(bool_or(l.admitted_at > %s), false)
FROM admission_epochs e CROSS JOIN unnest(%s::text[]) WITH ORDINALITY AS p (period, place)
LEFT JOIN usage_totals u
    ON u.tenant_id = e.tenant_id AND u.level = 'tenant' AND u.subject_id = e.tenant_id AND u.period = p.period
LEFT JOIN later l ON p.period IN (l.day, l.month)
WHERE e.tenant_id = %s
GROUP BY e.epoch, p.period, p.place, u.tokens, u.amount_nano ORDER BY p.place
"""
EPOCH: Final = "SELECT epoch FROM admission_epochs WHERE tenant_id = %s"
FIRST_EPOCH: Final = 1
# The next epoch is taken behind the caller's own fence. `fenced_epoch` of the row does not show that: a fence that another gateway
# raised meanwhile sets it before anyone has confirmed it.
NEXT_EPOCH: Final = text("""
UPDATE admission_epochs SET epoch = CAST(:fenced_epoch AS bigint) + 1
WHERE tenant_id = :tenant_id AND epoch <= CAST(:fenced_epoch AS bigint)
RETURNING epoch
""")
RAISE_FENCE: Final = text("""
INSERT INTO admission_epochs AS e (tenant_id, epoch, fenced_epoch, fence)
VALUES (:tenant_id, 0, CASE WHEN :outdates THEN CAST(:above AS bigint) ELSE 0 END, nextval('admission_fence'))
ON CONFLICT (tenant_id) DO UPDATE SET fence = excluded.fence,
    fenced_epoch = greatest(e.fenced_epoch, excluded.fenced_epoch, CASE WHEN :outdates THEN e.epoch END)
RETURNING fence, fenced_epoch
""")
# One row at least, for the time.
FENCES: Final = """
SELECT now(), e.tenant_id, e.fenced_epoch, e.fence, t.policy_epoch, e.ended_policy_epoch,
    ARRAY(SELECT k.id FROM api_keys k WHERE k.tenant_id = t.id AND k.ended_fence > %s::bigint),
    (SELECT jsonb_agg(jsonb_build_array(v.adapter_id, v.version)) FROM adapter_versions v
        WHERE v.tenant_id = t.id AND v.ended_fence > %s::bigint)
FROM (SELECT) AS one LEFT JOIN (admission_epochs e JOIN tenants t ON t.id = e.tenant_id) ON e.fence > %s
"""
CONFIRM: Final = """
INSERT INTO gateways AS g (id, seen_at, fence) VALUES (%s, now(), %s)
ON CONFLICT (id) DO UPDATE SET seen_at = now(), fence = greatest(g.fence, excluded.fence) RETURNING id
"""
# Gateways that may have an unshipped journal and have not confirmed the fence.
UNCONFIRMED: Final = """
SELECT count(*) FROM gateways WHERE fence < %s AND (%s OR seen_at > now() - make_interval(secs => %s))
"""
SEEN: Final = """
INSERT INTO gateways AS g (id, seen_at, skew_ms)
VALUES (%s, now(), abs(extract(epoch FROM %s::timestamptz - clock_timestamp()) * 1000)::bigint)
ON CONFLICT (id) DO UPDATE SET seen_at = now(), skew_ms = excluded.skew_ms RETURNING skew_ms
"""
GONE: Final = "DELETE FROM gateways WHERE id = %s OR seen_at < now() - make_interval(secs => %s) RETURNING id"
LIVE: Final = "SELECT count(*) FROM gateways WHERE seen_at > now() - make_interval(secs => %s)"
