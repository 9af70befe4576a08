-- Leases and tokens: the public functions. 5_grants.sql grants them to roles. COST, which is 1 for a comparison, makes
-- the planner evaluate a condition that takes a lease after all others. ROWS is the usual size of a set: with the
-- default of 1,000 the planner would choose a hash join with the whole of a table.

CREATE FUNCTION lease_acquire(
    name text, holder text DEFAULT NULL, ttl interval DEFAULT '30 s', wait interval DEFAULT '0',
    metadata jsonb DEFAULT NULL, shared boolean DEFAULT false, slots integer DEFAULT 1,
    reclaim boolean DEFAULT false, session boolean DEFAULT false)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_acquire';
COMMENT ON FUNCTION lease_acquire(text, text, interval, interval, jsonb, boolean, integer, boolean, boolean) IS
    'a fencing token when the lease is granted, NULL when it is taken (and stayed so for wait)';

CREATE FUNCTION lease_adopt(
    name text, token bigint, holder text DEFAULT NULL, wait interval DEFAULT '0', metadata jsonb DEFAULT NULL)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_adopt';
COMMENT ON FUNCTION lease_adopt(text, bigint, text, interval, jsonb) IS
    'makes known here what somebody else has granted: the token, or NULL while a transaction relies on an older grant (and did so for wait); PF004 if another holder has adopted it';

CREATE FUNCTION lease_renew(name text, token bigint, ttl interval DEFAULT NULL)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_renew';
COMMENT ON FUNCTION lease_renew(text, bigint, interval) IS
    'a new, greater token and a deadline of now + ttl; NULL when the token does not speak for the lease: stop';

CREATE FUNCTION lease_release(name text, token bigint)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_release';
COMMENT ON FUNCTION lease_release(text, bigint) IS
    'gives the lease back, and returns a closing token, with which this transaction may still write (after a failover, only once renewed); NULL when the lease was lost';

CREATE FUNCTION lease_revoke(name text)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_revoke';
COMMENT ON FUNCTION lease_revoke(text) IS
    'ends all current grants of the lease, also those of others, and returns the closing token; NULL when there was none';

CREATE FUNCTION lease_evict(name text, token bigint)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_evict';
COMMENT ON FUNCTION lease_evict(text, bigint) IS
    'ends the one grant that has this token, also another holder''s, and returns the closing token; NULL when there is none';

CREATE FUNCTION lease_acquire_all(
    names text[], holder text DEFAULT NULL, ttl interval DEFAULT '30 s', metadata jsonb DEFAULT NULL,
    session boolean DEFAULT false)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_acquire_all';
COMMENT ON FUNCTION lease_acquire_all(text[], text, interval, jsonb, boolean) IS
    'one token that speaks for all of these leases, or NULL and none of them taken; at most 1000';

CREATE FUNCTION lease_renew_all(names text[], token bigint, ttl interval DEFAULT NULL)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_renew_all';
COMMENT ON FUNCTION lease_renew_all(text[], bigint, interval) IS
    'renews all of them under one new token; NULL, and none renewed, when the token does not speak for each';

CREATE FUNCTION lease_release_all(names text[], token bigint)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_release_all';
COMMENT ON FUNCTION lease_release_all(text[], bigint) IS
    'releases all of them under one closing token; NULL, and none released, when the token does not speak for each';

CREATE FUNCTION lease_guard_all(names text[], token bigint)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_guard_all';
COMMENT ON FUNCTION lease_guard_all(text[], bigint) IS
    'the token, or PF004 when it does not speak for each of them; nobody else can be granted any until this transaction ends';

CREATE FUNCTION lease_keep(names text[], tokens bigint[])
    RETURNS TABLE (name text, token bigint, outcome text, renewed bigint, remaining interval, again_in interval, code text)
    LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 10 AS 'MODULE_PATHNAME', 'lease_keep';
COMMENT ON FUNCTION lease_keep(text[], bigint[]) IS
    'the heartbeat of a process: renews each of these leases that can be renewed at once, says what became of each, and when to send it again';

CREATE FUNCTION lease_guard(name text, token bigint)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_guard';
COMMENT ON FUNCTION lease_guard(text, bigint) IS
    'the token, or PF004; nobody else can be granted the lease until this transaction ends';

CREATE FUNCTION lease_check(name text, token bigint)
    RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100 AS 'MODULE_PATHNAME', 'lease_check';
COMMENT ON FUNCTION lease_check(text, bigint) IS
    'true if the token speaks for the lease at this instant; takes no lock, and promises nothing beyond it';

-- Volatile, so that it reads at the time of the call: a stable function would show the rows as of the beginning of
-- the statement, and so no grants of the same statement. The view reads the whole table to find all uncommitted grants;
-- this function finds only those of the lease.
CREATE FUNCTION lease_info(name text, token bigint DEFAULT NULL)
    RETURNS SETOF fence.leases LANGUAGE sql VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1
    BEGIN ATOMIC
        SELECT l.name, s.mode_name AS mode, CASE WHEN l.is_committed THEN s.state ELSE 'uncommitted' END AS state,
               COALESCE(l.holder, l.session_label) AS holder, l.role, s.token, l.first_token, l.acquired_at, l.renewed_at,
               l.expires_at, s.remaining, l.renewals, l.metadata, fence.blocking_pids(l.name, l.slot) AS blocking_pids,
               l.adopted_floor IS NOT NULL AS adopted
          FROM (SELECT true AS is_committed, t.*
                  FROM fence.visible_grants(fence.checked_lease_name(lease_info.name, lease_info.token)) AS t
                 UNION ALL
                SELECT false, t.*
                  FROM fence.uncommitted_grants(fence.checked_lease_name(lease_info.name, lease_info.token)) AS t) AS l,
               fence.grant_state(l.name, l.mode, l.first_token, l.renewal_tokens, l.closing_token, l.expires_at, l.session_bound) AS s;
    END;
COMMENT ON FUNCTION lease_info(text, bigint) IS
    'the rows of fence.leases for one lease, as of this call; given the token of an acquire in the same statement, with that grant';

CREATE FUNCTION lease_prune(older_than interval DEFAULT '1 day')
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'lease_prune';
COMMENT ON FUNCTION lease_prune(interval) IS
    'deletes the rows of grants that ended more than older_than ago (never of a guarded one), and returns how many';

CREATE FUNCTION lease_forget(name text)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 AS 'MODULE_PATHNAME', 'lease_forget';
COMMENT ON FUNCTION lease_forget(text) IS
    'deletes what is remembered of an adopted lease that is free, so that any token can be adopted again; returns how many rows';

CREATE FUNCTION lease_forget_older(than interval)
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'lease_forget_older';
COMMENT ON FUNCTION lease_forget_older(interval) IS
    'the same for all adopted leases that have been free for longer, to which no holder may come back; returns how many';

CREATE FUNCTION fence_new_epoch()
    RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'fence_new_epoch';
COMMENT ON FUNCTION fence_new_epoch() IS
    'begins a new epoch: the tokens advance, and no earlier one speaks until it is renewed; for a copy that pg_fence cannot notice';

CREATE FUNCTION fence_status(
    OUT last_token bigint, OUT timeline integer, OUT system_identifier bigint, OUT jumps bigint,
    OUT in_recovery boolean, OUT library_version text, OUT sql_version text)
    LANGUAGE c VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'fence_status';
COMMENT ON FUNCTION fence_status() IS
    'the token sequence, the identity of the database and the versions; last_token is NULL on a standby';
