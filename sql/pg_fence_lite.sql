-- pg_fence_lite: leases, fencing tokens and fenced tables in SQL and PL/pgSQL, for servers where no library can be installed.
--
--   psql -1 -f pg_fence_lite.sql       as the owner of the database; again for a newer version
--   SELECT fence.uninstall();          takes all of it away
--
-- It needs PostgreSQL 15 or newer, and a role with CREATE on the database and on the first schema of its search_path, where the calls go.
-- Any migration tool can run it, in one transaction. docs/reference/lite.md says what is weaker than in the extension.
--
-- fence.lease has a row for each lease, and PostgreSQL's locks of that row, which only the owner of all this can take, do the rest:
--   guard            FOR KEY SHARE: nobody else is granted the lease until the transaction ends
--   renew, release   FOR NO KEY UPDATE: they wait for each other; neither for guards, nor guards for them
--   acquire          FOR UPDATE SKIP LOCKED: it waits for nobody, and what somebody else has locked is taken
-- A token that is none of the row's locks nothing. The row is read after it is locked, and the clock after that. At REPEATABLE READ
-- PostgreSQL refuses to lock FOR KEY SHARE what another transaction has locked FOR UPDATE and changed since the snapshot: so an acquire
-- does that, and updates the row in place. An advisory lock, which any role can take, only orders those who wait, and the first grants
-- of a new name. Nothing is remembered from one call to the next, and no setting is believed.

-- What others may have created must not get into these: so names are looked up in pg_catalog alone, until the calls are created. (A body
-- is not read before it runs.)
DO $$
BEGIN
  PERFORM pg_catalog.set_config('fence_lite.path', pg_catalog.current_setting('search_path'), false),
      pg_catalog.set_config('fence_lite.home', pg_catalog.quote_ident(pg_catalog.current_schema()::pg_catalog.text), false);
END
$$;
SET search_path = pg_catalog, pg_temp;
SET check_function_bodies = off;

DO $$
DECLARE
  own CONSTANT oid := to_regrole(quote_ident(current_user));
  home CONSTANT oid := to_regnamespace(nullif(current_setting('fence_lite.home'), ''));
  elsewhere text;
  others text;
  fault text[];
BEGIN
  SELECT min(p.pronamespace::regnamespace::text) FILTER (WHERE p.pronamespace <> home AND obj_description(p.oid, 'pg_proc') LIKE '%(pg_fence_lite)'),
      string_agg(p.oid::regprocedure::text, ', ') FILTER (WHERE p.pronamespace = home AND p.proowner <> own)
   INTO elsewhere, others FROM pg_proc p WHERE p.proname ~ '^(fenced$|fence_|lease_)';
  fault := CASE
    WHEN current_setting('server_version_num')::integer < 150000 THEN '{0A000,pg_fence_lite needs PostgreSQL 15 or newer}'::text[]
    WHEN EXISTS (SELECT FROM pg_extension e WHERE e.extname = 'pg_fence') THEN '{42710,the extension pg_fence is installed here already}'
    WHEN home IS NULL THEN '{3F000,search_path has no schema for the calls}'
    WHEN elsewhere IS NOT NULL THEN ARRAY['42723', format('the calls of pg_fence_lite are in schema %s: SET search_path to that', elsewhere)]
    WHEN others IS NOT NULL THEN ARRAY['42723', 'functions of somebody else look like calls: ' || others]  -- and would stay that role's
    WHEN EXISTS (SELECT FROM pg_namespace n WHERE n.nspname = 'fence' AND (n.nspowner <> own
         OR obj_description(n.oid, 'pg_namespace') LIKE 'pg_fence_lite%' IS NOT TRUE))
    THEN '{42P06,there is a schema fence that is not this role''s pg_fence_lite}' END;
  IF fault IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = fault[1], MESSAGE = fault[2], HINT = 'Nothing was changed.';
  END IF;
  -- Before the first installation nobody was let in by fence_grant.
  PERFORM set_config('fence_lite.is_new', (to_regnamespace('fence') IS NULL)::text, false);
  CREATE SCHEMA IF NOT EXISTS fence;
  COMMENT ON SCHEMA fence IS 'pg_fence_lite: state of leases and tokens; read fence.leases, write nothing here';
END
$$;


-- State, under the names of the extension, so that moving up keeps it --------

CREATE SEQUENCE IF NOT EXISTS fence.token_seq AS bigint CACHE 1 NO CYCLE;
CREATE SEQUENCE IF NOT EXISTS fence.database_identity_seq AS bigint;
CREATE SEQUENCE IF NOT EXISTS fence.jump_token_seq AS bigint;
CREATE SEQUENCE IF NOT EXISTS fence.jump_count_seq AS bigint;
CREATE UNLOGGED SEQUENCE IF NOT EXISTS fence.server_start_seq AS bigint;
COMMENT ON SEQUENCE fence.token_seq IS 'every fencing token; must stay logged, CACHE 1, NO CYCLE and ascending';
COMMENT ON SEQUENCE fence.server_start_seq IS 'mark of the latest start; must stay unlogged, so that any recovery empties it';

COMMENT ON SEQUENCE fence.database_identity_seq IS 'mark of the database: another one means that this is a copy';
COMMENT ON SEQUENCE fence.jump_token_seq IS 'a token up to it speaks once its holder has renewed';
COMMENT ON SEQUENCE fence.jump_count_seq IS 'how often the tokens jumped';
COMMENT ON SEQUENCE fence.server_start_seq IS 'mark of the latest start: any recovery empties it';

CREATE TABLE IF NOT EXISTS fence.lease (
  name text COLLATE "C" PRIMARY KEY,
  holder text,
  session_label text NOT NULL,
  role name NOT NULL,                             -- session_user; shown, and never asked
  first_token bigint NOT NULL,
  renewal_tokens bigint[] NOT NULL DEFAULT '{}',  -- of the latest 16 renewals
  closing_token bigint,                           -- NULL while the grant is current
  acquired_at timestamptz NOT NULL,
  renewed_at timestamptz NOT NULL,
  expires_at timestamptz NOT NULL,
  ended_at timestamptz,                           -- released or revoked
  ttl_us bigint NOT NULL,
  renewals bigint NOT NULL DEFAULT 0,
  metadata jsonb,
  granted_in xid8,                                -- transaction, which cannot rely on the grant at REPEATABLE READ
  closed_in xid8                                  -- transaction, until whose end the closing token speaks
) WITH (fillfactor = 50, vacuum_truncate = false, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE fence.lease IS 'the latest grant of each lease; read fence.leases, write nothing here';
CREATE TABLE IF NOT EXISTS fence.turn ();
COMMENT ON TABLE fence.turn IS 'empty: locked by who moves the tokens on; and by who waits, who so is told from a stranger';


-- Refusals --------
-- A function with RETURN keeps the operators that it was made with, and becomes a part of the expression that calls it. All others have
-- a search_path of their own, or are the owner's alone (see the end): else a session could compile them with types of its own making.

CREATE OR REPLACE FUNCTION fence.quoted(text) RETURNS text LANGUAGE sql IMMUTABLE
  RETURN '"' || replace(replace(replace($1, E'\n', E'\\n'), E'\r', E'\\r'), E'\t', E'\\t') || '"';

CREATE OR REPLACE FUNCTION fence.refuse(code text, message text, hint text, detail jsonb DEFAULT '{}', relation oid DEFAULT NULL,
  col text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  place record;
BEGIN
  SELECT n.nspname, c.relname INTO place FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
  IF FOUND THEN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint, SCHEMA = place.nspname, TABLE = place.relname, COLUMN = coalesce(col, ''),
      DETAIL = jsonb_strip_nulls(detail || jsonb_build_object('relation', format('%I.%I', place.nspname, place.relname)));
  END IF;
  RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint, DETAIL = jsonb_strip_nulls(detail);
END
$$;

CREATE OR REPLACE FUNCTION fence.left_out(what text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.refuse('0A000', what || ' is not in pg_fence_lite', 'The extension pg_fence has it: where its library is installed, '
    'pg_fence_lite--pg_fence.sql moves this database up, leases and fences included.');
END
$$;

CREATE OR REPLACE FUNCTION fence.bad(argument text, message text, hint text, code text DEFAULT '22023') RETURNS void LANGUAGE sql
  RETURN fence.refuse(code, message, hint, jsonb_build_object('argument', argument));

-- `writes` is the call, where it is one that writes.
CREATE OR REPLACE FUNCTION fence.check(writes text, name text, token bigint DEFAULT 1, ttl interval DEFAULT NULL,
  wait interval DEFAULT NULL, holder text DEFAULT NULL, metadata jsonb DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF name IS NULL OR token IS NULL THEN
    PERFORM fence.bad(CASE WHEN name IS NULL THEN 'name' ELSE 'token' END, 'neither name nor token may be NULL',
      'A NULL often means that lease_acquire, lease_renew or lease_release found the lease taken or lost: stop working.', '22004');
  ELSIF octet_length(name) NOT BETWEEN 1 AND 512 THEN
    PERFORM fence.bad('name', 'the name of a lease is 1 to 512 bytes long', 'Name what only one may do at a time, as ''order:7''.');
  ELSIF token < 1 THEN
    PERFORM fence.bad('token', 'a fencing token is at least 1', 'Pass what lease_acquire or lease_renew returned.');
  ELSIF ttl <= '0' OR ttl > '366 days' THEN
    PERFORM fence.bad('ttl', 'ttl must be positive and at most 366 days', 'Three to ten times the heartbeat is usual.');
  ELSIF wait < '0' OR wait >= '290000 years' THEN
    PERFORM fence.bad('wait', 'wait must be finite and not negative', 'Zero tries once; ''10 s'' waits in line.');
  ELSIF octet_length(holder) > 512 THEN
    PERFORM fence.bad('holder', 'a holder is at most 512 bytes long', 'Name the worker, as ''invoices@host7''.');
  ELSIF octet_length(metadata::text) > 65536 THEN
    PERFORM fence.bad('metadata', 'metadata is at most 64 kB', 'Keep the work''s data in a table of its own.');
  ELSIF writes <> '' AND current_setting('transaction_read_only') = 'on' THEN
    PERFORM fence.refuse('25006', format('cannot execute %s() %s', writes,
      CASE WHEN pg_is_in_recovery() THEN 'during recovery' ELSE 'in a read-only transaction' END), '');
  END IF;
END
$$;

CREATE OR REPLACE FUNCTION fence.keeps_snapshot() RETURNS boolean LANGUAGE sql STABLE
  RETURN current_setting('transaction_isolation') IN ('repeatable read', 'serializable');

-- A month counts as 30 days.
CREATE OR REPLACE FUNCTION fence.microseconds(span interval) RETURNS bigint LANGUAGE sql IMMUTABLE
  RETURN ((extract(epoch FROM span) - extract(year FROM span) * 453600) * 1000000)::bigint;


-- Tokens --------
-- 2^20 numbers are a second. A start of the server moves the sequence on by so many, or to the clock; and it is never a minute behind
-- the clock when a token is drawn. So whatever sets it back (a crash, a failover, a dump) is outrun, while the clock goes forward.

CREATE OR REPLACE FUNCTION fence.clock() RETURNS bigint LANGUAGE sql VOLATILE
  RETURN floor(extract(epoch FROM clock_timestamp() - '2026-01-01 00:00:00+00'::timestamptz) * 1048576)::bigint;
CREATE OR REPLACE FUNCTION fence.last_token() RETURNS bigint LANGUAGE sql VOLATILE
  RETURN coalesce(pg_sequence_last_value('fence.token_seq'), 0);
CREATE OR REPLACE FUNCTION fence.floor() RETURNS bigint LANGUAGE sql VOLATILE
  RETURN coalesce(pg_sequence_last_value('fence.jump_token_seq'), 0);

-- This start of the server. The path of the file names the database, and changes with each ALTER SEQUENCE.
CREATE OR REPLACE FUNCTION fence.start_mark(floor bigint) RETURNS bigint LANGUAGE sql VOLATILE
  RETURN 2 + (4611686018427387903 & hashtextextended(concat_ws(' ', pg_relation_filepath('fence.token_seq'::regclass), floor,
    extract(epoch FROM pg_postmaster_start_time())), 0));
CREATE OR REPLACE FUNCTION fence.has_begun() RETURNS boolean LANGUAGE sql VOLATILE
  RETURN coalesce(pg_sequence_last_value('fence.server_start_seq') = fence.start_mark(fence.floor()), false);

-- What tells this database from a copy of it. Where a platform does not let an ordinary role ask, 0 stands for it.
CREATE OR REPLACE FUNCTION fence.identity(floor bigint, OUT timeline integer, OUT system_identifier bigint, OUT mark bigint) LANGUAGE plpgsql STABLE AS $$
BEGIN
  BEGIN
    SELECT s.system_identifier, CASE WHEN pg_is_in_recovery() THEN (SELECT c.timeline_id FROM pg_control_checkpoint() AS c)
          ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer END
     INTO system_identifier, timeline FROM pg_control_system() AS s;
  EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    system_identifier := 0;
    timeline := 0;
  END;
  mark := greatest(1, 9223372036854775807 & hashtextextended(concat_ws(' ', timeline, system_identifier,
    (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()), 'fence.token_seq'::regclass::oid, floor), 0));
END
$$;
-- Then no earlier token speaks until its holder has renewed.
CREATE OR REPLACE FUNCTION fence.is_copy() RETURNS boolean LANGUAGE sql VOLATILE
  RETURN pg_sequence_last_value('fence.database_identity_seq') IS DISTINCT FROM (fence.identity(fence.floor())).mark;

-- What is set of a sequence stays set when a transaction is rolled back. So the lock is given back at once, by an error that is caught.
-- `why`: 'start' (which is 'jump' where a dump was loaded over this very life); 'back', where a draw was set back; or 'lag', where there is
-- more than a second to the clock, so that no racing draw is overtaken.
CREATE OR REPLACE FUNCTION fence.move_on(why text, above bigint DEFAULT 0) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  second CONSTANT bigint := 1048576;
  floor bigint;
  last bigint;
BEGIN
  LOCK TABLE fence.turn IN SHARE UPDATE EXCLUSIVE MODE;
  PERFORM fence.refuse('55000', 'fence.token_seq was altered, so its values are no fencing tokens',
      'Mend it, and commit that: ALTER SEQUENCE fence.token_seq INCREMENT 1 CACHE 1 NO CYCLE; ALTER SEQUENCE ... SET LOGGED.')
    FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid
   WHERE s.seqrelid = 'fence.token_seq'::regclass AND NOT (c.relpersistence = 'p' AND s.seqincrement > 0 AND s.seqcache = 1 AND NOT s.seqcycle);
  last := greatest(fence.last_token(), above);
  IF why = 'lag' THEN
    PERFORM setval('fence.token_seq', fence.clock()) WHERE last + second < fence.clock();
    RAISE SQLSTATE 'PF999';
  ELSIF why = 'start' AND fence.has_begun() THEN
    why := 'jump';
    PERFORM FROM fence.server_start_seq AS s WHERE s.log_cnt > 0;
    IF FOUND THEN
      RAISE SQLSTATE 'PF999';
    END IF;
  END IF;
  -- Two moves within a second would take the sequence ahead of the clock, and a copy made between them behind it.
  IF last + second - fence.clock() BETWEEN 1 AND 2 * second THEN
    PERFORM pg_sleep((last + second - fence.clock())::float8 / second + 0.000001);
  END IF;
  floor := fence.floor();
  last := setval('fence.token_seq', greatest(last + second, fence.clock()));
  IF why = 'jump' OR fence.is_copy() THEN
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

-- What setval has set has a log_cnt of 0 until the next nextval, which sets the mark last: so a dump that was loaded over it shows.
CREATE OR REPLACE FUNCTION fence.start() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM fence.server_start_seq AS s WHERE s.log_cnt > 0 AND fence.has_begun();
  IF NOT FOUND THEN
    PERFORM fence.move_on('start');
  END IF;
END
$$;

-- The last token drawn, since this start; for the trigger, which cannot move it itself.
CREATE OR REPLACE FUNCTION fence.settle() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.start();
  RETURN fence.last_token();
END
$$;

-- For who has locked the lease's row; `above` is the greatest that the lease has had.
CREATE OR REPLACE FUNCTION fence.draw(above bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  second CONSTANT bigint := 1048576;
  last bigint;
  drawn bigint;
  was_set boolean;  -- or it is the 33rd time
  has_begun boolean;
BEGIN
  FOR n IN 1..4 LOOP
    SELECT t.last_value, t.log_cnt = 0, s.log_cnt > 0 AND fence.has_begun() INTO last, was_set, has_begun
     FROM fence.token_seq AS t, fence.server_start_seq AS s;
    IF has_begun IS NOT TRUE THEN
      PERFORM fence.move_on('start');
      CONTINUE;
    ELSIF last < fence.clock() - (CASE WHEN was_set THEN 1 ELSE 60 END) * second THEN
      PERFORM fence.move_on('lag');
    END IF;
    drawn := nextval('fence.token_seq');
    IF drawn > last AND drawn > above THEN
      RETURN drawn;
    END IF;
    PERFORM fence.move_on('back', greatest(last, above));
  END LOOP;
  PERFORM fence.refuse('55000', 'the sequences of the schema fence do not keep what is set', 'Restore them, or install anew.');
END
$$;


-- Leases --------

CREATE OR REPLACE FUNCTION fence.latest(l fence.lease) RETURNS bigint LANGUAGE sql IMMUTABLE
  RETURN coalesce(l.renewal_tokens[cardinality(l.renewal_tokens)], l.first_token);
CREATE OR REPLACE FUNCTION fence.is_live(l fence.lease) RETURNS boolean LANGUAGE sql VOLATILE
  RETURN l.closing_token IS NULL AND l.expires_at > clock_timestamp();
CREATE OR REPLACE FUNCTION fence.has(l fence.lease, token bigint) RETURNS boolean LANGUAGE sql IMMUTABLE
  RETURN token = l.first_token OR token = ANY (l.renewal_tokens);
CREATE OR REPLACE FUNCTION fence.is_closed_here(l fence.lease) RETURNS boolean LANGUAGE sql VOLATILE
  RETURN coalesce(l.closed_in = pg_current_xact_id_if_assigned(), false);
-- But for a jump.
CREATE OR REPLACE FUNCTION fence.speaks(l fence.lease, token bigint) RETURNS boolean LANGUAGE sql VOLATILE
  RETURN fence.has(l, token) AND fence.is_live(l) OR token = l.closing_token AND fence.is_closed_here(l);

-- Has the grant ended, but after this snapshot? (A row that a restore has brought names transactions that this server has not had.)
CREATE OR REPLACE FUNCTION fence.ended_since(l fence.lease, as_of pg_snapshot) RETURNS boolean LANGUAGE sql VOLATILE
  RETURN as_of IS NOT NULL AND coalesce(CASE WHEN l.closing_token IS NULL THEN l.expires_at > greatest(now(), statement_timestamp())
    ELSE NOT pg_visible_in_snapshot(l.closed_in, as_of) AND pg_visible_in_snapshot(l.closed_in, pg_current_snapshot()) END, false);

-- The key of those who wait for a lease: of a hash that cannot be run backwards, so that nobody finds a name with the key of another's.
CREATE OR REPLACE FUNCTION fence.lock_key(lease text) RETURNS bigint LANGUAGE sql STABLE
  RETURN ('x' || left(encode(sha256(replace('pg_fence_lite ' || lease, E'\\', E'\\\\')::bytea), 'hex'), 16))::bit(64)::bigint;

-- Who waits, and who grants a new name, has the key and a lock of fence.turn, which no stranger can have.
CREATE OR REPLACE FUNCTION fence.nobody_waits(lease text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  key CONSTANT bigint := fence.lock_key(lease);
BEGIN
  IF pg_try_advisory_lock_shared(key) THEN
    RETURN pg_advisory_unlock_shared(key);  -- given back at once; nothing can come between the two
  END IF;
  RETURN NOT EXISTS (
    SELECT FROM pg_locks q JOIN pg_locks t ON t.virtualtransaction = q.virtualtransaction
     WHERE q.locktype = 'advisory' AND q.objsubid = 1 AND (q.classid::bigint << 32) | q.objid::bigint = key AND q.granted
      AND t.relation = 'fence.turn'::regclass AND t.mode = 'AccessShareLock');
END
$$;

-- 40001 where the row of a lease is another by now than the snapshot shows: to lock what has changed since is refused, and so is to
-- insert what a newer row has. What is locked and inserted goes with the block.
CREATE OR REPLACE FUNCTION fence.check_snapshot(lease text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM fence.lease l WHERE l.name = lease FOR SHARE SKIP LOCKED;
  IF NOT FOUND AND NOT EXISTS (SELECT FROM fence.lease l WHERE l.name = lease) AND pg_try_advisory_xact_lock(fence.lock_key(lease)) THEN
    INSERT INTO fence.lease (name, session_label, role, first_token, acquired_at, renewed_at, expires_at, ttl_us)
    VALUES (lease, '', '', 0, now(), now(), now(), 0) ON CONFLICT DO NOTHING;
  END IF;
  RAISE SQLSTATE 'PF999';
EXCEPTION WHEN SQLSTATE 'PF999' THEN
  NULL;
END
$$;

-- One try: the token, or NULL. `is_head` is for the head of the queue. What has ended, but after `as_of`, counts as taken.
CREATE OR REPLACE FUNCTION fence.attempt(lease text, by text, ttl interval, data jsonb, reclaim boolean, is_head boolean,
  as_of pg_snapshot DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  us CONSTANT bigint := fence.microseconds(ttl);
  old fence.lease;
  is_mine boolean;  -- to be reclaimed
  token bigint;
  time timestamptz;
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
      INSERT INTO fence.lease (name, session_label, role, first_token, acquired_at, renewed_at, expires_at, ttl_us)
      VALUES (lease, '', '', 0, now(), now(), now(), 0) ON CONFLICT DO NOTHING;
    END IF;
    SELECT l.* INTO old FROM fence.lease l WHERE l.name = lease FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR fence.is_live(old) AND NOT coalesce(reclaim AND old.holder = by, false) OR fence.ended_since(old, as_of) THEN
      RAISE SQLSTATE 'PF999';
    END IF;
    token := fence.draw(greatest(fence.latest(old), old.closing_token));
    time := clock_timestamp();
    UPDATE fence.lease l
      SET holder = by, role = session_user, first_token = token, renewal_tokens = '{}', closing_token = NULL,
        session_label = coalesce(nullif(current_setting('application_name'), ''), 'session') || '[' || pg_backend_pid() || ']',
        acquired_at = time, renewed_at = time, expires_at = time + us * interval '1 us', ended_at = NULL, ttl_us = us, renewals = 0,
        metadata = data, granted_in = pg_current_xact_id(), closed_in = NULL
     WHERE l.name = lease;
  EXCEPTION WHEN SQLSTATE 'PF999' THEN
    RETURN NULL;
  END;
  IF fence.keeps_snapshot() THEN
    RAISE WARNING USING ERRCODE = '01000', DETAIL = jsonb_build_object('lease', lease),
      MESSAGE = 'this transaction''s reads may be older than its grant of lease ' || fence.quoted(lease),
      HINT = 'At REPEATABLE READ and above it can neither guard this grant nor write what is bound to the lease: commit first.';
  END IF;
  RETURN token;
END
$$;

-- 57014 or 55P03 where the caller's own time is up. (Who catches 55P03 has lost a statement_timeout that was due with it.)
CREATE OR REPLACE FUNCTION fence.check_timeouts(began timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF clock_timestamp() - statement_timestamp() >= nullif(current_setting('statement_timeout'), '0')::interval THEN
    RAISE query_canceled USING MESSAGE = 'canceling statement due to statement timeout';
  ELSIF clock_timestamp() - began >= nullif(current_setting('lock_timeout'), '0')::interval THEN
    RAISE lock_not_available USING MESSAGE = 'canceling statement due to lock timeout';
  END IF;
END
$$;

-- Of leases whose rows are locked.
CREATE OR REPLACE FUNCTION fence.renew(names text[], fresh bigint, moment timestamptz, us bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE fence.lease l
    SET renewal_tokens = l.renewal_tokens[greatest(cardinality(l.renewal_tokens) - 14, 1):] || fresh, renewals = l.renewals + 1,
      renewed_at = moment, ttl_us = coalesce(us, l.ttl_us), expires_at = moment + coalesce(us, l.ttl_us) * interval '1 us'
   WHERE l.name = ANY (names);
END
$$;

-- Renews or ends the grant that the token is of; NULL where there is none. lease_revoke means any.
CREATE OR REPLACE FUNCTION fence.change(call text, lease text, token bigint, ttl interval DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  held fence.lease;
  time timestamptz;
  fresh bigint;
BEGIN
  PERFORM fence.check(call, lease, token, ttl);
  -- It waits for an open transaction that has changed the lease.
  SELECT l.* INTO held FROM fence.lease l WHERE l.name = lease AND (call = 'lease_revoke' OR fence.speaks(l, token)
    OR call = 'lease_release' AND fence.has(l, token) AND fence.is_closed_here(l)) FOR NO KEY UPDATE;
  time := clock_timestamp();
  IF held.closing_token IS NOT NULL OR held.expires_at <= time OR held.name IS NULL THEN
    RETURN CASE WHEN call = 'lease_release' THEN held.closing_token END;
  END IF;
  fresh := fence.draw(fence.latest(held));
  IF call = 'lease_renew' THEN
    PERFORM fence.renew(ARRAY[lease], fresh, time, fence.microseconds(ttl));
  ELSE
    UPDATE fence.lease l SET closing_token = fresh, ended_at = time, closed_in = pg_current_xact_id() WHERE l.name = lease;
  END IF;
  RETURN fresh;
END
$$;

-- 0: until this transaction ends nobody else is granted the lease, for which the token speaks. Else -6, PF004; -7, PF004 until it is
-- renewed; -8, 55000. It takes the lock that keeps others from being granted the lease, and only then looks.
CREATE OR REPLACE FUNCTION fence.relies(lease text, token bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
  held fence.lease;
BEGIN
  IF NOT fence.has_begun() THEN
    PERFORM fence.move_on('start');
  END IF;
  PERFORM FROM fence.lease l WHERE l.name = lease AND fence.speaks(l, token) FOR KEY SHARE;
  IF fence.keeps_snapshot() THEN
    PERFORM fence.check_snapshot(lease);
  ELSIF NOT FOUND THEN
    RETURN -6;
  END IF;
  SELECT l.* INTO held FROM fence.lease l WHERE l.name = lease AND fence.speaks(l, token);
  RETURN CASE WHEN held.name IS NULL THEN -6 WHEN fence.latest(held) <= fence.floor() THEN -7
        WHEN held.granted_in = pg_current_xact_id_if_assigned() AND fence.keeps_snapshot() THEN -8 ELSE 0 END;
END
$$;

-- What an error tells of the latest grant, to those who may use leases.
CREATE OR REPLACE FUNCTION fence.told(lease text) RETURNS jsonb LANGUAGE sql AS $$
  SELECT jsonb_build_object('holder', coalesce(l.holder, l.session_label),
        'expires_at', to_char(l.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')) FROM fence.lease l WHERE l.name = lease
$$;

-- Refuses a guard or a write by what fence.relies says; `lease` is NULL where its name may not be shown.
CREATE OR REPLACE FUNCTION fence.refuse_reliance(verdict bigint, lease text, token bigint, detail jsonb DEFAULT '{}', relation oid DEFAULT NULL,
  col text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  named CONSTANT text := coalesce('lease ' || fence.quoted(lease), 'the row''s lease');
BEGIN
  detail := detail || jsonb_build_object('lease', lease);
  IF verdict = -8 THEN
    PERFORM fence.refuse('55000', 'this transaction''s snapshot is older than its grant of ' || named,
      'Acquire in a transaction of its own and commit it, then begin this one.', detail, relation, col);
  END IF;
  PERFORM fence.refuse('PF004', format('fencing token%s does not speak for %s', ' ' || token, named), CASE verdict
      WHEN -7 THEN 'The database has failed over, or been restored or copied, since the grant was last renewed: call lease_renew with this '
        'token, and go on with the one it returns. NULL means: stop.'
      ELSE 'The lease has expired, been released, revoked or taken over, or was never granted with it: stop.' END,
    detail || coalesce(fence.told(lease), '{}')
        || jsonb_build_object('presented', token, 'renew_first', CASE verdict WHEN -7 THEN true END), relation, col);
END
$$;

-- The sessions whose open transactions keep a lease from being granted; 0 for a prepared one. xmax is who locked the row last, or a
-- multixact of several; a number that is neither any longer finds nobody.
CREATE OR REPLACE FUNCTION fence.blocking_pids(locker xid) RETURNS integer[] LANGUAGE plpgsql STABLE AS $$
DECLARE
  lockers xid[] := ARRAY[locker];
BEGIN
  IF locker = '0' THEN
    RETURN '{}';
  END IF;
  BEGIN
    lockers := lockers || ARRAY(SELECT m.xid FROM pg_get_multixact_members(locker) AS m);
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
    coalesce(l.holder, l.session_label) AS holder, l.role, coalesce(l.closing_token, fence.latest(l)) AS token,
    l.first_token, l.acquired_at, l.renewed_at, l.expires_at,
    CASE WHEN l.closing_token IS NULL THEN greatest(l.expires_at - clock_timestamp(), '0') ELSE '0' END AS remaining,
    l.renewals, l.metadata, fence.blocking_pids(l.xmax) AS blocking_pids, false AS adopted
 FROM fence.lease l;
COMMENT ON VIEW fence.leases IS 'one row per lease: who holds what until when, and who holds up a take-over';


-- The fence --------
-- fence_protect writes a trigger function for the table (fence.trigger_body), which hands its columns to fence.judge. All runs with the
-- rights of the writer, but for fence.relies, which only those may call that may use leases.

-- Returns the fence that the row is to have, 0 for NULL, NULL to leave it as it is; or what refuses it: -1 to -3 for PF001 to PF003, -4
-- and -5 for a row that names no lease, and less for what fence.relies says. In a bound or partitioned table pg_fence.token becomes the
-- token of the write, as in lease_guard: a row that moves to another partition is deleted there and inserted here.
CREATE OR REPLACE FUNCTION fence.judge(op text, relation oid, mode text, is_bound boolean, is_partitioned boolean, is_free boolean,
  stored bigint, shown bigint, old_lease text, lease text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  presents CONSTANT boolean := mode <> 'managed' AND op <> 'DELETE' AND shown IS DISTINCT FROM stored;
  ambient CONSTANT text := coalesce(current_setting('pg_fence.token', true), '');
  named boolean := false;  -- with the value that is stored
  token bigint;
  is_stale boolean;
  verdict integer;
BEGIN
  IF op = 'UPDATE' AND current_setting('fence_lite.named', true) = relation || ' ' || pg_trigger_depth() THEN
    named := mode <> 'managed' AND NOT presents;  -- anybody may set it, and gains what a statement has that names the column
    PERFORM set_config('fence_lite.named', '', true);
  END IF;
  IF current_setting('session_replication_role') = 'replica' THEN
    RETURN CASE WHEN op <> 'UPDATE' OR stored IS NULL OR shown > stored OR shown = stored AND mode <> 'strict' THEN NULL
          WHEN shown IS NULL THEN -2 ELSE -1 END;  -- the publisher has judged the rest
  END IF;
  token := CASE WHEN presents THEN shown WHEN ambient <> '' THEN ambient::bigint WHEN named AND mode = 'monotonic' THEN stored END;
  IF mode = 'managed' AND op = 'INSERT' AND is_free AND (token IS NULL OR is_bound AND NOT (is_partitioned AND shown IS NOT DISTINCT FROM token)) THEN
    RETURN CASE WHEN shown > 0 THEN -2 ELSE 0 END;  -- such a row is created without a token, but no fence is blanked in silence
  ELSIF token IS NULL THEN
    RETURN CASE WHEN mode = 'strict' AND named AND stored IS NOT NULL THEN -1 ELSE -2 END;
  ELSIF is_bound AND (op <> 'DELETE' AND lease IS NULL OR op <> 'INSERT' AND old_lease IS NULL) THEN
    RETURN -5;
  ELSIF is_bound AND (octet_length(lease) NOT BETWEEN 1 AND 512 OR octet_length(old_lease) NOT BETWEEN 1 AND 512) THEN
    RETURN -4;
  ELSIF NOT token BETWEEN 1 AND pg_sequence_last_value('fence.token_seq') AND NOT token BETWEEN 1 AND fence.settle() THEN
    RETURN -3;
  END IF;
  is_stale := op <> 'INSERT' AND coalesce(token < stored OR token = stored AND mode = 'strict', false);
  IF is_stale AND (mode = 'strict' OR NOT is_bound) THEN
    RETURN -1;
  ELSIF is_bound THEN
    IF NOT has_function_privilege('fence.relies(text, bigint)'::regprocedure, 'EXECUTE') THEN
      PERFORM fence.refuse('42501', format('role "%s" may not use leases, nor write what is bound to one', current_user),
        'The owner of pg_fence_lite lets it by fence_grant.', jsonb_build_object('role', current_user), relation);
    END IF;
    verdict := fence.relies(coalesce(lease, old_lease), token);
    IF verdict = 0 AND old_lease <> lease THEN
      verdict := fence.relies(old_lease, token);
    END IF;
    IF verdict < 0 THEN
      RETURN CASE WHEN is_stale AND verdict = -6 THEN -1 ELSE verdict END;
    END IF;
  END IF;
  IF (is_bound OR is_partitioned) AND token::text <> ambient THEN
    PERFORM set_config('pg_fence.token', token::text, true);
  END IF;
  -- Nobody who excludes a token that speaks was granted the lease since the row was written: it keeps the greater one.
  RETURN greatest(token, CASE WHEN is_bound THEN stored END);
END
$$;

-- May the writer read these columns in every row? The current user and the session's both must.
CREATE OR REPLACE FUNCTION fence.may_read(relation oid, columns text[]) RETURNS boolean LANGUAGE sql STABLE
  RETURN NOT row_security_active(relation) AND NOT EXISTS (
    SELECT FROM unnest(columns) AS c (name), (VALUES (current_user), (session_user)) AS u (role)
     WHERE NOT has_column_privilege(u.role, relation, c.name, 'SELECT'));

-- Refuses a row by what fence.judge says.
CREATE OR REPLACE FUNCTION fence.refuse_write(verdict bigint, relation oid, col text, mode text, lease_columns text[], stored bigint,
  shown bigint, old_lease text, lease text, data jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  own CONSTANT bigint := nullif(current_setting('pg_fence.token', true), '')::bigint;
  seen CONSTANT bigint := CASE WHEN fence.may_read(relation, ARRAY[col]) THEN stored END;
  token CONSTANT bigint := coalesce(CASE WHEN mode <> 'managed' AND shown IS DISTINCT FROM stored THEN shown END, own, seen);
  detail jsonb := (SELECT jsonb_build_object('key', jsonb_object_agg(a.attname, CASE jsonb_typeof(data -> a.attname)
        WHEN 'string' THEN to_jsonb(left(data ->> a.attname, 100)) ELSE data -> a.attname END))
     FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::smallint[])[:i.indnkeyatts - 1])
     WHERE i.indrelid = relation AND i.indisprimary HAVING fence.may_read(relation, array_agg(a.attname)));
  e text[];
BEGIN
  e := CASE verdict
    WHEN -1 THEN ARRAY['PF001', 'stale fencing token' || CASE
        WHEN token = seen THEN format(': the row has already been written with token %s', seen)
        WHEN token <> seen THEN format(' %s: the row has already seen %s', token, seen)
        ELSE format('%s: the row has seen the same or a greater one', ' ' || token) END,
      CASE WHEN token = seen THEN 'Nobody newer is at work; but in strict mode use lease_renew''s token, or monotonic mode.'
         WHEN own >= seen THEN 'The statement wrote an older value, which counts before the transaction''s own token.'
         ELSE 'A newer holder may have taken the lease over: stop, and do not retry with this token.' END]
    WHEN -2 THEN ARRAY['PF002', 'no fencing token presented', CASE
      WHEN mode = 'managed' AND stored IS NULL AND shown > 0 THEN 'A managed fence is never blanked: load data (pg_restore) before fence_protect, '
        'or under session_replication_role = replica.'
      ELSE 'In this transaction, SET LOCAL pg_fence.token to the token of your lease, or call lease_guard. A NULL often means that '
         'lease_renew or lease_release found the lease lost: stop.' END]
    WHEN -3 THEN ARRAY['PF003', format('fencing token %s was never issued by this database', token),
      'Tokens come from lease_acquire or lease_renew. After a restore, fence_new_epoch() makes the sequence outrun others.']
    WHEN -4 THEN ARRAY['22023', 'the row''s columns make no lease name of 1 to 512 bytes', 'Bind the table by other columns.']
    WHEN -5 THEN ARRAY['22004', format('column %s is NULL, so the row names no lease', (SELECT string_agg(fence.quoted(c), ' or ')
      FROM unnest(lease_columns) AS c)), 'Give it a value. The owner can mend it in one '
      'transaction: fence_unprotect, UPDATE, ALTER COLUMN ... SET NOT NULL, fence_protect.'] END;
  detail := coalesce(detail, '{}') || jsonb_build_object('presented', CASE WHEN verdict IN (-1, -3) THEN token END, 'stored',
    CASE WHEN verdict >= -2 THEN seen END, 'column', CASE verdict WHEN -5 THEN lease_columns[1] END);
  PERFORM fence.refuse(e[1], e[2], e[3], detail, relation, col) WHERE e IS NOT NULL;
  lease := CASE WHEN old_lease <> lease AND fence.relies(lease, token) = 0 THEN old_lease ELSE coalesce(lease, old_lease) END;
  PERFORM fence.refuse_reliance(verdict, CASE WHEN fence.may_read(relation, lease_columns) THEN lease END, token, detail, relation, col);
END
$$;

-- Refuses a write where a column is not there that the trigger names, or a TRUNCATE.
CREATE OR REPLACE FUNCTION fence.refuse_statement(relation oid, columns text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.refuse('42703', 'the trigger fenced finds no column ' || fence.quoted(c), 'Was it renamed or dropped? Call fence_protect '
    'again with the present name; until then no write can land.', jsonb_build_object('column', c), relation, c)
    FROM unnest(columns) AS c WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = c AND a.attnum > 0);
  PERFORM fence.refuse('PF005', 'TRUNCATE cannot be fenced: it shows no token', 'Use DELETE with a token, or let the owner call '
    'fence_unprotect, truncate and fence_protect in one transaction.', '{}', relation)
   WHERE current_setting('session_replication_role') <> 'replica';
END
$$;

-- PL/pgSQL does not see which columns a statement names. This trigger, BEFORE UPDATE OF the fence column and by its name the first of
-- all, notes that it names it with the value that is stored.
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
  RETURN ARRAY(SELECT p.col FROM fence.pieces(template) AS p WHERE p.col IS NOT NULL);

-- The text of a table's trigger function. Names and texts get into it by format() alone, which quotes them for PL/pgSQL as for SQL.
CREATE OR REPLACE FUNCTION fence.trigger_body(relation oid, col text, mode text, lease text, events text) RETURNS text
LANGUAGE sql STABLE AS $$
  SELECT format($body$
DECLARE
  stored bigint; shown bigint; old_lease text; lease text; judged bigint;
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    PERFORM fence.refuse_statement(TG_RELID, '{}');
    RETURN NULL;
  END IF;
  BEGIN
    stored := OLD.%1$I; shown := NEW.%1$I; old_lease := %2$s; lease := %3$s;
  EXCEPTION WHEN undefined_column THEN
    PERFORM fence.refuse_statement(TG_RELID, %4$L);
  END;
  judged := fence.judge(TG_OP, TG_RELID, %5$L, %6$L, %7$L, %8$L, stored, shown, old_lease, lease);
  IF judged < 0 THEN
    PERFORM fence.refuse_write(judged, TG_RELID, %1$L, %5$L, %9$L, stored, shown, old_lease, lease, coalesce(to_jsonb(OLD), to_jsonb(NEW)));
  ELSIF TG_OP = 'DELETE' THEN
    RETURN OLD;
  ELSIF judged IS NOT NULL AND nullif(judged, 0) IS DISTINCT FROM shown THEN
    NEW.%1$I := nullif(judged, 0);
  END IF;
  RETURN NEW;
END $body$, col, coalesce(string_agg(format(p.form, 'OLD', p.piece), ' || ' ORDER BY p.n), 'NULL'),
      coalesce(string_agg(format(p.form, 'NEW', p.piece), ' || ' ORDER BY p.n), 'NULL'), col || fence.columns_of(lease), mode,
      lease IS NOT NULL, (SELECT c.relkind = 'p' FROM pg_class c WHERE c.oid = relation),
      lease IS NULL OR events <> '' AND events !~ 'insert', fence.columns_of(lease))
   FROM (SELECT CASE WHEN p.col IS NULL THEN '%2$L' ELSE '%1$s.%2$I::text' END AS form, coalesce(p.col, p.literal) AS piece, p.n
       FROM fence.pieces(lease) WITH ORDINALITY AS p (col, literal, is_odd, n)) AS p
$$;
CREATE OR REPLACE FUNCTION fence.put_function(name text, body text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('CREATE OR REPLACE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS %L', name, body);
  EXECUTE format('COMMENT ON FUNCTION %s() IS %L', name, 'the fence of a table, written by fence_protect');
END
$$;
-- Of what the same arguments make, the name is the same: so nobody can have another's function replaced.
CREATE OR REPLACE FUNCTION fence.write_trigger(relation oid, col text, mode text, lease text, events text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  body CONSTANT text := fence.trigger_body(relation, col, mode, lease, events);
  name CONSTANT text := format('fence.fenced_%s_%s', relation, left(encode(sha256(replace(body, E'\\', E'\\\\')::bytea), 'hex'), 32));
BEGIN
  PERFORM fence.put_function(name, body);
  RETURN name;
END
$$;
-- Once no trigger calls it any longer.
CREATE OR REPLACE FUNCTION fence.drop_function(function regproc) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF function::text ~ '^fence[.]fenced_[0-9]+_' AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgfoid = function) THEN
    EXECUTE format('DROP FUNCTION %s()', function);
  END IF;
END
$$;

-- The triggers of fences. Their arguments are fence column, mode, lease and events: all that their function is made of.
CREATE OR REPLACE FUNCTION fence.triggers(OUT relation regclass, OUT name name, OUT is_own boolean, OUT type integer, OUT enabled "char",
  OUT parent oid, OUT function regproc, OUT arguments text[]) RETURNS SETOF record LANGUAGE sql STABLE AS $$
  SELECT t.tgrelid, t.tgname, p.proname <> 'note_named', t.tgtype::integer, t.tgenabled, t.tgparentid, t.tgfoid, ARRAY(
      SELECT convert_from(decode(replace(x.part, ' ', ''), 'hex'), getdatabaseencoding())
       FROM unnest(string_to_array(regexp_replace(encode(t.tgargs, 'hex'), '(..)', E'\\1 ', 'g'), '00 ')) WITH ORDINALITY AS x (part, n)
      WHERE x.n <= t.tgnargs ORDER BY x.n)
   FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid WHERE p.pronamespace = 'fence'::regnamespace
$$;
CREATE OR REPLACE FUNCTION fence.family(relation regclass) RETURNS SETOF regclass LANGUAGE sql STABLE AS $$
  SELECT relation UNION SELECT p.relid FROM pg_partition_tree(relation) AS p
$$;
CREATE OR REPLACE FUNCTION fence.take_off(table_name regclass) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
  item record;
  dropped integer := 0;
BEGIN
  FOR item IN SELECT t.* FROM fence.triggers() AS t WHERE t.parent = 0 AND t.relation IN (SELECT fence.family(table_name)) LOOP
    EXECUTE format('DROP TRIGGER %I ON %s', item.name, item.relation);
    PERFORM fence.drop_function(item.function);
    dropped := dropped + 1;
  END LOOP;
  RETURN dropped;
END
$$;

CREATE OR REPLACE FUNCTION fence.refuse_table(relation regclass, code text, fault text, hint text, col text DEFAULT NULL) RETURNS void
LANGUAGE sql RETURN fence.refuse(code, format('cannot fence %s: %s', coalesce(relation::text, 'a table'), fault), hint,
  jsonb_build_object('column', col), relation, col);
CREATE OR REPLACE FUNCTION fence.check_table(relation regclass, is_new boolean) RETURNS void LANGUAGE sql AS $$
  SELECT fence.refuse_table(relation, r.code, r.fault, r.hint)
   FROM (VALUES (1)) AS once LEFT JOIN pg_class c ON c.oid = relation
   CROSS JOIN LATERAL (VALUES
    (c.oid IS NULL, CASE WHEN relation IS NULL THEN '22004' ELSE '42P01' END, 'there is no such table', 'Name a table that exists.'),
    (NOT pg_has_role(c.relowner, 'USAGE'), '42501', 'only its owner may', format('Ask %I to do it.', pg_get_userbyid(c.relowner))),
    (is_new AND (c.oid < 16384 OR c.relnamespace = 'fence'::regnamespace OR c.relkind NOT IN ('r', 'p')
      OR EXISTS (SELECT FROM fence.family(relation) AS p JOIN pg_class pc ON pc.oid = p WHERE pc.relkind = 'f' OR pc.relpersistence <> 'p')),
     '42809', 'it is no logged table of this server', 'Fence the table that stores the rows; a crash empties an unlogged one, fences and all.'),
    (is_new AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid), '42809', 'it is a partition or an inheritance child',
     'Protect the table above it, which covers its partitions.')
   ) AS r (applies, code, fault, hint) WHERE r.applies LIMIT 1
$$;


-- The calls --------

DO $$ BEGIN PERFORM set_config('search_path', current_setting('fence_lite.home'), false); END $$;
CREATE OR REPLACE FUNCTION lease_acquire(name text, holder text DEFAULT NULL, ttl interval DEFAULT '30 s', wait interval DEFAULT '0',
  metadata jsonb DEFAULT NULL, shared boolean DEFAULT false, slots integer DEFAULT 1, reclaim boolean DEFAULT false,
  session boolean DEFAULT false) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  longest CONSTANT interval := coalesce(ttl, '30 s');
  patience CONSTANT text := current_setting('lock_timeout');
  left_us numeric;
  token bigint;
  began timestamptz;
  pause float8 := 0.005;
  is_head boolean := false;
BEGIN
  PERFORM fence.check('lease_acquire', name, 1, longest, wait, holder, metadata);
  IF slots < 1 OR shared AND slots > 1 THEN
    PERFORM fence.bad('slots', 'slots must be at least 1, and shared excludes more', 'Neither is in pg_fence_lite.');
  ELSIF reclaim AND holder IS NULL THEN
    PERFORM fence.bad('reclaim', 'reclaim needs a holder', 'Only a holder that names itself can be known again.');
  ELSIF shared OR slots > 1 OR session THEN
    PERFORM fence.left_out(CASE WHEN shared THEN 'shared' WHEN session THEN 'session' ELSE 'slots' END);
  END IF;
  token := fence.attempt(name, holder, longest, metadata, reclaim, false);
  IF token IS NOT NULL OR coalesce(wait, '0') = '0' THEN
    RETURN token;
  ELSIF fence.keeps_snapshot() THEN
    PERFORM fence.check_snapshot(name), fence.left_out('a wait at REPEATABLE READ, where the lease stays as the snapshot shows it,');
  END IF;

  -- In the queue: its lock is had by one waiter at a time, in the order in which they came, and that one alone looks.
  began := clock_timestamp();
  BEGIN
    LOCK TABLE fence.turn IN ACCESS SHARE MODE;
    LOOP
      left_us := fence.microseconds(wait) - extract(epoch FROM clock_timestamp() - began) * 1000000;
      PERFORM fence.check_timeouts(began);
      IF NOT is_head THEN
        PERFORM set_config('lock_timeout', least(nullif(extract(epoch FROM patience::interval) * 1000, 0),
          greatest(ceil(left_us / 1000), 1), 2147483647)::integer::text, true);
        PERFORM pg_advisory_xact_lock(fence.lock_key(name)), set_config('lock_timeout', patience, true);
        is_head := true;
      ELSIF left_us <= 0 THEN
        RAISE SQLSTATE 'PF999';
      ELSE
        PERFORM pg_sleep(least(pause, left_us::float8 * 0.000001));
        pause := least(pause * 1.5, 0.05);
      END IF;
      token := fence.attempt(name, holder, longest, metadata, reclaim, true);
      EXIT WHEN token IS NOT NULL;
    END LOOP;
  EXCEPTION
    WHEN SQLSTATE 'PF999' THEN
      RETURN NULL;
    WHEN lock_not_available THEN
      PERFORM fence.check_timeouts(began);
      -- Where a stranger has the queue's lock, its time is all that this costs.
      RETURN fence.attempt(name, holder, longest, metadata, reclaim, false);
  END;
  RETURN token;
END
$$;
COMMENT ON FUNCTION lease_acquire IS 'a fencing token when the lease is granted, NULL when it is taken, and stayed so for wait (pg_fence_lite)';

CREATE OR REPLACE FUNCTION lease_acquire_any(names text[], n integer DEFAULT 1, holder text DEFAULT NULL, ttl interval DEFAULT '30 s',
  metadata jsonb DEFAULT NULL, session boolean DEFAULT false, as_of pg_snapshot DEFAULT pg_current_snapshot())
RETURNS TABLE (name text, token bigint, place integer) LANGUAGE plpgsql ROWS 1 AS $$
#variable_conflict use_variable
DECLARE
  granted integer := 0;
BEGIN
  PERFORM fence.left_out('session') WHERE session;
  PERFORM fence.check('lease_acquire_any', u, 1, coalesce(ttl, '30 s'), NULL, holder, metadata)
    FROM (SELECT unnest(names) UNION ALL SELECT 'any') AS u (u);
  IF names IS NULL THEN
    PERFORM fence.bad('names', 'names must not be NULL', 'Pass the names of leases.', '22004');
  ELSIF cardinality(names) > 10000 THEN
    PERFORM fence.bad('names', 'at most 10000 names may come at once', 'Pass those that come first.');
  ELSIF n NOT BETWEEN 1 AND 1000 THEN
    PERFORM fence.bad('n', 'n must be 1 to 1000', 'Take what one worker can do within the ttl.');
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
COMMENT ON FUNCTION lease_acquire_any IS
  'the first n of these leases that are free, a row each; as_of is the snapshot of the calling statement: leave it out (pg_fence_lite)';

CREATE OR REPLACE FUNCTION lease_renew(name text, token bigint, ttl interval DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  RETURN fence.change('lease_renew', name, token, ttl);
END
$$;
COMMENT ON FUNCTION lease_renew IS 'a new, greater token, and a deadline of now + ttl; NULL when the lease was lost: stop (pg_fence_lite)';

CREATE OR REPLACE FUNCTION lease_release(name text, token bigint) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  RETURN fence.change('lease_release', name, token);
END
$$;
COMMENT ON FUNCTION lease_release IS
  'ends the grant: a closing token, good for a last write in this transaction; NULL when it was lost (pg_fence_lite)';

CREATE OR REPLACE FUNCTION lease_revoke(name text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  closing bigint;
BEGIN
  closing := fence.change('lease_revoke', name, 1);
  IF closing IS NULL THEN
    RAISE SQLSTATE 'PF999';
  END IF;
  RETURN closing;
EXCEPTION WHEN SQLSTATE 'PF999' THEN
  RETURN NULL;  -- what was locked in vain is given back
END
$$;
COMMENT ON FUNCTION lease_revoke IS 'ends the grant, whoever has it, and returns the closing token; NULL when there was none (pg_fence_lite)';

CREATE OR REPLACE FUNCTION lease_keep(names text[], tokens bigint[])
RETURNS TABLE (name text, token bigint, outcome text, renewed bigint, remaining interval, again_in interval, code text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  us CONSTANT interval := '1 us';
  locked bigint[];  -- the places of the pairs whose leases are
  kept text[];
  above bigint;
  time timestamptz;
  fresh bigint;
BEGIN
  PERFORM fence.check('lease_keep', 'any');
  IF names IS NULL OR tokens IS NULL OR EXISTS (SELECT FROM unnest(names, tokens) AS p (name, token)
      WHERE (p.name IS NULL OR p.token IS NULL) AND cardinality(names) = cardinality(tokens)) THEN
    PERFORM fence.bad('names', 'names and tokens must not be NULL', 'NULL often means that a lease was never granted.', '22004');
  ELSIF cardinality(names) <> cardinality(tokens) OR cardinality(names) > 10000 THEN
    PERFORM fence.bad('names', 'names and tokens must be as many, and at most 10000', 'Pass a token for each name.');
  END IF;
  SELECT array_agg(x.n) INTO locked FROM (
    SELECT p.n FROM unnest(names, tokens) WITH ORDINALITY AS p (name, token, n) JOIN fence.lease l ON l.name = p.name
     WHERE fence.has(l, p.token) AND fence.is_live(l) FOR NO KEY UPDATE OF l SKIP LOCKED) AS x;
  time := clock_timestamp();
  SELECT array_agg(l.name), max(fence.latest(l)) INTO kept, above FROM fence.lease l
   WHERE l.expires_at > time AND l.name IN (
    SELECT p.name FROM unnest(names) WITH ORDINALITY AS p (name, n) JOIN unnest(locked) AS m (n) USING (n));
  IF kept IS NOT NULL THEN
    fresh := fence.draw(above);
    PERFORM fence.renew(kept, fresh, time, NULL);
  END IF;
  RETURN QUERY
  SELECT p.name, p.token, o.outcome, CASE o.outcome WHEN 'kept' THEN fresh END,
      CASE o.outcome WHEN 'kept' THEN l.ttl_us * us WHEN 'later' THEN greatest(l.expires_at - time, '0') END,
      CASE o.outcome WHEN 'kept' THEN least(l.ttl_us / 3, 86400000000) * us WHEN 'later' THEN greatest((l.expires_at - time) / 10, '10 ms') END,
      CASE o.outcome WHEN 'later' THEN '55P03' WHEN 'refused' THEN '22023' END
   FROM unnest(names, tokens) WITH ORDINALITY AS p (name, token, n)
   LEFT JOIN fence.lease l ON l.name = p.name
   LEFT JOIN unnest(locked) AS m (n) ON m.n = p.n
   CROSS JOIN LATERAL (SELECT CASE
      WHEN octet_length(p.name) NOT BETWEEN 1 AND 512 OR p.token < 1 THEN 'refused'
      WHEN m.n IS NOT NULL AND fence.latest(l) = fresh THEN 'kept'
      WHEN m.n IS NULL AND fence.has(l, p.token) AND fence.is_live(l) THEN 'later' ELSE 'lost' END) AS o (outcome)
   ORDER BY p.n;
END
$$;
COMMENT ON FUNCTION lease_keep IS
  'the heartbeat of a process: renews what can be renewed at once, and says of each pair what became of it (pg_fence_lite)';

CREATE OR REPLACE FUNCTION lease_guard(name text, token bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  verdict integer;
BEGIN
  PERFORM fence.check('lease_guard', name, token);
  verdict := fence.relies(name, token);
  PERFORM fence.refuse_reliance(verdict, name, token) WHERE verdict < 0;
  PERFORM set_config('pg_fence.token', token::text, true);
  RETURN token;
END
$$;
COMMENT ON FUNCTION lease_guard IS 'the token, or PF004; nobody else can be granted the lease until this transaction ends (pg_fence_lite)';

CREATE OR REPLACE FUNCTION lease_check(name text, token bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  held fence.lease;
BEGIN
  PERFORM fence.check('', name, token);
  PERFORM fence.left_out('lease_check() at REPEATABLE READ, where the lease is not seen as it is now,') WHERE fence.keeps_snapshot();
  SELECT l.* INTO held FROM fence.lease l WHERE l.name = lease_check.name AND fence.speaks(l, token);
  IF held.name IS NULL OR fence.latest(held) <= fence.floor() OR pg_is_in_recovery() THEN
    RETURN held.name IS NOT NULL AND fence.latest(held) > fence.floor();
  ELSIF fence.has_begun() THEN
    PERFORM FROM fence.server_start_seq AS s WHERE s.log_cnt > 0;
    RETURN FOUND;
  END IF;
  RETURN NOT fence.is_copy();
END
$$;
COMMENT ON FUNCTION lease_check IS 'does the token speak for the lease at this instant? Takes no lock, promises nothing beyond it (pg_fence_lite)';

CREATE OR REPLACE FUNCTION lease_info(name text, token bigint DEFAULT NULL) RETURNS SETOF fence.leases LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.check('', name, coalesce(token, 1));
  RETURN QUERY SELECT l.* FROM fence.leases l WHERE l.name = lease_info.name;
END
$$;
COMMENT ON FUNCTION lease_info IS
  'the rows of fence.leases for one lease, as of this call; with a token from the same statement, also what that has granted (pg_fence_lite)';

CREATE OR REPLACE FUNCTION lease_prune(older_than interval DEFAULT '1 day') RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  age CONSTANT interval := coalesce(older_than, '1 day');
  pruned bigint;
BEGIN
  PERFORM fence.check('lease_prune', 'any');
  PERFORM fence.bad('older_than', 'older_than must not be negative', '''1 day'' keeps what ended within the last day.') WHERE age < '0';
  WITH gone AS MATERIALIZED (SELECT l.name FROM fence.lease l
     WHERE age < '1900 years' AND coalesce(l.ended_at, l.expires_at) < clock_timestamp() - age FOR UPDATE SKIP LOCKED)
  DELETE FROM fence.lease l USING gone g WHERE l.name = g.name;
  GET DIAGNOSTICS pruned = ROW_COUNT;
  RETURN pruned;
END
$$;
COMMENT ON FUNCTION lease_prune IS 'deletes rows of grants that ended more than older_than ago, and returns how many (pg_fence_lite)';

CREATE OR REPLACE FUNCTION fence_new_epoch() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.check('fence_new_epoch', 'any'), fence.move_on('jump');
  RETURN fence.floor();
END
$$;
COMMENT ON FUNCTION fence_new_epoch IS 'makes the tokens jump, for copies of a database that nothing can see from inside (pg_fence_lite)';

CREATE OR REPLACE FUNCTION fence_status(OUT last_token bigint, OUT timeline integer, OUT system_identifier bigint, OUT jumps bigint,
  OUT in_recovery boolean, OUT library_version text, OUT sql_version text) LANGUAGE sql VOLATILE AS $$
  SELECT CASE WHEN NOT pg_is_in_recovery() THEN fence.last_token() END, i.timeline, i.system_identifier,
      coalesce(pg_sequence_last_value('fence.jump_count_seq'), 0), pg_is_in_recovery(), 'none: pg_fence_lite', '0.2.0'
   FROM fence.identity(fence.floor()) AS i
$$;
COMMENT ON FUNCTION fence_status IS 'the token sequence, the identity of the database, the versions; last_token is NULL on a standby (pg_fence_lite)';

CREATE OR REPLACE FUNCTION fence_grant(role regrole, level text DEFAULT 'worker', prefix text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.left_out('a prefix') WHERE prefix <> '';
  PERFORM fence.left_out(format('the level "%s"', level)) WHERE level <> 'worker';
  PERFORM fence.let(role, 'GRANT %s ON %s TO %s');
END
$$;
COMMENT ON FUNCTION fence_grant IS 'lets a role use leases, all of them; such roles trust each other (pg_fence_lite)';

CREATE OR REPLACE FUNCTION fence_revoke(role regrole, prefix text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.left_out('a prefix') WHERE prefix <> '';
  PERFORM fence.let(role, 'REVOKE %s ON %s FROM %s');
END
$$;
COMMENT ON FUNCTION fence_revoke IS 'takes back what fence_grant gave to a role (pg_fence_lite)';

CREATE OR REPLACE FUNCTION fenced() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.left_out('fenced() in a trigger made by hand, where fence_protect would attach one,');
END
$$;
COMMENT ON FUNCTION fenced IS 'refused with 0A000: let fence_protect attach the triggers (pg_fence_lite)';

CREATE OR REPLACE FUNCTION fence_unprotect(relation regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.check_table(relation, 'take the fence off');
  IF EXISTS (SELECT FROM fence.triggers() AS t WHERE t.relation IN (SELECT fence.family(fence_unprotect.relation))) THEN
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', relation);
  END IF;
  IF fence.take_off(relation) = 0 THEN
    RAISE NOTICE '% is not fenced', relation;
  END IF;
END
$$;
COMMENT ON FUNCTION fence_unprotect IS 'takes the triggers of pg_fence off a table and its partitions; the fence column stays (pg_fence_lite)';

CREATE OR REPLACE FUNCTION fence_protect(relation regclass, fence_column name DEFAULT 'fence', mode text DEFAULT NULL, lease text DEFAULT NULL,
  events text DEFAULT NULL, verify boolean DEFAULT false, always boolean DEFAULT false) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  mark CONSTANT text := 'fencing token of the latest write (pg_fence)';
  table_name CONSTANT text := relation::text;
  had record;  -- the fence that the table has
  amiss record;
  col name;
  judged_as text;
  bound_to text;
  chosen text;  -- events
  on_events text[];
  function text;
  item record;
BEGIN
  PERFORM fence.left_out('verify') WHERE verify;
  PERFORM fence.check_table(relation, true);
  EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', relation);
  PERFORM fence.check_table(relation, true);  -- it may have changed meanwhile
  PERFORM fence.refuse_table(relation, '40001', 'it was renamed meanwhile', 'Call fence_protect again.') WHERE relation::text <> table_name;

  -- What the table has stays, where the call does not say otherwise. A call that binds it, or unbinds it, takes the other default: a
  -- leased row may be written often under one token; without a lease only strict is safe.
  SELECT max(t.arguments[1]) AS col, max(t.arguments[2]) AS mode, max(nullif(t.arguments[3], '')) AS lease,
      max(nullif(t.arguments[4], '')) AS events, coalesce(bool_or(t.enabled = 'A'), false) AS always
   INTO had FROM fence.triggers() AS t WHERE t.relation = fence_protect.relation AND t.is_own;
  col := coalesce(fence_column, had.col, 'fence');
  bound_to := nullif(coalesce(lease, had.lease), '');
  judged_as := lower(coalesce(mode, CASE WHEN had.mode = 'managed' OR (bound_to IS NULL) = (had.lease IS NULL) THEN had.mode END,
                CASE WHEN bound_to IS NULL THEN 'strict' ELSE 'monotonic' END));
  chosen := lower(replace(coalesce(events, CASE WHEN (bound_to IS NULL) = (had.lease IS NULL) THEN had.events END), ' ', ''));
  on_events := string_to_array(coalesce(chosen, 'update,delete,truncate'
    || CASE WHEN bound_to IS NULL AND judged_as <> 'managed' THEN '' ELSE ',insert' END), ',');

  SELECT r.*, f.attnum IS NOT NULL AS has_column INTO amiss
   FROM pg_class c LEFT JOIN pg_attribute f ON f.attrelid = c.oid AND f.attname = col
   LEFT JOIN pg_attribute marked ON marked.attrelid = c.oid AND f.attnum IS NULL AND col_description(c.oid, marked.attnum) = mark
   LEFT JOIN LATERAL (
      SELECT p.name, CASE WHEN a.attnum IS NULL THEN '42703' WHEN a.attgenerated <> '' THEN '42611' ELSE '42804' END AS code
       FROM unnest(fence.columns_of(bound_to)) AS p (name)
       LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = p.name AND a.attnum > 0
      WHERE a.attnum IS NULL OR a.attgenerated <> '' OR a.attname = col
        OR a.atttypid <> ALL ('{int2,int4,int8,text,varchar,uuid,bool}'::regtype[]) LIMIT 1) AS unfit ON true
   LEFT JOIN LATERAL (VALUES
    (col = '' OR judged_as NOT IN ('strict', 'monotonic', 'managed') OR NOT on_events <@ '{insert,update,delete,truncate}' OR on_events = '{}',
     '22023',
     'a column, mode or event is not known', 'The modes are strict, monotonic and managed, the events insert, update, delete, truncate.', NULL),
    (lease = '' AND had.mode IS NULL OR (SELECT bool_or(p.is_odd) OR octet_length(string_agg(p.literal, '')) > 512 FROM fence.pieces(bound_to) AS p), '22023',
     format('"%s" is no name for a lease', lease), 'Write 1 to 512 bytes, {column} for a column''s value, {{ and }} for braces.', NULL),
    (marked.attname IS NOT NULL, '42703', format('it has no column "%s": the tokens seen so far are in "%s"', col, marked.attname),
     format('Call fence_protect with fence_column => %L.', marked.attname), col),
    (f.atttypid <> 'int8'::regtype, CASE WHEN f.attnum < 0 THEN '42701' ELSE '42804' END, format('column "%s" is of type %s, not bigint', col, format_type(f.atttypid, f.atttypmod)),
     'Make it bigint, or name another fence_column.', col),
    (f.attgenerated <> '' OR f.atthasdef OR f.attidentity <> '', '42611', format('column "%s" is generated, or has a default', col),
     'That would pass for a token: drop the default, or name another fence_column.', col),
    (unfit.name IS NOT NULL, unfit.code, format('the lease names {%s}, no column that is fit', unfit.name),
     'Fit are plain columns of type smallint, integer, bigint, text, varchar, uuid, boolean, written as they are stored.', unfit.name)
    ) AS r (applies, code, fault, hint, about) ON r.applies
   WHERE c.oid = relation LIMIT 1;
  IF amiss.applies THEN
    PERFORM fence.refuse_table(relation, amiss.code, amiss.fault, amiss.hint, amiss.about);
  ELSIF NOT amiss.has_column THEN
    EXECUTE format('ALTER TABLE %s ADD COLUMN %I bigint', relation, col);
  END IF;
  EXECUTE (SELECT format('COMMENT ON COLUMN %s.%I IS %L', relation, col, coalesce(col_description(relation, a.attnum), mark))
        FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = col);

  PERFORM fence.take_off(relation);
  function := fence.write_trigger(relation, col, judged_as, bound_to, chosen);
  -- Postgres copies a row trigger to every partition, present and future, but no statement trigger.
  FOR item IN
    SELECT 'fence_named' AS name, format('BEFORE UPDATE OF %I', col) AS at, relation AS rel,
        format('ROW WHEN (NEW.%1$I IS NOT DISTINCT FROM OLD.%1$I) EXECUTE FUNCTION fence.note_named()', col) AS call
     WHERE on_events && '{update}' AND judged_as <> 'managed'
    UNION ALL
    SELECT t.name, t.at, t.rel, format('%s EXECUTE FUNCTION %s(%L, %L, %L, %L)', t.level, function, col, judged_as,
        coalesce(bound_to, ''), coalesce(chosen, ''))
     FROM (SELECT 'fenced', 'BEFORE ' || string_agg(DISTINCT e, ' OR '), relation, 'ROW' FROM unnest(on_events
            || CASE WHEN judged_as = 'managed' THEN '{insert}'::text[] END) AS e WHERE e <> 'truncate' HAVING count(*) > 0
        UNION ALL
        SELECT 'fenced_truncate', 'BEFORE TRUNCATE', part, 'STATEMENT' FROM fence.family(relation) AS part
         WHERE on_events && '{truncate}') AS t (name, at, rel, level)
  LOOP
    EXECUTE format('CREATE TRIGGER %I %s ON %s FOR EACH %s', item.name, item.at, item.rel, item.call);
    IF coalesce(always, had.always) THEN
      EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', item.rel, item.name);
    END IF;
  END LOOP;
  IF bound_to IS NULL THEN
    RAISE NOTICE USING MESSAGE = format('%s is bound to no lease: the holder of any lease can write it', relation),
      HINT = format('SELECT fence_protect(%L, lease => ''order:{id}''); binds its rows to leases of such names.', relation);
  END IF;
END
$$;
COMMENT ON FUNCTION fence_protect IS 'fences a table, or again; what is left out or NULL stays as it was; lease => '''' unbinds it (pg_fence_lite)';

CREATE OR REPLACE FUNCTION fence_unprotect(relation regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM fence.check_table(relation, false);
  PERFORM fence.refuse_table(t.relation, '42809', 'it is fenced as a partition',
    format('Take the fence off %s.', pg_partition_root(t.relation)))
    FROM fence.triggers() AS t WHERE t.relation = fence_unprotect.relation AND t.parent <> 0;
  IF EXISTS (SELECT FROM fence.triggers() AS t WHERE t.relation IN (SELECT fence.family(fence_unprotect.relation))) THEN
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', relation);
  END IF;
  IF fence.take_off(relation) = 0 THEN
    RAISE NOTICE '% is not fenced', relation;
  END IF;
END
$$;
COMMENT ON FUNCTION fence_unprotect IS 'takes the triggers of pg_fence off a table and its partitions; the fence column stays (pg_fence_lite)';


-- The ways around a fence that are met most; the extension finds more.
CREATE OR REPLACE FUNCTION fence_audit(INOUT relation regclass DEFAULT NULL, OUT severity text, OUT finding text, OUT remedy text)
RETURNS SETOF record LANGUAGE sql AS $$
  SELECT fence.check_table(relation, false) WHERE relation IS NOT NULL;
  WITH RECURSIVE home AS (SELECT format('SELECT %s.fence_protect(%%L%%s);', p.pronamespace::regnamespace) AS protect
               FROM pg_proc p JOIN fence.calls() AS c ON c.call = p.oid WHERE p.proname = 'fenced'),
  own AS (SELECT t.* FROM fence.triggers() AS t WHERE t.is_own),
  tree (oid, root, col, mode, lease) AS (
    SELECT * FROM (SELECT DISTINCT ON (c.oid) c.oid, c.oid::regclass, o.arguments[1], o.arguments[2], nullif(o.arguments[3], '')
       FROM pg_class c LEFT JOIN own o ON o.relation = c.oid
       WHERE (c.oid = $1 OR $1 IS NULL AND o.parent = 0) AND pg_has_role(c.relowner, 'USAGE') ORDER BY c.oid, o.type & 1 DESC) AS r
    UNION
    SELECT i.inhrelid, p.root, p.col, p.mode, p.lease FROM tree p JOIN pg_inherits i ON i.inhparent = p.oid)
  SELECT DISTINCT m.oid::regclass, f.* FROM tree m JOIN pg_class c ON c.oid = m.oid CROSS JOIN home h CROSS JOIN LATERAL (
    SELECT 'hole', 'no trigger of pg_fence fires on ' || string_agg(e.name, ', '), format(h.protect, m.root, '')
     FROM (VALUES ('insert', 4, 3), ('update', 16, 3), ('delete', 8, 3), ('truncate', 32, 2)) AS e (name, flag, bits)
     WHERE (e.name <> 'insert' OR m.lease IS NOT NULL OR m.mode = 'managed')
      AND NOT EXISTS (SELECT FROM own o WHERE o.relation = m.oid AND o.type & 3 = e.bits AND o.type & e.flag <> 0) HAVING count(*) > 0
    UNION ALL
    SELECT 'hole', format('trigger %s %s', fence.quoted(t.tgname), CASE WHEN p.pronamespace = 'fence'::regnamespace
        THEN 'is disabled or fires for apply workers only' ELSE 'runs after the fence and may change what it judged' END),
        format(CASE WHEN p.pronamespace = 'fence'::regnamespace THEN 'ALTER TABLE %2$s ENABLE TRIGGER %1$I;'
        ELSE 'ALTER TRIGGER %1$I ON %2$s RENAME TO %3$I;' END, t.tgname, m.oid::regclass, 'a_' || t.tgname)
     FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
     WHERE t.tgrelid = m.oid AND CASE WHEN p.pronamespace = 'fence'::regnamespace THEN t.tgenabled NOT IN ('O', 'A')
        ELSE NOT t.tgisinternal AND t.tgtype & 3 = 3 AND t.tgtype & 20 <> 0 AND t.tgenabled <> 'D' AND t.tgname > 'fenced' END
    UNION ALL
    SELECT 'hole', format('%s has the privilege TRIGGER', g.name), format('REVOKE TRIGGER ON %s FROM %s;', m.oid::regclass, g.name)
     FROM aclexplode(c.relacl) AS a CROSS JOIN LATERAL (
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END) AS g (name)
     WHERE a.grantee <> c.relowner AND a.privilege_type = 'TRIGGER'
    UNION ALL
    SELECT 'notice', 'it is unlogged: a crash empties it, fences and all', format('ALTER TABLE %s SET LOGGED;', m.oid::regclass)
     WHERE c.relpersistence = 'u'
    UNION ALL
    SELECT CASE m.mode WHEN 'monotonic' THEN 'hole' ELSE 'notice' END, 'it is bound to no lease: the holder of any lease can write it'
        || CASE m.mode WHEN 'monotonic' THEN ', and a client with a token that it has read' ELSE '' END,
        format(h.protect, m.root, ', lease => ''order:{id}''') WHERE m.oid = m.root AND m.lease IS NULL AND m.mode <> ''
    UNION ALL
    SELECT 'notice', format(CASE WHEN a.attname IS NULL THEN 'column %s, which the trigger names, is not there: no write can land'
        ELSE 'column %s, which the lease names, may be NULL: nobody can write such a row' END, fence.quoted(n)),
        CASE WHEN a.attname IS NOT NULL THEN format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL;', m.root, n) END
     FROM unnest(m.col || fence.columns_of(m.lease)) AS n LEFT JOIN pg_attribute a ON a.attrelid = m.oid AND a.attname = n AND a.attnum > 0
     WHERE m.oid = m.root AND (a.attname IS NULL OR NOT a.attnotnull AND n <> m.col)
  ) AS f (severity, finding, remedy) ORDER BY 1, 2, 3
$$;
COMMENT ON FUNCTION fence_audit IS 'the ways around the fence of a table, or of all of the caller''s, each with its remedy (pg_fence_lite)';


DO $$
DECLARE
  item record;
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
END
$$;
SET search_path = pg_catalog, pg_temp;


-- Who may do what, and taking it away --------

-- The calls, known by their comments, and what else fence_grant gives.
CREATE OR REPLACE FUNCTION fence.calls(OUT call regprocedure, OUT is_given boolean) RETURNS SETOF record LANGUAGE sql STABLE AS $$
  SELECT p.oid, p.proname NOT IN ('fenced', 'fence_protect', 'fence_unprotect', 'fence_audit', 'fence_grant', 'fence_revoke')
   FROM pg_proc p JOIN pg_namespace n ON n.nspname = 'fence' AND n.nspowner = p.proowner
   WHERE obj_description(p.oid, 'pg_proc') LIKE '%(pg_fence_lite)'
  UNION ALL
  SELECT f, true FROM unnest('{"fence.relies(text,bigint)","fence.told(text)"}'::regprocedure[]) AS f
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
  -- Run with the rights of the owner: the calls that are given, and these.
  definers CONSTANT text[] := '{drop_function,relies,settle,told,write_trigger}';
  -- The owner's functions alone call these: so they need no search_path. Who calls the others has no more rights by them.
  closed CONSTANT text[] := '{attempt,change,check,check_snapshot,check_timeouts,draw,identity,move_on,nobody_waits,put_function,renew,start}';
  calls CONSTANT text := (SELECT string_agg(c.call::text, ', ') FROM fence.calls() AS c);
  given CONSTANT oid[] := ARRAY(SELECT a.grantee FROM fence.calls() AS c JOIN pg_proc p ON p.oid = c.call CROSS JOIN aclexplode(p.proacl) AS a
    WHERE p.proname = 'lease_acquire' AND a.grantee NOT IN (0, p.proowner) AND current_setting('fence_lite.is_new') = 'false');
  item record;
BEGIN
  -- Every role may execute a new function, and default privileges of the installer's may have let roles in, even to the state (Supabase
  -- has such for those of its API). Whoever was not let in by fence_grant, before this run, goes.
  FOR item IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role
         FROM (SELECT n.nspowner, n.nspacl FROM pg_namespace n WHERE n.nspname = 'fence'
            UNION ALL SELECT p.proowner, coalesce(p.proacl, acldefault('f', p.proowner)) FROM pg_proc p JOIN fence.calls() AS c ON c.call = p.oid
            UNION ALL SELECT c.relowner, c.relacl FROM pg_class c WHERE c.relnamespace = 'fence'::regnamespace) AS o (owner, acl)
         CROSS JOIN aclexplode(o.acl) AS a WHERE a.grantee <> o.owner LOOP
    EXECUTE format('REVOKE ALL ON SCHEMA fence FROM %1$s; REVOKE ALL ON ALL TABLES IN SCHEMA fence FROM %1$s; REVOKE ALL ON ALL SEQUENCES '
      'IN SCHEMA fence FROM %1$s; REVOKE ALL ON ALL FUNCTIONS IN SCHEMA fence FROM %1$s; REVOKE ALL ON FUNCTION %2$s FROM %1$s', item.role, calls);
  END LOOP;
  GRANT USAGE ON SCHEMA fence TO PUBLIC;
  GRANT SELECT ON SEQUENCE fence.token_seq TO PUBLIC;
  GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fence TO PUBLIC;  -- but for those below
  FOR item IN SELECT p.oid::regprocedure AS call, CASE WHEN c.is_given OR p.proname = ANY (definers) THEN 'DEFINER' ELSE 'INVOKER' END AS rights,
            CASE WHEN p.prosqlbody IS NULL AND p.proname <> ALL (closed) THEN ' SET search_path = pg_catalog, pg_temp' END AS path,
            c.is_given OR p.proname = ANY (closed || '{fence_grant,fence_revoke,uninstall}'::text[]) AS is_closed
         FROM pg_proc p LEFT JOIN fence.calls() AS c ON c.call = p.oid
         WHERE c.call IS NOT NULL OR p.pronamespace = 'fence'::regnamespace AND p.proname !~ '^fenced_' LOOP
    EXECUTE format('ALTER FUNCTION %1$s SECURITY %2$s%3$s; GRANT EXECUTE ON FUNCTION %1$s TO PUBLIC', item.call, item.rights, item.path);
    IF item.is_closed THEN
      EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', item.call);
    END IF;
  END LOOP;
  PERFORM fence.let(g::regrole, 'GRANT %s ON %s TO %s') FROM unnest(given) AS g;

  -- Trigger functions are written anew; those of tables that are gone go.
  FOR item IN SELECT DISTINCT ON (p.oid) p.oid::regproc AS function, t.relation, t.arguments AS a
         FROM pg_proc p LEFT JOIN fence.triggers() AS t ON t.function = p.oid
         WHERE p.pronamespace = 'fence'::regnamespace AND p.proname ~ '^fenced_' ORDER BY p.oid, t.parent LOOP
    PERFORM fence.drop_function(item.function) WHERE item.relation IS NULL;
    PERFORM fence.put_function(item.function::text, fence.trigger_body(item.relation, item.a[1], item.a[2], nullif(item.a[3], ''), item.a[4]))
     WHERE item.relation IS NOT NULL;
  END LOOP;
  -- Where nothing was drawn yet: what a restore loads over this is another life's.
  IF fence.last_token() = 0 THEN
    PERFORM fence.move_on('jump'), setval('fence.jump_count_seq', 1, false);
  END IF;
END
$close$;

RESET check_function_bodies;
DO $$ BEGIN PERFORM set_config('search_path', current_setting('fence_lite.path'), false); END $$;
