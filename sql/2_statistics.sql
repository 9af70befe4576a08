-- The functions that read the counters, which are in shared memory. 5_grants.sql grants them to roles.

-- A column for each counter of src/statistics/counter.rs, in the same order; a test compares them.
CREATE FUNCTION fence.read_stats(
    OUT stats_reset timestamptz, OUT grants bigint, OUT tries_lost bigint, OUT waits bigint,
    OUT wait_time double precision, OUT renewals bigint, OUT renewals_lost bigint, OUT releases bigint,
    OUT revocations bigint, OUT take_overs bigint, OUT guards bigint, OUT writes_checked bigint,
    OUT refused_pf001 bigint, OUT refused_pf002 bigint, OUT refused_pf003 bigint, OUT refused_pf004 bigint,
    OUT refused_pf005 bigint, OUT refused_pf006 bigint, OUT row_claims bigint, OUT row_take_overs bigint, OUT jumps bigint)
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'fence_read_stats';
COMMENT ON FUNCTION fence.read_stats() IS 'the row of fence.stats';

CREATE VIEW fence.stats AS SELECT * FROM fence.read_stats();
COMMENT ON VIEW fence.stats IS
    'one row: what this database has counted since stats_reset, also in transactions that were rolled back; all zero on a standby';
COMMENT ON COLUMN fence.stats.stats_reset IS
    'when counting began: the last reset, or the first count after a start of the server; NULL when nothing was counted yet';
COMMENT ON COLUMN fence.stats.grants IS 'leases granted';
COMMENT ON COLUMN fence.stats.tries_lost IS 'acquires that were answered with NULL, at once or after a wait';
COMMENT ON COLUMN fence.stats.waits IS 'acquires that stood in the queue';
COMMENT ON COLUMN fence.stats.wait_time IS 'how long they stood there, in milliseconds';
COMMENT ON COLUMN fence.stats.renewals IS 'leases renewed';
COMMENT ON COLUMN fence.stats.renewals_lost IS 'renewals that were answered with NULL: a holder has found its lease lost';
COMMENT ON COLUMN fence.stats.releases IS 'leases released by their holders';
COMMENT ON COLUMN fence.stats.revocations IS 'grants ended by lease_revoke or lease_evict';
COMMENT ON COLUMN fence.stats.take_overs IS 'leases granted over a grant that had expired or was abandoned';
COMMENT ON COLUMN fence.stats.guards IS
    'grants that a transaction has begun to guard, by lease_guard or by a write to a bound table';
COMMENT ON COLUMN fence.stats.writes_checked IS
'how often the fence has checked a row, and TRUNCATEs; those refused included; a row that ON CONFLICT updates is checked twice';
COMMENT ON COLUMN fence.stats.refused_pf001 IS 'writes refused with PF001: stale token';
COMMENT ON COLUMN fence.stats.refused_pf002 IS 'writes refused with PF002: no token presented';
COMMENT ON COLUMN fence.stats.refused_pf003 IS 'writes refused with PF003: token never issued';
COMMENT ON COLUMN fence.stats.refused_pf004 IS
    'writes, and calls of lease_guard, refused with PF004: the token does not speak for the lease';
COMMENT ON COLUMN fence.stats.refused_pf005 IS 'TRUNCATEs refused with PF005';
COMMENT ON COLUMN fence.stats.refused_pf006 IS
    'writes refused with PF006: another one holds the row; fence.refusals does not list them';
COMMENT ON COLUMN fence.stats.row_claims IS
    'claims of rows in tables whose rows are leases of their own, INSERTs that are born held included, also those that ON CONFLICT then does not make';
COMMENT ON COLUMN fence.stats.row_take_overs IS 'those of them that took a row whose deadline had passed';
COMMENT ON COLUMN fence.stats.jumps IS 'new epochs: failovers, restores, copies, fence_new_epoch()';

CREATE FUNCTION fence.read_refusals(
    OUT refused_at timestamptz, OUT sqlstate text, OUT relation text, OUT key text, OUT lease text,
    OUT presented bigint, OUT stored bigint, OUT holder text, OUT role text, OUT application_name text,
    OUT client_addr text, OUT pid integer)
    RETURNS SETOF record
    LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100 ROWS 256 AS 'MODULE_PATHNAME', 'fence_read_refusals';
COMMENT ON FUNCTION fence.read_refusals() IS 'the rows of fence.refusals';

CREATE VIEW fence.refusals AS
SELECT r.refused_at, r.sqlstate, r.relation, r.key::pg_catalog.jsonb AS key, r.lease, r.presented, r.stored, r.holder,
       r.role::pg_catalog.name AS role, r.application_name, r.client_addr::pg_catalog.inet AS client_addr, r.pid
  FROM fence.read_refusals() AS r;
COMMENT ON VIEW fence.refusals IS
    'the latest refused writes, newest first, although their transactions were rolled back; pg_fence.refusals_kept says how many';
COMMENT ON COLUMN fence.refusals.refused_at IS 'when it was refused';
COMMENT ON COLUMN fence.refusals.sqlstate IS 'PF001 to PF005';
COMMENT ON COLUMN fence.refusals.relation IS 'the table, with its schema; NULL for a call of lease_guard';
COMMENT ON COLUMN fence.refusals.key IS 'the row''s primary key, as DETAIL shows it; NULL where it is too long';
COMMENT ON COLUMN fence.refusals.lease IS 'the lease that guards the row';
COMMENT ON COLUMN fence.refusals.presented IS 'the token that was presented';
COMMENT ON COLUMN fence.refusals.stored IS 'the token that the row has';
COMMENT ON COLUMN fence.refusals.holder IS 'who held the lease then, or before, where nobody did';
COMMENT ON COLUMN fence.refusals.role IS 'the role that wrote';
COMMENT ON COLUMN fence.refusals.application_name IS 'the application_name of its session';
COMMENT ON COLUMN fence.refusals.client_addr IS 'where it had connected from; NULL for a Unix-domain socket';
COMMENT ON COLUMN fence.refusals.pid IS 'its server process';

CREATE FUNCTION fence_stats_reset()
    RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'fence_stats_reset';
COMMENT ON FUNCTION fence_stats_reset() IS 'sets fence.stats to zero and empties fence.refusals';
