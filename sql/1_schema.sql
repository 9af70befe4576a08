-- The tables and sequences of pg_fence. The schema is created here rather than named in the control file: a schema that
-- somebody created beforehand would keep its owner.
\echo Use "CREATE EXTENSION pg_fence" to load this file. \quit

CREATE SCHEMA fence;
COMMENT ON SCHEMA fence IS 'pg_fence: state of leases and tokens; read fence.leases, write nothing here';

-- Tokens ---------------------------------------------------------------------------------------------------

CREATE SEQUENCE fence.token_seq AS bigint INCREMENT 1 MINVALUE 1 START 1 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.token_seq IS
    'every fencing token of this database, advanced by each start of the server; must stay logged, CACHE 1, NO CYCLE and ascending; in no dump';

-- In a dump this sequence stands for token_seq. Loading it only sets how far the next advance must go.
CREATE SEQUENCE fence.dumped_token_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.dumped_token_seq IS
    'how far the tokens have come, at most 2^19 behind. A dump carries this value: if it is above token_seq, a dump was loaded, and the tokens advance beyond it';

-- The past is recorded in sequences, because they are set without a transaction: no open transaction can delay, hide or
-- undo a new epoch.
CREATE SEQUENCE fence.database_identity_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.database_identity_seq IS
    'fingerprint of the database (timeline, system identifier, oids, base backup) that drew the last token: another one means that this is a copy, or that a dump of another was loaded';

-- Any recovery empties an unlogged sequence, so this one distinguishes the starts of a server.
CREATE UNLOGGED SEQUENCE fence.server_start_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.server_start_seq IS
    'fingerprint of the start of the server for which the tokens were advanced; must stay unlogged, so that any recovery empties it';

CREATE SEQUENCE fence.jump_token_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.jump_token_seq IS
    'the number at which the latest epoch began: a token up to it speaks for no lease until its holder has renewed; in no dump';

CREATE SEQUENCE fence.jump_count_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.jump_count_seq IS
    'how many new epochs have begun, because the database was another or older one, or by fence_new_epoch(); in no dump';

-- Leases ---------------------------------------------------------------------------------------------------

-- One row per grant, kept when the grant ends, so that the next grant is a HOT update: no index on columns that change,
-- and half of each page free. Vacuum must not truncate the table, because that takes a lock that would block a try.
CREATE TABLE fence.lease (
    name        text COLLATE "C" NOT NULL,
    slot        integer NOT NULL,
    mode        "char" NOT NULL,
    slots       integer NOT NULL,
    holder      text,
    session_label text NOT NULL,
    role        name NOT NULL,
    first_token bigint NOT NULL,
    renewal_tokens bigint[] NOT NULL,
    closing_token bigint,
    acquired_at timestamptz NOT NULL,
    renewed_at  timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    ended_at    timestamptz,
    ttl_us      bigint NOT NULL,
    renewals    bigint NOT NULL,
    metadata    jsonb,
    session_bound boolean NOT NULL,
    adopted_floor bigint,
    PRIMARY KEY (name, slot) WITH (fillfactor = 80)
) USING heap WITH (fillfactor = 50, vacuum_truncate = false, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE fence.lease IS 'one row per grant; written by the functions of pg_fence only, read through fence.leases';
COMMENT ON CONSTRAINT lease_pkey ON fence.lease IS 'each grant of a lease has a slot of its own';
COMMENT ON INDEX fence.lease_pkey IS 'finds the grants of a lease';
COMMENT ON COLUMN fence.lease.name IS 'the lease';
COMMENT ON COLUMN fence.lease.slot IS 'number among the grants of the lease; 0 for an exclusive one';
COMMENT ON COLUMN fence.lease.mode IS 'x exclusive, s shared, n slots';
COMMENT ON COLUMN fence.lease.slots IS 'how many grants may live together; 0 where mode is not slots';
COMMENT ON COLUMN fence.lease.holder IS 'as the caller named itself; NULL where it did not';
COMMENT ON COLUMN fence.lease.session_label IS 'application_name and process id of the session that acquired it, shown where there is no holder';
COMMENT ON COLUMN fence.lease.role IS 'the role that acquired it, by name: oids mean other roles elsewhere';
COMMENT ON COLUMN fence.lease.first_token IS 'the token of the acquire';
COMMENT ON COLUMN fence.lease.renewal_tokens IS 'the tokens of the latest 16 renewals, oldest first';
COMMENT ON COLUMN fence.lease.closing_token IS 'NULL while the grant is neither released, revoked nor replaced; then its closing token, or its latest one where another grant replaced it';
COMMENT ON COLUMN fence.lease.acquired_at IS 'when it was granted';
COMMENT ON COLUMN fence.lease.renewed_at IS 'when it was last renewed, or granted';
COMMENT ON COLUMN fence.lease.expires_at IS 'its deadline';
COMMENT ON COLUMN fence.lease.ended_at IS 'when it was released, revoked or replaced; NULL where it was not';
COMMENT ON COLUMN fence.lease.ttl_us IS 'the ttl last asked for, in microseconds';
COMMENT ON COLUMN fence.lease.renewals IS 'how often it was renewed';
COMMENT ON COLUMN fence.lease.metadata IS 'what the caller wished to be shown';
COMMENT ON COLUMN fence.lease.session_bound IS 'it ends with the session that acquired it, at the latest when it expires';
COMMENT ON COLUMN fence.lease.adopted_floor IS
    'NULL for a grant that was made here; for one that somebody else has made, the number at which the epoch began in which it was adopted';

-- The names that a role may take --------------------------------------------------------------------------

-- Roles by name, as in fence.lease. A row counts only if the role itself was granted SELECT on fence.leases: a role
-- created later under the same name was not. fence_grant lists the levels; any other word gives no right.
CREATE TABLE fence.role_prefix (
    role   name NOT NULL,
    prefix text COLLATE "C" NOT NULL,
    level  text COLLATE "C" NOT NULL,
    PRIMARY KEY (role, prefix)
) USING heap;
COMMENT ON TABLE fence.role_prefix IS
    'which names of leases a role may see and take: those that begin with a prefix; written by fence_grant and fence_revoke';
COMMENT ON CONSTRAINT role_prefix_pkey ON fence.role_prefix IS 'a role has a prefix once';
COMMENT ON INDEX fence.role_prefix_pkey IS 'keeps a role from having a prefix twice';
COMMENT ON COLUMN fence.role_prefix.role IS 'the role, by name';
COMMENT ON COLUMN fence.role_prefix.prefix IS 'how the names begin, byte by byte; empty for all names';
COMMENT ON COLUMN fence.role_prefix.level IS
    'what the role may do with them: monitor sees them, worker takes them, adopter adopts them too, admin does all';

CREATE FUNCTION fence.role_prefix_changed() RETURNS trigger
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'fence_role_prefix_changed';
COMMENT ON FUNCTION fence.role_prefix_changed() IS
    'tells every session that rows of fence.role_prefix have changed: each keeps what it has read';
CREATE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE ON fence.role_prefix
    FOR EACH ROW EXECUTE FUNCTION fence.role_prefix_changed();
-- Fires always and for each row, so also for rows written by a replication worker. (A TRUNCATE notifies sessions by
-- itself.)
ALTER TABLE fence.role_prefix ENABLE ALWAYS TRIGGER changed;
COMMENT ON TRIGGER changed ON fence.role_prefix IS 'tells every session that rows have changed';

-- PARALLEL UNSAFE, because it may take a snapshot.
CREATE FUNCTION fence.is_visible(name text) RETURNS boolean
    LANGUAGE c STABLE STRICT PARALLEL UNSAFE COST 2 AS 'MODULE_PATHNAME', 'fence_is_visible';
COMMENT ON FUNCTION fence.is_visible(text) IS 'true if the caller may see the lease of this name';

-- pg_dump treats these as data, not as part of the extension. (Sequences that are not named here are not dumped, so no
-- dump sets them back.)
SELECT pg_catalog.pg_extension_config_dump('fence.dumped_token_seq', '');
SELECT pg_catalog.pg_extension_config_dump('fence.database_identity_seq', '');
SELECT pg_catalog.pg_extension_config_dump('fence.lease', '');
SELECT pg_catalog.pg_extension_config_dump('fence.role_prefix', '');

CREATE FUNCTION fence.blocking_pids(name text, slot integer) RETURNS integer[]
    LANGUAGE c STABLE STRICT PARALLEL UNSAFE COST 10 AS 'MODULE_PATHNAME', 'fence_blocking_pids';
COMMENT ON FUNCTION fence.blocking_pids(text, integer) IS
    'the sessions whose open transactions keep this grant from being replaced; 0 for a prepared transaction';

CREATE FUNCTION fence.queue_key(name text) RETURNS bigint
    LANGUAGE c STABLE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'fence_queue_key';
COMMENT ON FUNCTION fence.queue_key(text) IS
    'the lock of this lease''s waiters, which they hold or wait for: classid and objid of pg_locks, where objsubid is 20552';

CREATE FUNCTION fence.visible_grants(name text DEFAULT NULL) RETURNS SETOF fence.lease
    LANGUAGE c STABLE PARALLEL UNSAFE COST 100 ROWS 100 AS 'MODULE_PATHNAME', 'fence_visible_grants';
COMMENT ON FUNCTION fence.visible_grants(text) IS
    'the grants of one lease; without a name, and for a caller that may not see all leases, of those that it may see, so that no EXPLAIN shows how many others there are';

-- PARALLEL UNSAFE, because it takes a snapshot.
CREATE FUNCTION fence.uncommitted_grants(name text DEFAULT NULL) RETURNS SETOF fence.lease
    LANGUAGE c STABLE PARALLEL UNSAFE COST 100 ROWS 1 AS 'MODULE_PATHNAME', 'fence_uncommitted_grants';
COMMENT ON FUNCTION fence.uncommitted_grants(text) IS
    'the grants that other sessions have acquired in transactions that are still open, of one lease or of all; none on a standby';

CREATE FUNCTION fence.checked_lease_name(name text, token bigint) RETURNS text
    LANGUAGE c STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'fence_checked_lease_name';
COMMENT ON FUNCTION fence.checked_lease_name(text, bigint) IS
    'the name, or error 22004 or 22023 where it is none, or the token is neither NULL nor one';

CREATE FUNCTION fence.record_creation() RETURNS void
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'fence_record_creation';
COMMENT ON FUNCTION fence.record_creation() IS
    'advances the tokens to the clock and records which database this is; called once, here: so an extension that is dropped and created again hands out no token twice, and a copy that was made before the first token knows that it is a copy';
SELECT fence.record_creation();

-- Takes columns instead of a row: a function of the table's row type would keep a DBA from altering the table.
CREATE FUNCTION fence.grant_state(
    name text, mode "char", first_token bigint, renewal_tokens bigint[], closing_token bigint, expires_at timestamptz,
    session_bound boolean,
    OUT mode_name text, OUT state text, OUT token bigint, OUT remaining interval)
    LANGUAGE c STABLE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'fence_grant_state';
COMMENT ON FUNCTION fence.grant_state(text, "char", bigint, bigint[], bigint, timestamptz, boolean) IS
    'what fence.leases works out of the columns of a grant';

-- A security barrier: conditions in the caller's query must not see leases that the caller may not see. (The UNION ALL
-- is in a subquery, because the planner would merge a view that is a UNION ALL itself into the caller's query, without
-- the barrier.)
CREATE VIEW fence.leases WITH (security_barrier) AS
SELECT l.name, s.mode_name AS mode, CASE WHEN l.is_committed THEN s.state ELSE 'uncommitted' END AS state,
       COALESCE(l.holder, l.session_label) AS holder, l.role, s.token, l.first_token, l.acquired_at, l.renewed_at, l.expires_at,
       s.remaining, l.renewals, l.metadata, fence.blocking_pids(l.name, l.slot) AS blocking_pids,
       l.adopted_floor IS NOT NULL AS adopted
  FROM (SELECT true AS is_committed, t.* FROM fence.lease AS t WHERE fence.is_visible('')  -- all of them
         UNION ALL
        SELECT true, t.* FROM fence.visible_grants() AS t
         UNION ALL
        SELECT false, t.* FROM fence.uncommitted_grants() AS t) AS l,
       fence.grant_state(l.name, l.mode, l.first_token, l.renewal_tokens, l.closing_token, l.expires_at, l.session_bound) AS s;
COMMENT ON VIEW fence.leases IS
    'one row per grant: who holds what until when, and who holds up a take-over, of the names that the caller may see; an acquire that is not committed yet is listed beside the row that it will replace';
COMMENT ON COLUMN fence.leases.name IS 'the lease';
COMMENT ON COLUMN fence.leases.mode IS 'exclusive, shared or slots';
COMMENT ON COLUMN fence.leases.state IS
    'held, expired (by the clock), abandoned (its session has ended), free (released or revoked) or uncommitted (another session''s open transaction has acquired it)';
COMMENT ON COLUMN fence.leases.holder IS 'as the caller named itself, else a description of its session';
COMMENT ON COLUMN fence.leases.role IS 'the role that was granted the lease';
COMMENT ON COLUMN fence.leases.token IS 'the latest token of the grant, the closing one included';
COMMENT ON COLUMN fence.leases.first_token IS 'the token that the acquire returned';
COMMENT ON COLUMN fence.leases.acquired_at IS 'when it was granted';
COMMENT ON COLUMN fence.leases.renewed_at IS 'when it was last renewed, or granted';
COMMENT ON COLUMN fence.leases.expires_at IS 'its deadline';
COMMENT ON COLUMN fence.leases.remaining IS
    'what is left until then; zero when it is over, NULL where it has no deadline';
COMMENT ON COLUMN fence.leases.renewals IS 'how often it was renewed';
COMMENT ON COLUMN fence.leases.metadata IS 'what the caller wished to be shown';
COMMENT ON COLUMN fence.leases.blocking_pids IS
    'sessions whose guarded transactions hold up a take-over; 0 is a prepared transaction';
COMMENT ON COLUMN fence.leases.adopted IS 'somebody else has granted it: its token is none of this database''s';
