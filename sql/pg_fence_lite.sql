-- pg_fence_lite: leases, fencing tokens and fenced tables in SQL, where no library can be installed. docs/reference/lite.md
--
--   psql -1 -f pg_fence_lite.sql       as the owner of the database (PostgreSQL 15 or newer); again for a newer version
--   SELECT fence.uninstall();          takes all of it away
--
-- fence.lease has a row for each lease, and PostgreSQL's locks of that row, which only the owner of all this can take, do the rest:
--   guard            FOR KEY SHARE: nobody else is granted the lease until the transaction ends
--   renew, release   FOR NO KEY UPDATE: they wait for each other; neither for guards, nor guards for them
--   acquire          FOR UPDATE SKIP LOCKED: it waits for nobody, and what somebody else has locked is taken
-- A token that is none of the row's locks nothing. The row is read after it is locked, and the clock after that. An advisory lock, which
-- any role can take, only orders those who wait, and the first grants of a new name.

-- Nothing that others have created gets into these: names are looked up in pg_catalog alone.
DO $$ BEGIN PERFORM pg_catalog.set_config('fence_lite.path', pg_catalog.current_setting('search_path'), false),
    pg_catalog.set_config('fence_lite.home', pg_catalog.quote_ident(pg_catalog.current_schema()::pg_catalog.text), false); END $$;
SET search_path = pg_catalog, pg_temp;
SET check_function_bodies = off;

DO $$
DECLARE
  own CONSTANT oid := to_regrole(quote_ident(current_user));
  home CONSTANT oid := to_regnamespace(nullif(current_setting('fence_lite.home'), ''));
  elsewhere text; others text; fault text[];
BEGIN
  SELECT min(p.pronamespace::regnamespace::text) FILTER (WHERE p.pronamespace <> home AND obj_description(p.oid, 'pg_proc') LIKE '%(pg_fence_lite)'),
      string_agg(p.oid::regprocedure::text, ', ') FILTER (WHERE p.pronamespace = home AND p.proowner <> own)
   INTO elsewhere, others FROM pg_proc p WHERE p.proname ~ '^(fenced$|fence_|lease_)';
  fault := CASE
    WHEN current_setting('server_version_num')::integer < 150000 THEN ARRAY['0A000', 'pg_fence_lite needs PostgreSQL 15 or newer']
    WHEN EXISTS (SELECT FROM pg_extension e WHERE e.extname = 'pg_fence') THEN ARRAY['42710', 'the extension pg_fence is installed here']
    WHEN home IS NULL THEN ARRAY['3F000', 'search_path has no schema for the calls']
    WHEN elsewhere IS NOT NULL THEN ARRAY['42723', 'the calls of pg_fence_lite are in schema ' || elsewhere]
    WHEN others IS NOT NULL THEN ARRAY['42723', 'functions of somebody else look like calls: ' || others]
    WHEN EXISTS (SELECT FROM pg_namespace n WHERE n.nspname = 'fence' AND (n.nspowner <> own
         OR obj_description(n.oid, 'pg_namespace') LIKE 'pg_fence_lite%' IS NOT TRUE))
    THEN ARRAY['42P06', 'there is a schema fence that is not this role''s pg_fence_lite'] END;
  IF fault IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = fault[1], MESSAGE = fault[2], HINT = 'Nothing was changed.';
  END IF;
  -- Before the first installation nobody was let in by fence_grant.
  PERFORM set_config('fence_lite.is_new', (to_regnamespace('fence') IS NULL)::text, false);
  CREATE SCHEMA IF NOT EXISTS fence;
  COMMENT ON SCHEMA fence IS 'pg_fence_lite: leases and tokens; read fence.leases, write nothing here';
END
$$;


-- State --------

CREATE SEQUENCE IF NOT EXISTS fence.token_seq AS bigint CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.token_seq IS 'every fencing token; must stay logged, ascending, CACHE 1, NO CYCLE';
CREATE UNLOGGED SEQUENCE IF NOT EXISTS fence.server_start_seq AS bigint;
COMMENT ON SEQUENCE fence.server_start_seq IS 'mark of the latest start; must stay unlogged, so that any recovery empties it';
CREATE SEQUENCE IF NOT EXISTS fence.database_identity_seq AS bigint;
COMMENT ON SEQUENCE fence.database_identity_seq IS 'mark of the database, another than a copy''s';
CREATE SEQUENCE IF NOT EXISTS fence.jump_token_seq AS bigint;
COMMENT ON SEQUENCE fence.jump_token_seq IS 'a token up to it speaks once its holder has renewed';
CREATE SEQUENCE IF NOT EXISTS fence.jump_count_seq AS bigint;
COMMENT ON SEQUENCE fence.jump_count_seq IS 'how often the tokens jumped, the installation included';

CREATE TABLE IF NOT EXISTS fence.lease (
  name text COLLATE "C" PRIMARY KEY,
  holder text,
  role name NOT NULL DEFAULT '',                  -- session_user; shown, and never asked
  first_token bigint NOT NULL DEFAULT 0,
  renewal_tokens bigint[] NOT NULL DEFAULT '{}',  -- of the latest 16 renewals
  closing_token bigint,                           -- NULL while the grant is current
  acquired_at timestamptz NOT NULL DEFAULT '-infinity', renewed_at timestamptz NOT NULL DEFAULT '-infinity',
  expires_at timestamptz NOT NULL DEFAULT '-infinity', ended_at timestamptz,
  ttl_us bigint NOT NULL DEFAULT 0, renewals bigint NOT NULL DEFAULT 0,
  metadata jsonb,
  granted_in xid8,                                -- transaction, which cannot rely on the grant at REPEATABLE READ
  closed_in xid8                                  -- transaction, until whose end the closing token speaks
) WITH (fillfactor = 50, vacuum_truncate = false, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE fence.lease IS 'the latest grant of each lease; read fence.leases, write nothing here';
CREATE TABLE IF NOT EXISTS fence.turn ();
COMMENT ON TABLE fence.turn IS 'empty: locked by who moves the tokens on, and by who waits';


-- Refusals --------
-- A function with RETURN keeps the operators that it was made with. All others get a search_path at the end, or are the owner's alone.

CREATE OR REPLACE FUNCTION fence.refuse(code text, message text, hint text, detail jsonb DEFAULT '{}', relation oid DEFAULT NULL,
  col text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE place record;
BEGIN
  SELECT n.nspname, c.relname, format('%I.%I', n.nspname, c.relname) AS whole INTO place
   FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
  RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint, SCHEMA = coalesce(place.nspname, ''),
    TABLE = coalesce(place.relname, ''), COLUMN = coalesce(col, ''), DETAIL = jsonb_strip_nulls(detail || jsonb_build_object('relation', place.whole));
END
$$;

CREATE OR REPLACE FUNCTION fence.left_out(what text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.refuse('0A000', what || ' is not in pg_fence_lite', 'The extension pg_fence has it: where its library is installed, '
    'pg_fence_lite--pg_fence.sql moves this database up, leases and fences included.');
END
$$;

CREATE OR REPLACE FUNCTION fence.bad(argument text, message text, code text DEFAULT '22023') RETURNS void LANGUAGE sql
  RETURN fence.refuse(code, message, format('Correct the argument "%s".', argument), jsonb_build_object('argument', argument));

-- `writes` is the call, where it is one that writes.
CREATE OR REPLACE FUNCTION fence.check(writes text, name text, token bigint DEFAULT 1, ttl interval DEFAULT NULL, wait interval DEFAULT NULL,
  holder text DEFAULT NULL, metadata jsonb DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  bad CONSTANT text[] := CASE
    WHEN name IS NULL THEN ARRAY['name', 'name must not be NULL', '22004']
    WHEN token IS NULL THEN ARRAY['token', 'token must not be NULL: it often means that the lease was taken or lost, so stop', '22004']
    WHEN octet_length(name) NOT BETWEEN 1 AND 512 THEN ARRAY['name', 'the name of a lease is 1 to 512 bytes long']
    WHEN token < 1 THEN ARRAY['token', 'a fencing token is at least 1']
    WHEN ttl <= '0' OR ttl > '366 days' THEN ARRAY['ttl', 'ttl must be positive and at most 366 days']
    WHEN wait < '0' OR wait >= '290000 years' THEN ARRAY['wait', 'wait must be finite and not negative']
    WHEN octet_length(holder) > 512 THEN ARRAY['holder', 'a holder is at most 512 bytes long']
    WHEN octet_length(metadata::text) > 65536 THEN ARRAY['metadata', 'metadata is at most 64 kB'] END;
BEGIN
  IF bad IS NOT NULL THEN
    PERFORM fence.bad(bad[1], bad[2], coalesce(bad[3], '22023'));
  ELSIF writes <> '' AND current_setting('transaction_read_only') = 'on' THEN
    PERFORM fence.refuse('25006', format('cannot execute %s() %s', writes,
      CASE WHEN pg_is_in_recovery() THEN 'during recovery' ELSE 'in a read-only transaction' END), '');
  END IF;
END
$$;

CREATE OR REPLACE FUNCTION fence.keeps_snapshot() RETURNS boolean LANGUAGE sql STABLE
  RETURN current_setting('transaction_isolation') IN ('repeatable read', 'serializable');



-- Tokens --------
-- 2^20 numbers are a second. A start of the server moves the sequence on by so many, or to the clock, and no token is drawn a minute behind
-- the clock: so whatever sets it back (a crash, a failover, a dump) is outrun.

CREATE OR REPLACE FUNCTION fence.clock() RETURNS bigint LANGUAGE sql
  RETURN floor(extract(epoch FROM clock_timestamp() - '2026-01-01 00:00:00+00'::timestamptz) * 1048576)::bigint;
CREATE OR REPLACE FUNCTION fence.last_token() RETURNS bigint LANGUAGE sql
  RETURN coalesce(pg_sequence_last_value('fence.token_seq'), 0);
CREATE OR REPLACE FUNCTION fence.floor() RETURNS bigint LANGUAGE sql
  RETURN coalesce(pg_sequence_last_value('fence.jump_token_seq'), 0);

-- This start of the server. The path names the database, and changes with each ALTER SEQUENCE.
CREATE OR REPLACE FUNCTION fence.start_mark(floor bigint) RETURNS bigint LANGUAGE sql
  RETURN 2 + (4611686018427387903 & hashtextextended(concat_ws(' ', pg_relation_filepath('fence.token_seq'::regclass), floor,
    extract(epoch FROM pg_postmaster_start_time())), 0));
CREATE OR REPLACE FUNCTION fence.has_begun() RETURNS boolean LANGUAGE sql
  RETURN coalesce(pg_sequence_last_value('fence.server_start_seq') = fence.start_mark(fence.floor()), false);

-- What tells this database from a copy; 0 where a platform does not let a role ask.
CREATE OR REPLACE FUNCTION fence.identity(floor bigint, OUT timeline integer, OUT system_identifier bigint, OUT mark bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
  BEGIN
    SELECT s.system_identifier, CASE WHEN pg_is_in_recovery() THEN (SELECT c.timeline_id FROM pg_control_checkpoint() AS c)
          ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer END
     INTO system_identifier, timeline FROM pg_control_system() AS s;
  EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    system_identifier := 0; timeline := 0;
  END;
  mark := greatest(1, 9223372036854775807 & hashtextextended(concat_ws(' ', timeline, system_identifier,
    (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()), 'fence.token_seq'::regclass::oid, floor), 0));
END
$$;
-- Then no earlier token speaks until its holder has renewed.
CREATE OR REPLACE FUNCTION fence.is_copy() RETURNS boolean LANGUAGE sql
  RETURN pg_sequence_last_value('fence.database_identity_seq') IS DISTINCT FROM (fence.identity(fence.floor())).mark;

-- Moves the tokens on to this one or above, where nobody has done so meanwhile. What is set of a sequence outlives a rollback: so the lock
-- is given back at once, by an error that is caught.
CREATE OR REPLACE FUNCTION fence.move_on(above bigint DEFAULT 0, is_jump boolean DEFAULT false) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  second CONSTANT bigint := 1048576;
  floor bigint; last bigint;
BEGIN
  LOCK TABLE fence.turn IN SHARE UPDATE EXCLUSIVE MODE;
  PERFORM fence.refuse('55000', 'fence.token_seq was altered, so its values are no fencing tokens',
      'ALTER SEQUENCE fence.token_seq INCREMENT 1 CACHE 1 NO CYCLE; ALTER SEQUENCE fence.token_seq SET LOGGED;')
    FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid
   WHERE s.seqrelid = 'fence.token_seq'::regclass AND NOT (c.relpersistence = 'p' AND s.seqincrement > 0 AND s.seqcache = 1 AND NOT s.seqcycle);
  last := fence.last_token();
  IF fence.has_begun() AND NOT is_jump THEN
    -- setval sets log_cnt to 0, the nextval by which the mark is set does not: so a dump that was loaded over it shows.
    is_jump := (SELECT s.log_cnt = 0 FROM fence.server_start_seq AS s);
    IF last >= above AND NOT is_jump THEN
      RAISE SQLSTATE 'PF999';
    END IF;
  END IF;
  -- Two moves within a second would take the sequence ahead of the clock, and a copy made between them behind it.
  last := greatest(last, above);
  IF last + second - fence.clock() BETWEEN 1 AND 2 * second THEN
    PERFORM pg_sleep((last + second - fence.clock())::float8 / second + 0.000001);
  END IF;
  floor := fence.floor();
  last := setval('fence.token_seq', greatest(last + second, fence.clock()));
  IF is_jump OR fence.is_copy() THEN
    floor := setval('fence.jump_token_seq', last);
    PERFORM setval('fence.jump_count_seq', coalesce(pg_sequence_last_value('fence.jump_count_seq'), 0) + 1);
  END IF;
  -- The mark of the start comes last, for with it the rest is believed.
  PERFORM setval('fence.database_identity_seq', (fence.identity(floor)).mark),
      setval('fence.server_start_seq', fence.start_mark(floor) - 1), nextval('fence.server_start_seq');
  RAISE SQLSTATE 'PF999';
EXCEPTION WHEN SQLSTATE 'PF999' THEN
  NULL;
END
$$;

-- The last token drawn, since this start.
CREATE OR REPLACE FUNCTION fence.settle() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.move_on() WHERE NOT fence.has_begun();
  RETURN fence.last_token();
END
$$;

-- For who has locked the lease's row, which has had no token above this one.
CREATE OR REPLACE FUNCTION fence.draw(above bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  second CONSTANT bigint := 1048576;
  last bigint; drawn bigint; has_begun boolean;
  was_set boolean;  -- or it is the 33rd time
BEGIN
  FOR n IN 1..4 LOOP
    SELECT t.last_value, t.log_cnt = 0, s.log_cnt > 0 AND fence.has_begun() INTO last, was_set, has_begun
     FROM fence.token_seq AS t, fence.server_start_seq AS s;
    IF has_begun IS NOT TRUE THEN
      PERFORM fence.move_on();
      CONTINUE;
    ELSIF last < fence.clock() - (CASE WHEN was_set THEN 1 ELSE 60 END) * second THEN
      PERFORM fence.move_on(fence.clock() - second);
    END IF;
    drawn := nextval('fence.token_seq');
    IF drawn > last AND drawn > above THEN
      RETURN drawn;
    END IF;
    PERFORM fence.move_on(greatest(last, above) + 1);
  END LOOP;
  PERFORM fence.refuse('55000', 'the sequences of the schema fence do not keep what is set', 'Restore them, or install anew.');
END
$$;


-- Leases --------

CREATE OR REPLACE FUNCTION fence.latest(l fence.lease) RETURNS bigint LANGUAGE sql IMMUTABLE
  RETURN coalesce(l.renewal_tokens[cardinality(l.renewal_tokens)], l.first_token);
CREATE OR REPLACE FUNCTION fence.is_live(l fence.lease) RETURNS boolean LANGUAGE sql
  RETURN l.closing_token IS NULL AND l.expires_at > clock_timestamp();
CREATE OR REPLACE FUNCTION fence.has(l fence.lease, token bigint) RETURNS boolean LANGUAGE sql IMMUTABLE
  RETURN token = l.first_token OR token = ANY (l.renewal_tokens);
-- But for a jump.
CREATE OR REPLACE FUNCTION fence.speaks(l fence.lease, token bigint) RETURNS boolean LANGUAGE sql
  RETURN fence.has(l, token) AND fence.is_live(l) OR token = l.closing_token AND l.closed_in = pg_current_xact_id_if_assigned();

-- Has the grant ended, but after this snapshot?
CREATE OR REPLACE FUNCTION fence.ended_since(l fence.lease, as_of pg_snapshot) RETURNS boolean LANGUAGE sql
  RETURN as_of IS NOT NULL AND coalesce(CASE WHEN l.closing_token IS NULL THEN l.expires_at > greatest(now(), statement_timestamp())
    ELSE NOT pg_visible_in_snapshot(l.closed_in, as_of) AND pg_visible_in_snapshot(l.closed_in, pg_current_snapshot()) END, false);

-- By a hash that cannot be run backwards, so that nobody finds a name with another's key.
CREATE OR REPLACE FUNCTION fence.lock_key(lease text) RETURNS bigint LANGUAGE sql STABLE
  RETURN ('x' || left(encode(sha256(replace('pg_fence_lite ' || lease, E'\\', E'\\\\')::bytea), 'hex'), 16))::bit(64)::bigint;

-- Who waits, and who grants a new name, has the key and a lock of fence.turn, which no stranger can have.
CREATE OR REPLACE FUNCTION fence.nobody_waits(lease text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  key CONSTANT bigint := fence.lock_key(lease);
BEGIN
  IF pg_try_advisory_lock_shared(key) THEN
    RETURN pg_advisory_unlock_shared(key);
  END IF;
  RETURN NOT EXISTS (
    SELECT FROM pg_locks q JOIN pg_locks t ON t.virtualtransaction = q.virtualtransaction
     WHERE q.locktype = 'advisory' AND q.objsubid = 1 AND (q.classid::bigint << 32) | q.objid::bigint = key AND q.granted
      AND t.relation = 'fence.turn'::regclass AND t.mode = 'AccessShareLock');
END
$$;

-- 40001 where the lease's row is not as the snapshot shows it: so PostgreSQL refuses to lock it, or to insert another.
CREATE OR REPLACE FUNCTION fence.check_snapshot(lease text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM fence.lease l WHERE l.name = lease FOR SHARE SKIP LOCKED;
  IF NOT FOUND AND NOT EXISTS (SELECT FROM fence.lease l WHERE l.name = lease) AND pg_try_advisory_xact_lock(fence.lock_key(lease)) THEN
    INSERT INTO fence.lease (name) VALUES (lease) ON CONFLICT DO NOTHING;
  END IF;
  RAISE SQLSTATE 'PF999';
EXCEPTION WHEN SQLSTATE 'PF999' THEN
  NULL;
END
$$;

-- One try: the token, or NULL. `is_head`: of the queue. What has ended after `as_of` counts as taken.
CREATE OR REPLACE FUNCTION fence.attempt(lease text, by text, ttl interval, data jsonb, reclaim boolean, is_head boolean,
  as_of pg_snapshot DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  us CONSTANT bigint := extract(epoch FROM ttl) * 1000000;
  old fence.lease; token bigint; time timestamptz;
  is_mine boolean;  -- to be reclaimed
BEGIN
  -- A try that loses mostly loses here, and has written nothing and locked nothing.
  SELECT l.* INTO old FROM fence.lease l WHERE l.name = lease;
  is_mine := coalesce(reclaim AND old.holder = by AND fence.is_live(old), false);
  IF fence.is_live(old) AND NOT is_mine OR fence.ended_since(old, as_of)
    OR NOT is_head AND NOT is_mine AND NOT fence.nobody_waits(lease) THEN
    RETURN NULL;
  END IF;
  -- What is locked in vain is given back with this block.
  BEGIN
    IF old.name IS NULL THEN
      LOCK TABLE fence.turn IN ACCESS SHARE MODE;
      IF NOT is_head AND NOT pg_try_advisory_xact_lock(fence.lock_key(lease)) AND NOT fence.nobody_waits(lease) THEN
        RAISE SQLSTATE 'PF999';  -- somebody is just granted this name for the first time
      END IF;
      INSERT INTO fence.lease (name) VALUES (lease) ON CONFLICT DO NOTHING;
    END IF;
    SELECT l.* INTO old FROM fence.lease l WHERE l.name = lease FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR fence.is_live(old) AND NOT coalesce(reclaim AND old.holder = by, false) OR fence.ended_since(old, as_of) THEN
      RAISE SQLSTATE 'PF999';
    END IF;
    token := fence.draw(greatest(fence.latest(old), old.closing_token));
    time := clock_timestamp();
    UPDATE fence.lease l
      SET holder = coalesce(by, coalesce(nullif(current_setting('application_name'), ''), 'session') || '[' || pg_backend_pid() || ']'),
        role = session_user, first_token = token, renewal_tokens = '{}', closing_token = NULL, acquired_at = time, renewed_at = time,
        expires_at = time + us * interval '1 us', ended_at = NULL, ttl_us = us, renewals = 0, metadata = data, granted_in = pg_current_xact_id(), closed_in = NULL
     WHERE l.name = lease;
  EXCEPTION WHEN SQLSTATE 'PF999' THEN
    RETURN NULL;
  END;
  IF fence.keeps_snapshot() THEN
    RAISE WARNING 'this transaction''s reads may be older than its grant of lease %: commit before you rely on it', to_json(lease);
  END IF;
  RETURN token;
END
$$;

CREATE OR REPLACE FUNCTION fence.renew(names text[], fresh bigint, moment timestamptz, us bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE fence.lease l
    SET renewal_tokens = l.renewal_tokens[greatest(cardinality(l.renewal_tokens) - 14, 1):] || fresh, renewals = l.renewals + 1,
      renewed_at = moment, ttl_us = coalesce(us, l.ttl_us), expires_at = moment + coalesce(us, l.ttl_us) * interval '1 us'
   WHERE l.name = ANY (names) AND l.expires_at > moment;
END
$$;

-- Renews or ends the grant that the token is of (lease_revoke: any); NULL where there is none.
CREATE OR REPLACE FUNCTION fence.change(call text, lease text, token bigint, ttl interval DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  held fence.lease; time timestamptz; fresh bigint;
BEGIN
  PERFORM fence.check(call, lease, token, ttl);
  -- It waits for an open transaction that has changed the lease.
  SELECT l.* INTO held FROM fence.lease l WHERE l.name = lease AND (call = 'lease_revoke' OR fence.speaks(l, token)
    OR call = 'lease_release' AND fence.has(l, token) AND l.closed_in = pg_current_xact_id_if_assigned()) FOR NO KEY UPDATE;
  time := clock_timestamp();
  IF held.closing_token IS NOT NULL OR held.expires_at <= time OR held.name IS NULL THEN
    RETURN CASE WHEN call = 'lease_release' THEN held.closing_token END;
  END IF;
  fresh := fence.draw(fence.latest(held));
  IF call = 'lease_renew' THEN
    PERFORM fence.renew(ARRAY[lease], fresh, time, (extract(epoch FROM ttl) * 1000000)::bigint);
  ELSE
    UPDATE fence.lease l SET closing_token = fresh, ended_at = time, closed_in = pg_current_xact_id() WHERE l.name = lease;
  END IF;
  RETURN fresh;
END
$$;

-- NULL: the token speaks for the lease, which nobody else is granted until this transaction ends. Else the refusal, which may show `shown`.
CREATE OR REPLACE FUNCTION fence.relies(lease text, token bigint, shown text) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
  named CONSTANT text := coalesce('lease ' || to_json(shown)::text, 'the row''s lease');
  held fence.lease; is_locked boolean;
BEGIN
  IF NOT fence.has_begun() THEN
    PERFORM fence.move_on();
  END IF;
  PERFORM FROM fence.lease l WHERE l.name = lease AND fence.speaks(l, token) FOR KEY SHARE;
  is_locked := FOUND;
  IF fence.keeps_snapshot() THEN
    PERFORM fence.check_snapshot(lease);
  END IF;
  SELECT l.* INTO held FROM fence.lease l WHERE l.name = lease;
  is_locked := is_locked AND coalesce(fence.speaks(held, token), false);
  IF is_locked AND held.granted_in = pg_current_xact_id_if_assigned() AND fence.keeps_snapshot() THEN
    RETURN ARRAY['55000', 'this transaction''s snapshot is older than its grant of ' || named,
      'Acquire in a transaction of its own and commit it, then begin this one.', jsonb_build_object('lease', shown)::text];
  ELSIF is_locked AND fence.latest(held) > fence.floor() THEN
    RETURN NULL;
  END IF;
  RETURN ARRAY['PF004', format('fencing token %s does not speak for %s', token, named),
    CASE WHEN is_locked THEN 'The database has failed over, or been restored or copied: call lease_renew with this token, and go on with the '
      'one it returns. NULL means: stop.'
    ELSE 'The lease has expired, been released, revoked or taken over, or was never granted with it: stop.' END,
    jsonb_build_object('lease', shown, 'presented', token, 'renew_first', nullif(is_locked, false), 'holder', held.holder, 'expires_at', to_char(held.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))::text];
END
$$;

-- The sessions whose open transactions keep a lease from being granted; 0 for a prepared one. xmax may be a multixact.
CREATE OR REPLACE FUNCTION fence.blocking_pids(locker xid) RETURNS integer[] LANGUAGE plpgsql STABLE AS $$
DECLARE lockers xid[] := ARRAY[locker];
BEGIN
  BEGIN
    lockers := lockers || ARRAY(SELECT m.xid FROM pg_get_multixact_members(locker) AS m WHERE locker <> '0');
  EXCEPTION WHEN OTHERS THEN
    NULL;
  END;
  RETURN ARRAY(SELECT DISTINCT coalesce(x.pid, 0) FROM pg_locks x JOIN pg_locks t ON t.virtualtransaction = x.virtualtransaction
         WHERE x.locktype = 'transactionid' AND x.granted AND x.transactionid = ANY (lockers)
          AND t.relation = 'fence.lease'::regclass AND t.mode IN ('RowShareLock', 'RowExclusiveLock'));
END
$$;

CREATE OR REPLACE VIEW fence.leases AS
SELECT l.name, 'exclusive'::text AS mode, CASE WHEN l.closing_token IS NOT NULL THEN 'free' WHEN fence.is_live(l) THEN 'held' ELSE 'expired' END AS state,
    l.holder, l.role, coalesce(l.closing_token, fence.latest(l)) AS token,
    l.first_token, l.acquired_at, l.renewed_at, l.expires_at,
    CASE WHEN l.closing_token IS NULL THEN greatest(l.expires_at - clock_timestamp(), '0') ELSE '0' END AS remaining,
    l.renewals, l.metadata, fence.blocking_pids(l.xmax) AS blocking_pids, false AS adopted
 FROM fence.lease l;
COMMENT ON VIEW fence.leases IS 'one row per lease: who holds what until when, and who holds up a take-over';


-- The fence --------
-- fence_protect writes a trigger function for the table (fence.trigger_body), which hands its columns to fence.judge. All runs with the
-- writer's rights, but for fence.relies, which only those may call that may use leases.

-- May the writer read what an error would show? The current user and the session's both must.
CREATE OR REPLACE FUNCTION fence.may_read(relation oid) RETURNS boolean LANGUAGE sql STABLE
  RETURN NOT row_security_active(relation) AND has_table_privilege(relation, 'SELECT') AND has_table_privilege(session_user, relation, 'SELECT');

-- The fence that the row is to have, 0 for NULL, NULL to leave it as it is. It refuses by -1, or, where it has the row as `data`, by an
-- error. A row that moves to another partition is deleted and inserted: for that, pg_fence.token becomes the token of the write.
CREATE OR REPLACE FUNCTION fence.judge(op text, relation oid, col text, mode text, lease_columns text[], is_partitioned boolean, is_free boolean,
  stored bigint, shown bigint, old_lease text, lease text, data jsonb DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  is_replica CONSTANT boolean := current_setting('session_replication_role') = 'replica';  -- only the order is judged
  is_bound CONSTANT boolean := lease_columns IS NOT NULL;
  presents CONSTANT boolean := is_replica OR mode <> 'managed' AND op <> 'DELETE' AND shown IS DISTINCT FROM stored;
  ambient CONSTANT text := coalesce(current_setting('pg_fence.token', true), '');
  named CONSTANT boolean := op = 'UPDATE' AND NOT presents
    AND coalesce(current_setting('fence_lite.named', true) = relation || ' ' || pg_trigger_depth(), false);
  token CONSTANT bigint := CASE WHEN presents THEN shown WHEN ambient <> '' THEN ambient::bigint WHEN named AND mode = 'monotonic' THEN stored END;
  is_stale CONSTANT boolean := op <> 'INSERT' AND coalesce(token < stored OR token = stored AND mode = 'strict', false);
  is_new CONSTANT boolean := mode = 'managed' AND op = 'INSERT' AND is_free AND NOT is_replica  -- and is created without a token
    AND (token IS NULL OR is_bound AND NOT (is_partitioned AND shown IS NOT DISTINCT FROM token));
  shows CONSTANT boolean := data IS NOT NULL AND fence.may_read(relation);
  key jsonb;
  refused text[];
BEGIN
  IF is_new AND (shown > 0) IS NOT TRUE OR is_replica AND (op <> 'UPDATE' OR stored IS NULL OR token >= stored AND NOT is_stale) THEN
    RETURN CASE WHEN is_new THEN 0 END;
  END IF;
  refused := CASE
    WHEN is_new THEN ARRAY['PF002', 'no fencing token presented', 'A managed fence is never blanked: load data before fence_protect, or '
      'under session_replication_role = replica.']
    WHEN token IS NULL AND NOT (named AND mode = 'strict' AND stored IS NOT NULL) THEN ARRAY['PF002', 'no fencing token presented', 'SET LOCAL '
      'pg_fence.token to the token of your lease, or call lease_guard. NULL often means that lease_renew found the lease lost: stop.']
    WHEN token IS NULL OR is_replica THEN ARRAY['PF001']
    WHEN is_bound AND (op <> 'DELETE' AND lease IS NULL OR op <> 'INSERT' AND old_lease IS NULL) THEN ARRAY['22004',
      format('column %s is NULL, so the row names no lease', array_to_string(lease_columns, ' or ')), 'The owner can mend it in one '
      'transaction: fence_unprotect, UPDATE, SET NOT NULL, fence_protect.', jsonb_build_object('column', lease_columns[1])::text]
    WHEN is_bound AND (octet_length(lease) NOT BETWEEN 1 AND 512 OR octet_length(old_lease) NOT BETWEEN 1 AND 512) THEN ARRAY['22023',
      'the row''s columns make no lease name of 1 to 512 bytes', 'Bind the table by other columns.']
    WHEN NOT token BETWEEN 1 AND pg_sequence_last_value('fence.token_seq') AND NOT token BETWEEN 1 AND fence.settle() THEN ARRAY['PF003',
      format('fencing token %s was never issued by this database', token), 'After a restore, fence_new_epoch() makes the sequence outrun others.']
    WHEN is_stale AND (mode = 'strict' OR NOT is_bound) THEN ARRAY['PF001'] END;
  IF refused IS NULL AND is_bound THEN
    IF NOT has_function_privilege('fence.relies(text, bigint, text)'::regprocedure, 'EXECUTE') THEN
      refused := ARRAY['42501', format('role "%s" may not use leases, nor write what is bound to one', current_user),
        'The owner of pg_fence_lite lets it: fence_grant.', jsonb_build_object('role', current_user)::text];
    ELSE
      refused := fence.relies(coalesce(lease, old_lease), token, CASE WHEN shows THEN coalesce(lease, old_lease) END);
      IF refused IS NULL AND old_lease <> lease THEN
        refused := fence.relies(old_lease, token, CASE WHEN shows THEN old_lease END);
      END IF;
      IF is_stale AND refused[1] = 'PF004' AND refused[4]::jsonb -> 'renew_first' = 'null' THEN
        refused := ARRAY['PF001'];
      END IF;
    END IF;
  END IF;
  IF refused IS NOT NULL AND data IS NULL THEN
    RETURN -1;
  ELSIF refused[1] = 'PF001' THEN
    refused := ARRAY['PF001', 'stale fencing token' || coalesce(' ' || token, '') || ': the row has already seen '
        || CASE WHEN shows THEN stored::text ELSE 'the same or a greater one' END, CASE WHEN shows AND coalesce(token = stored, true)
      THEN 'In strict mode write the row again with lease_renew''s token.' ELSE 'A newer holder may be at work: stop, and do not retry.' END];
  END IF;
  IF refused IS NOT NULL THEN
    SELECT jsonb_object_agg(a.attname, data -> a.attname) INTO key
     FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::smallint[])[:i.indnkeyatts - 1])
     WHERE i.indrelid = relation AND i.indisprimary AND shows;
    PERFORM fence.refuse(refused[1], refused[2], refused[3], jsonb_build_object('key', key, 'presented', token, 'stored',
      CASE WHEN shows THEN stored END) || coalesce(refused[4], '{}')::jsonb, relation, col);
  END IF;
  IF named THEN
    PERFORM set_config('fence_lite.named', '', true);
  END IF;
  IF (is_bound OR is_partitioned) AND token::text <> ambient THEN
    PERFORM set_config('pg_fence.token', token::text, true);
  END IF;
  -- Since the row was written nobody was granted the lease whom a token that speaks excludes: the greater one stays.
  RETURN greatest(token, CASE WHEN is_bound THEN stored END);
END
$$;

CREATE OR REPLACE FUNCTION fence.refuse_columns(relation oid, columns text[]) RETURNS void LANGUAGE sql AS $$
  SELECT fence.refuse('42703', format('the trigger fenced finds no column %s', to_json(c)), 'Renamed or dropped? Call fence_protect again '
    'with the present name.', jsonb_build_object('column', c), relation, c)
   FROM unnest(columns) AS c WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = c AND a.attnum > 0)
$$;

CREATE OR REPLACE FUNCTION fence.refuse_truncate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.refuse('PF005', 'TRUNCATE cannot be fenced: it shows no token', 'Use DELETE with a token, or let the owner take the '
    'fence off and put it on again in one transaction.', '{}', TG_RELID)
   WHERE current_setting('session_replication_role') <> 'replica';
  RETURN NULL;
END
$$;

-- A statement names the fence column with the value that is stored: of that a first trigger, BEFORE UPDATE OF it, leaves this note. (Anybody
-- may set it, and gains what such a statement has.)
CREATE OR REPLACE FUNCTION fence.note_named() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('fence_lite.named', TG_RELID || ' ' || pg_trigger_depth(), true);
  RETURN NEW;
END
$$;

-- The name of a row's lease, taken apart: columns, literal text, and braces that do not pair.
CREATE OR REPLACE FUNCTION fence.pieces(template text, OUT col text, OUT literal text, OUT is_odd boolean) RETURNS SETOF record
LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN m[1] ~ '^[{].+[}]$' THEN btrim(m[1], '{}') END,
      CASE WHEN m[1] IN ('{{', '}}') THEN left(m[1], 1) WHEN m[1] !~ '^[{}]' THEN m[1] END, m[1] IN ('{', '}')
   FROM regexp_matches(template, '([{][{]|[}][}]|[{][^{}]+[}]|[^{}]+|.)', 'g') AS m
$$;
CREATE OR REPLACE FUNCTION fence.columns_of(template text) RETURNS text[] LANGUAGE sql IMMUTABLE
  RETURN CASE WHEN template IS NOT NULL THEN ARRAY(SELECT p.col FROM fence.pieces(template) AS p WHERE p.col IS NOT NULL) END;

-- The text of a table's trigger function. Names and texts get into it by format() alone, which quotes them.
CREATE OR REPLACE FUNCTION fence.trigger_body(relation oid, col text, mode text, lease text, events text) RETURNS text
LANGUAGE sql STABLE AS $$
  SELECT format($body$-- %6$s
DECLARE stored bigint; shown bigint; old_lease text; lease text; judged bigint;
BEGIN
  BEGIN
    stored := OLD.%1$I; shown := NEW.%1$I; old_lease := %2$s; lease := %3$s;
  EXCEPTION WHEN undefined_column THEN
    PERFORM fence.refuse_columns(TG_RELID, %4$L);
  END;
  judged := fence.judge(TG_OP, TG_RELID, %5$s, stored, shown, old_lease, lease);
  IF judged < 0 THEN
    judged := fence.judge(TG_OP, TG_RELID, %5$s, stored, shown, old_lease, lease, coalesce(to_jsonb(OLD), to_jsonb(NEW)));
  END IF;
  IF TG_OP = 'DELETE' THEN
    RETURN OLD;
  ELSIF judged IS NOT NULL AND nullif(judged, 0) IS DISTINCT FROM shown THEN
    NEW.%1$I := nullif(judged, 0);
  END IF;
  RETURN NEW;
END $body$, col, coalesce(string_agg(format(p.form, 'OLD', p.piece), ' || ' ORDER BY p.n), 'NULL'),
      coalesce(string_agg(format(p.form, 'NEW', p.piece), ' || ' ORDER BY p.n), 'NULL'), col || fence.columns_of(lease),
      format('%L, %L, %L, %L, %L', col, mode, fence.columns_of(lease), (SELECT c.relkind = 'p' FROM pg_class c WHERE c.oid = relation),
        lease IS NULL OR events !~ 'insert'), jsonb_build_array(col, mode, lease, events))
   FROM (SELECT CASE WHEN p.col IS NULL THEN '%2$L' ELSE '%1$s.%2$I::text' END AS form, coalesce(p.col, p.literal) AS piece, p.n
       FROM fence.pieces(lease) WITH ORDINALITY AS p (col, literal, is_odd, n)) AS p
$$;
CREATE OR REPLACE FUNCTION fence.put_function(name text, body text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('CREATE OR REPLACE FUNCTION %1$s() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS %2$L; '
    'COMMENT ON FUNCTION %1$s() IS ''the fence of a table, written by fence_protect''; GRANT EXECUTE ON FUNCTION %1$s() TO PUBLIC', name, body);
END
$$;
-- Of what the same arguments make, the name is the same: so nobody can have another's function replaced.
CREATE OR REPLACE FUNCTION fence.write_trigger(relation oid, col text, mode text, lease text, events text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  body CONSTANT text := fence.trigger_body(relation, col, mode, lease, events);
  name CONSTANT text := format('fence.fenced_%s_%s', relation, left(encode(sha256(replace(body, E'\\', E'\\\\')::bytea), 'hex'), 32));
BEGIN
  PERFORM fence.refuse('42501', 'only the table''s owner may', 'Call fence_protect as a role that may become the owner.')
   WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = relation AND pg_has_role(session_user, c.relowner, 'MEMBER'));
  PERFORM fence.put_function(name, body);
  RETURN name;
END
$$;
-- Drops those that no trigger calls.
CREATE OR REPLACE FUNCTION fence.sweep() RETURNS void LANGUAGE plpgsql AS $$
DECLARE item record;
BEGIN
  FOR item IN SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'fence'::regnamespace AND p.proname ~ '^fenced_'
      AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgfoid = p.oid) LOOP
    EXECUTE format('DROP FUNCTION fence.%I()', item.proname);
  END LOOP;
END
$$;

-- The triggers of fences. A function's first line says what it is made of: fence column, mode, lease and events.
CREATE OR REPLACE FUNCTION fence.triggers(OUT relation regclass, OUT name name, OUT is_own boolean, OUT type integer, OUT enabled "char",
  OUT parent oid, OUT function text, OUT arguments text[]) RETURNS SETOF record LANGUAGE sql STABLE AS $$
  SELECT t.tgrelid, t.tgname, p.proname <> 'note_named', t.tgtype::integer, t.tgenabled, t.tgparentid, 'fence.' || p.proname,
      CASE WHEN p.proname ~ '^fenced_' THEN ARRAY(SELECT jsonb_array_elements_text(substring(p.prosrc, '^-- ([^\n]+)')::jsonb)) END
   FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid WHERE p.pronamespace = 'fence'::regnamespace
$$;
CREATE OR REPLACE FUNCTION fence.family(relation regclass) RETURNS SETOF regclass LANGUAGE sql STABLE AS $$
  WITH RECURSIVE f (oid) AS (SELECT relation::oid UNION SELECT i.inhrelid FROM f JOIN pg_inherits i ON i.inhparent = f.oid)
  SELECT f.oid::regclass FROM f
$$;
CREATE OR REPLACE FUNCTION fence.take_off(table_name regclass) RETURNS void LANGUAGE plpgsql AS $$
DECLARE item record;
BEGIN
  FOR item IN SELECT t.* FROM fence.triggers() AS t WHERE t.parent = 0 AND t.relation IN (SELECT fence.family(table_name)) LOOP
    EXECUTE format('DROP TRIGGER %I ON %s', item.name, item.relation);
  END LOOP;
  PERFORM fence.sweep();
END
$$;

CREATE OR REPLACE FUNCTION fence.refuse_table(relation regclass, code text, fault text, hint text, col text DEFAULT NULL) RETURNS void
LANGUAGE sql RETURN fence.refuse(code, format('cannot fence %s: %s', coalesce(relation::text, 'a table'), fault), hint,
  jsonb_build_object('column', col), relation, col);
CREATE OR REPLACE FUNCTION fence.check_table(relation regclass, is_new boolean) RETURNS void LANGUAGE sql AS $$
  SELECT fence.refuse_table(relation, r.fault[1], r.fault[2], r.fault[3])
   FROM (VALUES (1)) AS once LEFT JOIN pg_class c ON c.oid = relation CROSS JOIN LATERAL (SELECT CASE
    WHEN c.oid IS NULL THEN ARRAY[CASE WHEN relation IS NULL THEN '22004' ELSE '42P01' END, 'there is no such table', 'Name one that exists.']
    WHEN NOT pg_has_role(c.relowner, 'USAGE') THEN ARRAY['42501', 'only its owner may', format('Ask %I to do it.', pg_get_userbyid(c.relowner))]
    WHEN NOT is_new THEN NULL
    WHEN c.oid < 16384 OR c.relnamespace = 'fence'::regnamespace OR c.relkind NOT IN ('r', 'p')
      OR EXISTS (SELECT FROM fence.family(relation) AS p JOIN pg_class pc ON pc.oid = p WHERE pc.relkind = 'f' OR pc.relpersistence <> 'p')
    THEN ARRAY['42809', 'it is no logged table of this server', 'A crash empties an unlogged one, fences and all.']
    WHEN EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid)
    THEN ARRAY['42809', 'it is a partition or an inheritance child', 'Protect the table above it, which covers its partitions.'] END) AS r (fault)
   WHERE r.fault IS NOT NULL
$$;


-- The calls --------

DO $$ BEGIN PERFORM set_config('search_path', current_setting('fence_lite.home'), false); END $$;
CREATE OR REPLACE FUNCTION lease_acquire(name text, holder text DEFAULT NULL, ttl interval DEFAULT '30 s', wait interval DEFAULT '0',
  metadata jsonb DEFAULT NULL, shared boolean DEFAULT false, slots integer DEFAULT 1, reclaim boolean DEFAULT false,
  session boolean DEFAULT false) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  longest CONSTANT interval := coalesce(ttl, '30 s');
  limited CONSTANT text := current_setting('lock_timeout');
  began CONSTANT timestamptz := clock_timestamp();
  until timestamptz; token bigint;
BEGIN
  PERFORM fence.check('lease_acquire', name, 1, longest, wait, holder, metadata);
  IF reclaim AND holder IS NULL THEN
    PERFORM fence.bad('reclaim', 'reclaim needs a holder');
  ELSIF shared OR slots <> 1 OR session THEN
    PERFORM fence.left_out(CASE WHEN shared THEN 'shared' WHEN session THEN 'session' ELSE 'slots' END);
  END IF;
  token := fence.attempt(name, holder, longest, metadata, reclaim, false);
  IF token IS NOT NULL OR coalesce(wait, '0') = '0' THEN
    RETURN token;
  ELSIF fence.keeps_snapshot() THEN
    PERFORM fence.left_out('a wait at REPEATABLE READ, where the lease stays as the snapshot shows it,');
  END IF;

  -- One waiter at a time has the queue's lock, in the order in which they came, and that one alone looks.
  until := began + least(wait, nullif(limited, '0')::interval);
  BEGIN
    LOCK TABLE fence.turn IN ACCESS SHARE MODE;
    PERFORM set_config('lock_timeout', least(greatest(ceil(extract(epoch FROM until - clock_timestamp()) * 1000), 1), 2147483647)::integer::text,
      true), pg_advisory_xact_lock(fence.lock_key(name)), set_config('lock_timeout', limited, true);
    LOOP
      token := fence.attempt(name, holder, longest, metadata, reclaim, true);
      IF token IS NOT NULL THEN
        RETURN token;
      ELSIF clock_timestamp() >= until THEN
        RAISE lock_not_available;
      END IF;
      PERFORM pg_sleep(least(0.05, extract(epoch FROM until - clock_timestamp())));
    END LOOP;
  EXCEPTION WHEN lock_not_available THEN
    IF clock_timestamp() - began >= nullif(limited, '0')::interval THEN
      RAISE lock_not_available USING MESSAGE = 'canceling statement due to lock timeout';
    END IF;
  END;
  RETURN fence.attempt(name, holder, longest, metadata, reclaim, false);  -- a stranger may have had the queue's lock all the time
END
$$;

CREATE OR REPLACE FUNCTION lease_acquire_any(names text[], n integer DEFAULT 1, holder text DEFAULT NULL, ttl interval DEFAULT '30 s',
  metadata jsonb DEFAULT NULL, session boolean DEFAULT false, as_of pg_snapshot DEFAULT pg_current_snapshot())
RETURNS TABLE (name text, token bigint, place integer) LANGUAGE plpgsql ROWS 1 AS $$
#variable_conflict use_variable
DECLARE granted integer := 0;
BEGIN
  PERFORM fence.left_out('session') WHERE session;
  PERFORM fence.check('lease_acquire_any', u, 1, coalesce(ttl, '30 s'), NULL, holder, metadata)
    FROM (SELECT unnest(names) UNION ALL SELECT 'any') AS u (u);
  IF names IS NULL THEN
    PERFORM fence.bad('names', 'names must not be NULL', '22004');
  ELSIF cardinality(names) > 10000 OR n NOT BETWEEN 1 AND 1000 THEN
    PERFORM fence.bad('n', 'at most 10000 names may come at once, and n must be 1 to 1000');
  END IF;
  FOR name, place IN SELECT u.u, min(u.n) FROM unnest(names) WITH ORDINALITY AS u (u, n) GROUP BY 1 ORDER BY 2 LOOP
    token := fence.attempt(name, holder, coalesce(ttl, '30 s'), metadata, false, false, coalesce(as_of, pg_current_snapshot()));
    IF token IS NOT NULL THEN
      RETURN NEXT;
      granted := granted + 1;
      EXIT WHEN granted = coalesce(n, 1);
    END IF;
  END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION lease_renew(name text, token bigint, ttl interval DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN RETURN fence.change('lease_renew', name, token, ttl); END $$;
CREATE OR REPLACE FUNCTION lease_release(name text, token bigint) RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN RETURN fence.change('lease_release', name, token); END $$;
CREATE OR REPLACE FUNCTION lease_revoke(name text) RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN RETURN fence.change('lease_revoke', name, 1); END $$;

CREATE OR REPLACE FUNCTION lease_keep(names text[], tokens bigint[])
RETURNS TABLE (name text, token bigint, outcome text, renewed bigint, remaining interval, again_in interval, code text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  places bigint[];  -- of the pairs whose leases are locked
  kept text[]; above bigint; fresh bigint;
  time timestamptz := clock_timestamp();
BEGIN
  PERFORM fence.check('lease_keep', 'any');
  IF cardinality(names) <> cardinality(tokens) OR cardinality(names) > 10000 THEN
    PERFORM fence.bad('names', 'names and tokens must be as many, and at most 10000');
  ELSIF names IS NULL OR tokens IS NULL OR EXISTS (SELECT FROM unnest(names, tokens) AS p (name, token) WHERE p.name IS NULL OR p.token IS NULL) THEN
    PERFORM fence.bad('names', 'names and tokens must not be NULL', '22004');
  END IF;
  SELECT array_agg(x.n), array_agg(x.name), max(x.latest) INTO places, kept, above FROM (
    SELECT p.n, l.name, fence.latest(l) AS latest FROM unnest(names, tokens) WITH ORDINALITY AS p (name, token, n)
      JOIN fence.lease l ON l.name = p.name WHERE fence.has(l, p.token) AND fence.is_live(l) FOR NO KEY UPDATE OF l SKIP LOCKED) AS x;
  IF kept IS NOT NULL THEN
    time := clock_timestamp();
    fresh := fence.draw(above);
    PERFORM fence.renew(kept, fresh, time, NULL);
  END IF;
  RETURN QUERY
  SELECT p.name, p.token, o.outcome, CASE o.outcome WHEN 'kept' THEN fresh END, x.remaining,
      CASE o.outcome WHEN 'kept' THEN least(x.remaining / 3, '1 day') WHEN 'later' THEN greatest(x.remaining / 10, '10 ms') END,
      CASE o.outcome WHEN 'later' THEN '55P03' WHEN 'refused' THEN '22023' END
   FROM unnest(names, tokens) WITH ORDINALITY AS p (name, token, n)
   LEFT JOIN fence.lease l ON l.name = p.name LEFT JOIN unnest(places) AS m (n) ON m.n = p.n
   CROSS JOIN LATERAL (SELECT CASE WHEN octet_length(p.name) NOT BETWEEN 1 AND 512 OR p.token < 1 THEN 'refused'
      WHEN m.n IS NOT NULL AND fence.latest(l) = fresh THEN 'kept'
      WHEN m.n IS NULL AND fence.has(l, p.token) AND fence.is_live(l) THEN 'later' ELSE 'lost' END) AS o (outcome)
   CROSS JOIN LATERAL (SELECT CASE WHEN o.outcome IN ('kept', 'later') THEN greatest(l.expires_at - time, '0') END) AS x (remaining)
   ORDER BY p.n;
END
$$;

CREATE OR REPLACE FUNCTION lease_guard(name text, token bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE refused text[];
BEGIN
  PERFORM fence.check('lease_guard', name, token);
  refused := fence.relies(name, token, name);
  IF refused IS NOT NULL THEN
    PERFORM fence.refuse(refused[1], refused[2], refused[3], refused[4]::jsonb);
  END IF;
  PERFORM set_config('pg_fence.token', token::text, true);
  RETURN token;
END
$$;

CREATE OR REPLACE FUNCTION lease_check(name text, token bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.check('', name, token);
  IF fence.keeps_snapshot() THEN
    PERFORM fence.left_out('lease_check() at REPEATABLE READ, where the lease is not seen as it is now,');
  END IF;
  RETURN EXISTS (SELECT FROM fence.lease l WHERE l.name = lease_check.name AND fence.speaks(l, token) AND fence.latest(l) > fence.floor())
    AND (pg_is_in_recovery() OR fence.has_begun() OR NOT fence.is_copy());
END
$$;

CREATE OR REPLACE FUNCTION lease_info(name text, token bigint DEFAULT NULL) RETURNS SETOF fence.leases LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.check('', name, coalesce(token, 1));
  RETURN QUERY SELECT l.* FROM fence.leases l WHERE l.name = lease_info.name;
END
$$;

CREATE OR REPLACE FUNCTION lease_prune(older_than interval DEFAULT '1 day') RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE age CONSTANT interval := coalesce(older_than, '1 day'); pruned bigint;
BEGIN
  PERFORM fence.check('lease_prune', 'any');
  PERFORM fence.bad('older_than', 'older_than must not be negative') WHERE age < '0';
  WITH gone AS MATERIALIZED (SELECT l.name FROM fence.lease l
     WHERE age < '1900 years' AND coalesce(l.ended_at, l.expires_at) < clock_timestamp() - age FOR UPDATE SKIP LOCKED)
  DELETE FROM fence.lease l USING gone g WHERE l.name = g.name;
  GET DIAGNOSTICS pruned = ROW_COUNT;
  RETURN pruned;
END
$$;

CREATE OR REPLACE FUNCTION fence_new_epoch() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.check('fence_new_epoch', 'any'), fence.move_on(0, true);
  RETURN fence.floor();
END
$$;

CREATE OR REPLACE FUNCTION fence_status(OUT last_token bigint, OUT timeline integer, OUT system_identifier bigint, OUT jumps bigint,
  OUT in_recovery boolean, OUT library_version text, OUT sql_version text) LANGUAGE sql AS $$
  SELECT CASE WHEN NOT pg_is_in_recovery() THEN fence.last_token() END, i.timeline, i.system_identifier,
      greatest(coalesce(pg_sequence_last_value('fence.jump_count_seq'), 0) - 1, 0), pg_is_in_recovery(), 'none: pg_fence_lite', '0.2.0'
   FROM fence.identity(fence.floor()) AS i
$$;

CREATE OR REPLACE FUNCTION fence_grant(role regrole, level text DEFAULT 'worker', prefix text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.left_out('a level or prefix') WHERE prefix <> '' OR level <> 'worker';
  PERFORM fence.let(role, 'GRANT %s ON %s TO %s');
END
$$;

CREATE OR REPLACE FUNCTION fence_revoke(role regrole, prefix text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.left_out('a prefix') WHERE prefix <> '';
  PERFORM fence.let(role, 'REVOKE %s ON %s FROM %s');
END
$$;

CREATE OR REPLACE FUNCTION fenced() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM fence.left_out('fenced() in a trigger made by hand, where fence_protect would attach one,'); END $$;

CREATE OR REPLACE FUNCTION fence_protect(relation regclass, fence_column name DEFAULT 'fence', mode text DEFAULT NULL, lease text DEFAULT NULL,
  events text DEFAULT NULL, verify boolean DEFAULT false, always boolean DEFAULT false) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  col CONSTANT name := coalesce(fence_column, 'fence');
  had record;  -- the fence that the table has
  judged_as text; bound_to text; chosen text; on_events text[]; has_column boolean; fault text[]; function text; item record;
BEGIN
  PERFORM fence.left_out('verify') WHERE verify;
  PERFORM fence.check_table(relation, true);
  EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', relation);
  PERFORM fence.check_table(relation, true);  -- it may have changed meanwhile

  -- What the call leaves out stays as it was. To be bound, or no longer, brings other defaults: without a lease only strict is safe.
  SELECT max(t.arguments[2]) AS mode, max(t.arguments[3]) AS lease, max(t.arguments[4]) AS events INTO had
   FROM fence.triggers() AS t WHERE t.relation = fence_protect.relation;
  bound_to := nullif(coalesce(lease, had.lease), '');
  IF (bound_to IS NULL) <> (had.lease IS NULL) THEN
    had.mode := CASE had.mode WHEN 'managed' THEN had.mode END;
    had.events := NULL;
  END IF;
  judged_as := lower(coalesce(mode, had.mode, CASE WHEN bound_to IS NULL THEN 'strict' ELSE 'monotonic' END));
  chosen := lower(replace(coalesce(events, had.events), ' ', ''));
  on_events := string_to_array(coalesce(chosen, 'update,delete,truncate'
    || CASE WHEN bound_to IS NULL AND judged_as <> 'managed' THEN '' ELSE ',insert' END), ',');

  SELECT f.attnum IS NOT NULL, CASE
    WHEN col = '' OR judged_as NOT IN ('strict', 'monotonic', 'managed') OR NOT on_events <@ '{insert,update,delete,truncate}' OR on_events = '{}'
    THEN ARRAY['22023', 'a column, mode or event is not known', 'Modes: strict, monotonic, managed. Events: insert, update, delete, truncate.']
    WHEN lease = '' AND had.mode IS NULL
      OR (SELECT bool_or(p.is_odd) OR octet_length(string_agg(p.literal, '')) > 512 FROM fence.pieces(bound_to) AS p)
    THEN ARRAY['22023', format('"%s" is no name for a lease', lease), 'Write 1 to 512 bytes, {column} for its value, {{ and }} for braces.']
    WHEN f.attnum IS NULL AND had.mode IS NOT NULL
    THEN ARRAY['42703', format('its fence has no column "%s"', col), 'Pass the name of the one with the tokens as fence_column.', col]
    WHEN f.atttypid <> 'int8'::regtype OR f.atthasdef OR f.attidentity <> ''
    THEN ARRAY['42804', format('column "%s" is no bigint, or is generated or has a default', col), 'Mend that, or name another fence_column.', col]
    WHEN unfit IS NOT NULL THEN ARRAY['42703', format('the lease names {%s}, no column that is fit', unfit),
      'Fit are plain columns of type smallint, integer, bigint, text, varchar, uuid, boolean.', unfit] END
   INTO has_column, fault
   FROM (SELECT min(c) FROM unnest(fence.columns_of(bound_to)) AS c WHERE NOT EXISTS (
      SELECT FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = c AND a.attnum > 0 AND a.attname <> col AND a.attgenerated = ''
        AND a.atttypid = ANY ('{int2,int4,int8,text,varchar,uuid,bool}'::regtype[]))) AS u (unfit)
   LEFT JOIN pg_attribute f ON f.attrelid = relation AND f.attname = col;
  IF fault IS NOT NULL THEN
    PERFORM fence.refuse_table(relation, fault[1], fault[2], fault[3], fault[4]);
  ELSIF NOT has_column THEN
    EXECUTE format('ALTER TABLE %1$s ADD COLUMN %2$I bigint; COMMENT ON COLUMN %1$s.%2$I IS ''fencing token of the latest write (pg_fence)''',
      relation, col);
  END IF;

  PERFORM fence.take_off(relation);
  function := fence.write_trigger(relation, col, judged_as, bound_to, chosen);
  -- Postgres copies a row trigger to every partition, present and future, but no statement trigger.
  FOR item IN
    SELECT 'fence_named' AS name, format('UPDATE OF %I', col) AS event, relation AS rel,
        format('ROW WHEN (NEW.%1$I IS NOT DISTINCT FROM OLD.%1$I) EXECUTE FUNCTION fence.note_named', col) AS call
     WHERE on_events && '{update}' AND judged_as <> 'managed'
    UNION ALL
    SELECT 'fenced', string_agg(DISTINCT e, ' OR '), relation, 'ROW EXECUTE FUNCTION ' || function
     FROM unnest(on_events || CASE WHEN judged_as = 'managed' THEN '{insert}'::text[] END) AS e WHERE e <> 'truncate' HAVING count(*) > 0
    UNION ALL
    SELECT 'fenced_truncate', 'TRUNCATE', part, 'STATEMENT EXECUTE FUNCTION fence.refuse_truncate'
     FROM fence.family(relation) AS part WHERE on_events && '{truncate}'
  LOOP
    EXECUTE format('CREATE TRIGGER %I BEFORE %s ON %s FOR EACH %s()', item.name, item.event, item.rel, item.call);
    IF always THEN
      EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', item.rel, item.name);
    END IF;
  END LOOP;
  IF bound_to IS NULL THEN
    RAISE NOTICE '% is bound to no lease: the holder of any lease can write it', relation
      USING HINT = format('SELECT fence_protect(%L, lease => ''order:{id}''); binds its rows to such leases.', relation);
  END IF;
END
$$;

CREATE OR REPLACE FUNCTION fence_unprotect(relation regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.check_table(relation, false);
  PERFORM fence.refuse_table(t.relation, '42809', 'it is fenced as a partition', format('Take the fence off %s.', pg_partition_root(t.relation)))
    FROM fence.triggers() AS t WHERE t.relation = fence_unprotect.relation AND t.parent <> 0;
  IF EXISTS (SELECT FROM fence.triggers() AS t WHERE t.relation IN (SELECT fence.family(fence_unprotect.relation))) THEN
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', relation);
    PERFORM fence.take_off(relation);
  ELSE
    RAISE NOTICE '% is not fenced', relation;
  END IF;
END
$$;

-- The ways around a fence that are met most; the extension finds more.
CREATE OR REPLACE FUNCTION fence_audit(INOUT relation regclass DEFAULT NULL, OUT severity text, OUT finding text, OUT remedy text)
RETURNS SETOF record LANGUAGE sql AS $$
  SELECT fence.check_table(relation, false) WHERE relation IS NOT NULL;
  WITH home AS (SELECT format('SELECT %s.fence_protect(%%L%%s);', p.pronamespace::regnamespace) AS protect
               FROM pg_proc p JOIN fence.calls() AS c ON c.call = p.oid WHERE p.proname = 'fenced'),
  own AS (SELECT t.* FROM fence.triggers() AS t WHERE t.is_own),
  fence AS (SELECT DISTINCT ON (c.oid) c.oid::regclass AS root, o.arguments[1] AS col, o.arguments[2] AS mode, o.arguments[3] AS lease
       FROM pg_class c LEFT JOIN own o ON o.relation = c.oid
       WHERE (c.oid = $1 OR $1 IS NULL AND o.parent = 0) AND pg_has_role(c.relowner, 'USAGE') ORDER BY c.oid, o.arguments)
  SELECT DISTINCT c.oid::regclass, f.* FROM fence m CROSS JOIN fence.family(m.root) AS part JOIN pg_class c ON c.oid = part CROSS JOIN home h
   CROSS JOIN LATERAL (
    SELECT 'hole', 'no trigger of pg_fence fires on ' || string_agg(e.name, ', '), format(h.protect, m.root, '')
     FROM (VALUES ('insert', 4, 3), ('update', 16, 3), ('delete', 8, 3), ('truncate', 32, 2)) AS e (name, flag, bits)
     WHERE (e.name <> 'insert' OR m.lease IS NOT NULL OR m.mode = 'managed')
      AND NOT EXISTS (SELECT FROM own o WHERE o.relation = part AND o.type & 3 = e.bits AND o.type & e.flag <> 0 AND o.enabled IN ('O', 'A'))
     HAVING count(*) > 0
    UNION ALL
    SELECT 'hole', format('trigger %s runs after the fence and may change what it judged', to_json(t.tgname)),
        format('ALTER TRIGGER %I ON %s RENAME TO %I;', t.tgname, part, 'a_' || t.tgname)
     FROM pg_trigger t WHERE t.tgrelid = part AND NOT t.tgisinternal AND t.tgtype & 3 = 3 AND t.tgtype & 20 <> 0 AND t.tgenabled <> 'D'
      AND t.tgname > 'fenced'
    UNION ALL
    SELECT 'hole', format('%s has the privilege TRIGGER', g.name), format('REVOKE TRIGGER ON %s FROM %s;', part, g.name)
     FROM aclexplode(c.relacl) AS a CROSS JOIN fence.grantee(a.grantee) AS g (name)
     WHERE a.grantee <> c.relowner AND a.privilege_type = 'TRIGGER'
    UNION ALL
    SELECT 'notice', 'it is unlogged: a crash empties it, fences and all', format('ALTER TABLE %s SET LOGGED;', part)
     WHERE c.relpersistence = 'u'
    UNION ALL
    SELECT CASE m.mode WHEN 'monotonic' THEN 'hole' ELSE 'notice' END, 'it is bound to no lease: the holder of any lease can write it'
        || CASE m.mode WHEN 'monotonic' THEN ', and a client with a token that it has read' ELSE '' END,
        format(h.protect, m.root, ', lease => ''order:{id}''') WHERE part = m.root AND m.lease IS NULL AND m.mode <> ''
    UNION ALL
    SELECT 'notice', format(CASE WHEN a.attname IS NULL THEN 'column %s, which the trigger names, is not there: no write can land'
        ELSE 'column %s, which the lease names, may be NULL: nobody can write such a row' END, to_json(n)),
        CASE WHEN a.attname IS NOT NULL THEN format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL;', m.root, n) END
     FROM unnest(m.col || fence.columns_of(m.lease)) AS n LEFT JOIN pg_attribute a ON a.attrelid = part AND a.attname = n AND a.attnum > 0
     WHERE part = m.root AND (a.attname IS NULL OR NOT a.attnotnull AND n <> m.col)
  ) AS f (severity, finding, remedy) ORDER BY 1, 2, 3
$$;

-- Comments of the calls, by whose end they are known; and the calls that only the extension has.
DO $$
DECLARE item record;
BEGIN
  FOR item IN SELECT * FROM (VALUES ('lease_acquire_all', 'names text[], holder text DEFAULT NULL, ttl interval DEFAULT ''30 s'', '
      'metadata jsonb DEFAULT NULL, session boolean DEFAULT false'),
    ('lease_renew_all', 'names text[], token bigint, ttl interval DEFAULT NULL'), ('lease_release_all', 'names text[], token bigint'),
    ('lease_guard_all', 'names text[], token bigint'), ('lease_evict', 'name text, token bigint'), ('lease_adopt',
      'name text, token bigint, holder text DEFAULT NULL, wait interval DEFAULT ''0'', metadata jsonb DEFAULT NULL'),
    ('lease_forget', 'name text'), ('lease_forget_older', 'than interval'), ('fence_stats_reset', '')) AS v (name, arguments) LOOP
    EXECUTE pg_catalog.format('CREATE OR REPLACE FUNCTION %1$I(%2$s) RETURNS bigint LANGUAGE sql AS ''SELECT fence.left_out(''''%1$s()'''')''; '
      'COMMENT ON FUNCTION %1$I IS ''refused with 0A000: only the extension has it (pg_fence_lite)''', item.name, item.arguments);
  END LOOP;
  FOR item IN SELECT * FROM (VALUES
    ('lease_acquire', 'a fencing token, or NULL when the lease is taken and stayed so for wait'),
    ('lease_acquire_any', 'the first n of these leases that are free, a row each; as_of: leave it out'),
    ('lease_renew', 'a new token, and a deadline of now + ttl; NULL when the lease was lost: stop'),
    ('lease_release', 'ends the grant: a token for a last write in this transaction; NULL when it was lost'),
    ('lease_revoke', 'ends the grant, whoever has it; NULL when there was none'),
    ('lease_keep', 'the heartbeat of a process: renews what can be renewed, and says what became of each'),
    ('lease_guard', 'the token, or PF004; nobody else can be granted the lease until this transaction ends'),
    ('lease_check', 'does the token speak for the lease at this instant?'),
    ('lease_info', 'the row of fence.leases for one lease, as of this call'),
    ('lease_prune', 'deletes rows of grants that ended longer ago, and returns how many'),
    ('fence_new_epoch', 'makes the tokens jump: for copies of a database, before clients connect'),
    ('fence_status', 'the token sequence, the identity of the database, the versions'),
    ('fence_grant', 'lets a role use leases; such roles trust each other'),
    ('fence_revoke', 'takes back what fence_grant gave to a role'),
    ('fenced', 'refused with 0A000: let fence_protect attach the triggers'),
    ('fence_protect', 'fences a table, or again: what is left out stays as it was; lease => '''' unbinds it'),
    ('fence_unprotect', 'takes the fence off a table and its partitions; the column stays'),
    ('fence_audit', 'the ways around the fence of a table, or of all, each with its remedy')) AS v (name, says) LOOP
    EXECUTE pg_catalog.format('COMMENT ON FUNCTION %I IS %L', item.name, item.says || ' (pg_fence_lite)');
  END LOOP;
END
$$;
SET search_path = pg_catalog, pg_temp;


-- Who may do what, and taking it away --------

CREATE OR REPLACE FUNCTION fence.grantee(role oid) RETURNS text LANGUAGE sql STABLE
  RETURN CASE role WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(role)) END;

-- The calls, known by their comments, and what else fence_grant gives.
CREATE OR REPLACE FUNCTION fence.calls(OUT call regprocedure, OUT is_given boolean) RETURNS SETOF record LANGUAGE sql STABLE AS $$
  SELECT p.oid, p.proname NOT IN ('fenced', 'fence_protect', 'fence_unprotect', 'fence_audit', 'fence_grant', 'fence_revoke')
   FROM pg_proc p JOIN pg_namespace n ON n.nspname = 'fence' AND n.nspowner = p.proowner
   WHERE obj_description(p.oid, 'pg_proc') LIKE '%(pg_fence_lite)'
  UNION ALL
  SELECT 'fence.relies'::regproc, true
$$;

CREATE OR REPLACE FUNCTION fence.let(role regrole, doing text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.refuse('42704', 'there is no such role', 'Leases are not for PUBLIC.') WHERE NOT EXISTS (SELECT FROM pg_roles r WHERE r.oid = role);
  EXECUTE format(doing, 'SELECT', 'fence.leases', role);
  EXECUTE format(doing, 'EXECUTE', (SELECT 'FUNCTION ' || string_agg(c.call::text, ', ') FROM fence.calls() AS c WHERE c.is_given), role);
END
$$;

CREATE OR REPLACE FUNCTION fence.uninstall() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.refuse('2BP01', 'cannot uninstall pg_fence_lite: these tables are fenced: ' || string_agg(DISTINCT t.relation::text, ', '),
    'Call fence_unprotect for each of them first.') FROM fence.triggers() AS t WHERE t.parent = 0 HAVING count(*) > 0;
  EXECUTE (SELECT 'DROP FUNCTION ' || string_agg(c.call::text, ', ') FROM fence.calls() AS c WHERE c.call::text NOT LIKE 'fence.%');
  DROP SCHEMA fence CASCADE;
END
$$;
COMMENT ON FUNCTION fence.uninstall IS 'takes pg_fence_lite out of the database, leases and all; refuses while a table is fenced';

DO $close$
DECLARE
  -- These run with the owner's rights, as do the calls that are given.
  definers CONSTANT text[] := '{settle,sweep,write_trigger}';
  -- The owner's functions alone call these.
  closed CONSTANT text[] := '{attempt,change,check,check_snapshot,draw,identity,move_on,nobody_waits,put_function,renew}';
  calls CONSTANT text := (SELECT string_agg(c.call::text, ', ') FROM fence.calls() AS c);
  given CONSTANT oid[] := ARRAY(SELECT a.grantee FROM fence.calls() AS c JOIN pg_proc p ON p.oid = c.call CROSS JOIN aclexplode(p.proacl) AS a
    WHERE p.proname = 'lease_acquire' AND a.grantee NOT IN (0, p.proowner) AND current_setting('fence_lite.is_new') = 'false');
  item record;
BEGIN
  -- Default privileges may have let roles in, even to the state (Supabase has such). Whoever was not let in by fence_grant goes.
  FOR item IN SELECT DISTINCT fence.grantee(a.grantee) AS role
         FROM (SELECT n.nspowner, n.nspacl FROM pg_namespace n WHERE n.nspname = 'fence'
            UNION ALL SELECT p.proowner, coalesce(p.proacl, acldefault('f', p.proowner)) FROM pg_proc p JOIN fence.calls() AS c ON c.call = p.oid
            UNION ALL SELECT c.relowner, c.relacl FROM pg_class c WHERE c.relnamespace = 'fence'::regnamespace) AS o (owner, acl)
         CROSS JOIN aclexplode(o.acl) AS a WHERE a.grantee <> o.owner LOOP
    EXECUTE format('REVOKE ALL ON SCHEMA fence FROM %1$s; REVOKE ALL ON ALL TABLES IN SCHEMA fence FROM %1$s; REVOKE ALL ON ALL SEQUENCES '
      'IN SCHEMA fence FROM %1$s; REVOKE ALL ON ALL FUNCTIONS IN SCHEMA fence FROM %1$s; REVOKE ALL ON FUNCTION %2$s FROM %1$s', item.role, calls);
  END LOOP;
  GRANT USAGE ON SCHEMA fence TO PUBLIC;
  GRANT SELECT ON SEQUENCE fence.token_seq TO PUBLIC;
  FOR item IN SELECT p.oid::regprocedure AS call, CASE WHEN c.is_given OR p.proname = ANY (definers) THEN 'DEFINER' ELSE 'INVOKER' END AS rights,
            CASE WHEN p.prosqlbody IS NULL AND p.proname <> ALL (closed) THEN ' SET search_path = pg_catalog, pg_temp' END AS path,
            CASE WHEN c.is_given OR p.proname = ANY (closed || '{fence_grant,fence_revoke,uninstall}'::text[]) THEN 'REVOKE ALL ON FUNCTION %s FROM'
              ELSE 'GRANT EXECUTE ON FUNCTION %s TO' END AS access
         FROM pg_proc p LEFT JOIN fence.calls() AS c ON c.call = p.oid
         WHERE c.call IS NOT NULL OR p.pronamespace = 'fence'::regnamespace AND p.proname !~ '^fenced_' LOOP
    EXECUTE format('ALTER FUNCTION %s SECURITY %s%s; ' || item.access || ' PUBLIC', item.call, item.rights, item.path, item.call);
  END LOOP;
  PERFORM fence.let(g::regrole, 'GRANT %s ON %s TO %s') FROM unnest(given) AS g;

  -- Trigger functions are written anew; those of tables that are gone go.
  PERFORM fence.put_function(t.function, fence.trigger_body(t.relation, t.arguments[1], t.arguments[2], t.arguments[3], t.arguments[4]))
    FROM fence.triggers() AS t WHERE t.parent = 0 AND t.arguments IS NOT NULL;
  PERFORM fence.sweep(), fence.settle();
END
$close$;

RESET check_function_bodies;
DO $$ BEGIN PERFORM set_config('search_path', current_setting('fence_lite.path'), false); END $$;
