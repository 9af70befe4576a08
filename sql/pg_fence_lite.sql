-- pg_fence_lite: leases, fencing tokens and fenced tables in SQL, for servers without the library. docs/reference/lite.md
--
--   psql -1 -f pg_fence_lite.sql    as the owner of the database (PostgreSQL 15 or newer); again to update it
--   SELECT fence_lite.uninstall();
--
-- fence.lease has a row for each lease. PostgreSQL's locks of that row, which only this code can take, do the rest:
--   guard          FOR KEY SHARE: nobody else gets the lease until the transaction ends
--   renew, release FOR NO KEY UPDATE: they wait for each other, not for guards
--   acquire        FOR UPDATE SKIP LOCKED: a locked row counts as taken
-- A token that is not the row's locks nothing. An advisory lock only orders waiters and the first grants of a name.

-- Names are looked up in pg_catalog and fence_lite only. Only this code may access the tables of fence: others
-- could lock them.
SET quote_all_identifiers = off;
DO $$ BEGIN PERFORM pg_catalog.set_config('fence_lite.path', pg_catalog.current_setting('search_path'), false),
  pg_catalog.set_config('fence_lite.home', pg_catalog.quote_ident(pg_catalog.current_schema()::pg_catalog.text), false); END $$;
SET search_path = fence_lite, pg_catalog, pg_temp;
SET check_function_bodies = off;

DO $$
DECLARE
 own oid := to_regrole(quote_ident(current_user));
 home text := nullif(current_setting('fence_lite.home'), '');
 mark text := format('pg_fence_lite, calls in schema %s', home);
 other text := (SELECT min(nspname) FROM pg_namespace WHERE nspname IN ('fence', 'fence_lite')
  AND (nspowner <> own OR obj_description(oid, 'pg_namespace') IS DISTINCT FROM mark));
 fault text[] := CASE
  WHEN current_setting('server_version_num')::int < 150000 THEN ARRAY['0A000', 'pg_fence_lite needs PostgreSQL 15 or newer']
  WHEN EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_fence') THEN ARRAY['42710', 'the extension pg_fence is installed here']
  WHEN home IS NULL THEN ARRAY['3F000', 'search_path has no schema for the calls']
  WHEN EXISTS (SELECT FROM pg_proc WHERE pronamespace = to_regnamespace(home)
   AND proname ~ '^(fenced$|fence_|lease_)' AND proowner <> own)
  THEN ARRAY['42723', 'functions of somebody else look like calls']
  WHEN other <> '' THEN ARRAY['42P06', 'schema ' || other || ' is not of this role and search_path'] END;
BEGIN
 IF fault IS NOT NULL THEN
  RAISE USING ERRCODE = fault[1], MESSAGE = fault[2], HINT = 'Nothing was changed.';
 END IF;
 PERFORM set_config('fence_lite.given', coalesce((SELECT string_agg(grantee::text, ',') FROM pg_proc p, aclexplode(proacl)
  WHERE p.oid = to_regproc(home || '.lease_acquire') AND grantee NOT IN (0, own) AND to_regclass('fence.lease') <> 0), ''), false);
 CREATE SCHEMA IF NOT EXISTS fence;
 CREATE SCHEMA IF NOT EXISTS fence_lite;
 EXECUTE format('COMMENT ON SCHEMA fence IS %1$L; COMMENT ON SCHEMA fence_lite IS %1$L', mark);
END $$;

-- State --
CREATE SEQUENCE IF NOT EXISTS fence.token_seq;
COMMENT ON SEQUENCE fence.token_seq IS 'fencing tokens';
CREATE UNLOGGED SEQUENCE IF NOT EXISTS fence.server_start_seq;
COMMENT ON SEQUENCE fence.server_start_seq IS 'fingerprint of the start';
CREATE SEQUENCE IF NOT EXISTS fence.database_identity_seq;
COMMENT ON SEQUENCE fence.database_identity_seq IS 'fingerprint of the database';
CREATE SEQUENCE IF NOT EXISTS fence.jump_token_seq;
COMMENT ON SEQUENCE fence.jump_token_seq IS 'a token up to it speaks once renewed';
CREATE SEQUENCE IF NOT EXISTS fence.jump_count_seq;
COMMENT ON SEQUENCE fence.jump_count_seq IS 'new epochs, and one more';

CREATE TABLE IF NOT EXISTS fence.lease (
 name text COLLATE "C" PRIMARY KEY, holder text,
 role name,  -- session_user; shown, but never checked
 first_token bigint NOT NULL DEFAULT 0,
 renewal_tokens bigint[] NOT NULL DEFAULT '{}',  -- of the latest 16 renewals
 closing_token bigint,  -- NULL while the grant is current
 acquired_at timestamptz, renewed_at timestamptz, expires_at timestamptz, ended_at timestamptz,
 ttl_us bigint, renewals bigint, metadata jsonb,
 granted_in xid8,  -- the transaction, which cannot rely on the grant at REPEATABLE READ
 closed_in xid8  -- the transaction, until whose end the closing token speaks
) WITH (fillfactor = 50, vacuum_truncate = false, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE fence.lease IS 'the latest grant of each lease; read fence.leases';
CREATE TABLE IF NOT EXISTS fence.turn ();

-- Errors --
-- A body with RETURN is parsed at once, which fixes its operators. Other functions get a search_path at the end, have
-- that of their trigger, or only the owner may call them.

CREATE OR REPLACE FUNCTION refuse(code text, message text, hint text, detail jsonb = '{}', relation oid = NULL,
 col text = NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE place record;
BEGIN
 SELECT nspname, relname INTO place FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = relation;
 detail := jsonb_strip_nulls(detail || jsonb_build_object('relation', relation::regclass));
 RAISE USING ERRCODE = code, MESSAGE = message, HINT = hint, DETAIL = detail, SCHEMA = coalesce(place.nspname, ''),
  TABLE = coalesce(place.relname, ''), COLUMN = coalesce(col, '');
END $$;
CREATE OR REPLACE FUNCTION left_out(what text) RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN PERFORM refuse('0A000', what || ' is not in pg_fence_lite', 'The extension pg_fence has it: where its library is installed, '
  'pg_fence_lite--pg_fence.sql moves this database up.'); END $$;
CREATE OR REPLACE FUNCTION bad(argument text, message text, code text = '22023') RETURNS void
 RETURN refuse(code, message, 'Correct the call.', jsonb_build_object('argument', argument));

CREATE OR REPLACE FUNCTION vet(writes text, name text, token bigint = 1, ttl interval = NULL,
 wait interval = NULL, holder text = NULL, metadata jsonb = NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
 bad text[] := CASE
  WHEN name IS NULL THEN ARRAY['name', 'name must not be NULL', '22004']
  WHEN token IS NULL THEN ARRAY['token', 'token is NULL, as where the lease is taken or lost: stop', '22004']
  WHEN octet_length(name) NOT BETWEEN 1 AND 512 THEN ARRAY['name', 'the name of a lease is 1 to 512 bytes long']
  WHEN token < 1 THEN ARRAY['token', 'a fencing token is at least 1']
  WHEN ttl <= '0' OR ttl > '366 days' THEN ARRAY['ttl', 'ttl must be positive and at most 366 days']
  WHEN wait < '0' OR wait >= '290000 years' THEN ARRAY['wait', 'wait must be finite and not negative']
  WHEN octet_length(holder) > 512 THEN ARRAY['holder', 'a holder is at most 512 bytes long']
  WHEN octet_length(metadata::text) > 65536 THEN ARRAY['metadata', 'metadata is at most 64 kB'] END;
BEGIN
 IF bad IS NOT NULL THEN
  PERFORM bad(bad[1], bad[2], coalesce(bad[3], '22023'));
 ELSIF writes <> '' AND current_setting('transaction_read_only') = 'on' THEN
  PERFORM refuse('25006', format('cannot execute %s() in a read-only transaction', writes), 'Begin READ WRITE, on the primary.');
 END IF;
END $$;
CREATE OR REPLACE FUNCTION us(span interval) RETURNS bigint
 RETURN ((extract(epoch FROM span) - extract(year FROM span) * 453600) * 1000000)::bigint;
CREATE OR REPLACE FUNCTION keeps_snapshot() RETURNS bool
 RETURN current_setting('transaction_isolation') NOT LIKE 'read%';

-- Tokens --
-- A second has 2^20 numbers. A start advances the sequence by that, or to the clock, and no token is drawn that is a
-- minute behind the clock. So tokens outrun what set the sequence back (a crash, a failover, a dump).

CREATE OR REPLACE FUNCTION clock() RETURNS bigint
 RETURN floor(extract(epoch FROM clock_timestamp() - '2026-01-01 00:00:00+00'::timestamptz) * 1048576)::bigint;
CREATE OR REPLACE FUNCTION last_token() RETURNS bigint
 RETURN coalesce(pg_sequence_last_value('fence.token_seq'), 0);
CREATE OR REPLACE FUNCTION minimum() RETURNS bigint
 RETURN coalesce(pg_sequence_last_value('fence.jump_token_seq'), 0);

-- A hash of this start. The file's path names the database, and ALTER SEQUENCE changes it.
CREATE OR REPLACE FUNCTION start_hash(minimum bigint) RETURNS bigint
 RETURN 2 + (4611686018427387903 & hashtextextended(concat_ws(' ', pg_relation_filepath('fence.token_seq'::regclass), minimum,
  extract(epoch FROM pg_postmaster_start_time())), 0));
CREATE OR REPLACE FUNCTION has_advanced() RETURNS bool
 RETURN coalesce(pg_sequence_last_value('fence.server_start_seq') = start_hash(minimum()), false);

-- Tells the database from a copy; 0 if the caller may not ask.
CREATE OR REPLACE FUNCTION identify(minimum bigint, OUT timeline int, OUT system_identifier bigint, OUT hash bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
 BEGIN
  SELECT s.system_identifier, CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
     ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int END
  INTO system_identifier, timeline FROM pg_control_system() AS s;
 EXCEPTION WHEN OTHERS THEN
  system_identifier := 0; timeline := 0;
 END;
 hash := greatest(1, 9223372036854775807 & hashtextextended(concat_ws(' ', timeline, system_identifier,
  (SELECT oid FROM pg_database WHERE datname = current_database()), 'fence.token_seq'::regclass::oid, minimum), 0));
END $$;
CREATE OR REPLACE FUNCTION is_copy() RETURNS bool
 RETURN pg_sequence_last_value('fence.database_identity_seq') IS DISTINCT FROM (identify(minimum())).hash;

-- Advances the tokens to `above` or higher, unless another session has done so. The caught error releases the lock;
-- sequences survive it.
CREATE OR REPLACE FUNCTION advance(above bigint = 0, new_epoch bool = false) RETURNS void LANGUAGE plpgsql AS $$
DECLARE second bigint := 1048576; minimum bigint; last bigint;
BEGIN
 LOCK fence.turn IN SHARE UPDATE EXCLUSIVE MODE;
 PERFORM refuse('55000', 'fence.token_seq was altered, so its values are no fencing tokens',
   'ALTER SEQUENCE fence.token_seq INCREMENT 1 CACHE 1 NO CYCLE; ALTER SEQUENCE fence.token_seq SET LOGGED;')
  FROM pg_sequence JOIN pg_class ON oid = seqrelid
 WHERE oid = 'fence.token_seq'::regclass AND (relpersistence <> 'p' OR seqincrement < 1 OR seqcache > 1 OR seqcycle);
 last := last_token();
 -- setval, as in a dump that was loaded over it, sets log_cnt to 0; nextval does not.
 new_epoch := new_epoch OR (SELECT log_cnt = 0 AND is_called FROM fence.server_start_seq);
 IF has_advanced() AND last >= above AND NOT new_epoch THEN
  RAISE SQLSTATE 'PF999';
 END IF;
 -- Two advances in a second would outrun the clock.
 last := greatest(last, above);
 PERFORM pg_sleep((last + second - clock())::float8 / second + 0.000001)
 WHERE last + second - clock() BETWEEN 1 AND 2 * second;
 minimum := minimum();
 last := setval('fence.token_seq', greatest(last + second, clock()));
 IF new_epoch OR is_copy() OR (SELECT log_cnt = 0 AND is_called FROM fence.server_start_seq) THEN
  minimum := setval('fence.jump_token_seq', last);
  PERFORM setval('fence.jump_count_seq', coalesce(pg_sequence_last_value('fence.jump_count_seq'), 0) + 1);
 END IF;
 -- The hash of the start is set last, because with it the rest is believed.
 PERFORM setval('fence.database_identity_seq', (identify(minimum)).hash),
   setval('fence.server_start_seq', start_hash(minimum) - 1), nextval('fence.server_start_seq');
 RAISE SQLSTATE 'PF999';
EXCEPTION WHEN SQLSTATE 'PF999' THEN NULL;
END $$;

CREATE OR REPLACE FUNCTION ensure_advanced() RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN PERFORM advance() WHERE NOT has_advanced(); RETURN last_token(); END $$;

-- A token above all those of a locked lease.
CREATE OR REPLACE FUNCTION draw(above bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
 last bigint; drawn bigint; has_advanced bool;
 was_set bool;  -- or it is the 33rd time
BEGIN
 FOR n IN 1..4 LOOP
  SELECT t.last_value, t.log_cnt = 0, s.log_cnt > 0 AND has_advanced() INTO last, was_set, has_advanced
  FROM fence.token_seq AS t, fence.server_start_seq AS s;
  IF has_advanced IS NOT TRUE THEN
   PERFORM advance();
   CONTINUE;
  ELSIF last < clock() - (CASE WHEN was_set THEN 1 ELSE 60 END) * 1048576 THEN
   PERFORM advance(clock() - 1048576);
  END IF;
  drawn := nextval('fence.token_seq');
  IF drawn > last AND drawn > above THEN
   RETURN drawn;
  END IF;
  PERFORM advance(greatest(last, above) + 1);
 END LOOP;
 PERFORM refuse('55000', 'the sequences of fence do not keep what is set', 'Install anew.');
END $$;

-- Leases --
CREATE OR REPLACE FUNCTION latest(l fence.lease) RETURNS bigint
 RETURN coalesce(l.renewal_tokens[cardinality(l.renewal_tokens)], l.first_token);
CREATE OR REPLACE FUNCTION is_live(l fence.lease) RETURNS bool
 RETURN l.closing_token IS NULL AND l.expires_at > clock_timestamp();
CREATE OR REPLACE FUNCTION has(l fence.lease, token bigint) RETURNS bool
 RETURN token = l.first_token OR token = ANY (l.renewal_tokens);
CREATE OR REPLACE FUNCTION speaks(l fence.lease, token bigint) RETURNS bool
 RETURN has(l, token) AND is_live(l) OR token = l.closing_token AND l.closed_in = pg_current_xact_id_if_assigned();

-- A lease's key: a hash that cannot be inverted.
CREATE OR REPLACE FUNCTION lock_key(lease text) RETURNS bigint
 RETURN ('x' || left(encode(sha256(replace((current_database(), lease)::text, E'\\', E'\\\\')::bytea), 'hex'), 16))::bit(64)::bigint;

-- A waiter, or an acquire of a new name, holds the key and a lock that no other role can take.
CREATE OR REPLACE FUNCTION nobody_waits(lease text) RETURNS bool LANGUAGE plpgsql AS $$
DECLARE key bigint := lock_key(lease);
BEGIN
 IF pg_try_advisory_lock_shared(key) AND pg_advisory_unlock_shared(key) THEN  -- no cancel comes between
  RETURN true;
 END IF;
 RETURN NOT EXISTS (
  SELECT FROM pg_locks q JOIN pg_locks t USING (virtualtransaction)
  WHERE q.locktype = 'advisory' AND q.objsubid = 1 AND (q.classid::bigint << 32) | q.objid::bigint = key AND q.granted
   AND t.relation = 'fence.turn'::regclass AND t.mode = 'AccessShareLock');
END $$;

-- The token, or NULL. `is_head`: by the head of the queue.
CREATE OR REPLACE FUNCTION try_acquire(lease text, by text, ttl interval, data jsonb, reclaim bool, is_head bool)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
 us bigint := coalesce(us(ttl), 30000000);
 old fence.lease; token bigint; time timestamptz; limited text := current_setting('lock_timeout');
 is_mine bool;
BEGIN
 SELECT * INTO old FROM fence.lease l WHERE l.name = lease;
 is_mine := (reclaim AND old.holder = by AND is_live(old)) IS TRUE;
 IF NOT is_mine AND (is_live(old) OR NOT is_head AND NOT nobody_waits(lease)) THEN
  RETURN NULL;
 END IF;
 -- This block releases the locks of a failed try.
 BEGIN
  IF old.name IS NULL THEN
   LOCK fence.turn IN ACCESS SHARE MODE;
   IF NOT is_head AND NOT pg_try_advisory_xact_lock(lock_key(lease)) AND NOT nobody_waits(lease) THEN
    RAISE SQLSTATE 'PF999';  -- another session is acquiring it
   END IF;
   PERFORM set_config('lock_timeout', '100', true);
   INSERT INTO fence.lease (name) VALUES (lease) ON CONFLICT DO NOTHING;
   PERFORM set_config('lock_timeout', limited, true);
  END IF;
  SELECT * INTO old FROM fence.lease l WHERE l.name = lease FOR UPDATE SKIP LOCKED;
  IF NOT FOUND OR is_live(old) AND (reclaim AND old.holder = by) IS NOT TRUE THEN
   RAISE SQLSTATE 'PF999';
  END IF;
  token := draw(greatest(latest(old), old.closing_token));
  time := clock_timestamp();
  UPDATE fence.lease l
   SET holder = coalesce(by, coalesce(nullif(current_setting('application_name'), ''), 'session') || '[' || pg_backend_pid() || ']'),
    role = session_user, first_token = token, renewal_tokens = '{}', closing_token = NULL, acquired_at = time, renewed_at = time,
    expires_at = time + us * interval '1 us', ended_at = NULL, ttl_us = us, renewals = 0, metadata = data,
    granted_in = pg_current_xact_id(), closed_in = NULL
  WHERE l.name = lease;
 EXCEPTION WHEN SQLSTATE 'PF999' OR lock_not_available THEN
  RETURN NULL;
 END;
 IF keeps_snapshot() THEN
  RAISE WARNING USING MESSAGE = 'this transaction''s reads may be older than its grant', DETAIL = jsonb_build_object('lease', lease),
   HINT = 'It cannot rely on the grant: commit first.';
 END IF;
 RETURN token;
END $$;
CREATE OR REPLACE FUNCTION renew(names text[], fresh bigint, moment timestamptz, us bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
 UPDATE fence.lease
  SET renewal_tokens = renewal_tokens[greatest(cardinality(renewal_tokens) - 14, 1):] || fresh, renewals = renewals + 1,
   renewed_at = moment, ttl_us = coalesce(us, ttl_us), expires_at = moment + coalesce(us, ttl_us) * interval '1 us'
 WHERE name = ANY (names) AND expires_at > moment;
END $$;

-- Renews or ends the token's grant (lease_revoke: any grant); NULL if there is none.
CREATE OR REPLACE FUNCTION change(call text, lease text, token bigint, ttl interval = NULL) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE held fence.lease; time timestamptz; fresh bigint;
BEGIN
 PERFORM vet(call, lease, token, ttl);
 SELECT * INTO held FROM fence.lease l WHERE l.name = lease AND (call = 'lease_revoke' OR speaks(l, token)
  OR has(l, token) AND l.closed_in = pg_current_xact_id_if_assigned()) FOR NO KEY UPDATE;
 time := clock_timestamp();
 IF held.closing_token IS NULL AND held.expires_at > time THEN
  fresh := draw(latest(held));
  IF call = 'lease_renew' THEN
   PERFORM renew(ARRAY[lease], fresh, time, us(ttl));
  ELSE
   UPDATE fence.lease l SET closing_token = fresh, ended_at = time, closed_in = pg_current_xact_id() WHERE l.name = lease;
  END IF;
 ELSIF call = 'lease_release' THEN
  fresh := held.closing_token;
 END IF;
 IF fresh IS NULL THEN
  RAISE SQLSTATE 'PF999';
 END IF;
 RETURN fresh;
EXCEPTION WHEN SQLSTATE 'PF999' THEN RETURN NULL;
END $$;

-- Guards the lease. Returns NULL, or the error if the token does not speak for it.
CREATE OR REPLACE FUNCTION relies(lease text, token bigint, shown text) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
 named text := coalesce('lease ' || to_json(shown)::text, 'the row''s lease');
 held fence.lease; is_locked bool;
BEGIN
 IF NOT has_advanced() THEN PERFORM advance(); END IF;
 PERFORM FROM fence.lease l WHERE l.name = lease AND speaks(l, token) FOR KEY SHARE;
 is_locked := FOUND;
 IF keeps_snapshot() THEN
  -- 40001 if the row is newer than the snapshot: PostgreSQL refuses to lock it, or to insert it again.
  BEGIN
   IF is_locked THEN
    PERFORM FROM fence.lease l WHERE l.name = lease FOR SHARE SKIP LOCKED;
   ELSE
    PERFORM set_config('lock_timeout', '100', true);
    INSERT INTO fence.lease (name) VALUES (lease) ON CONFLICT DO NOTHING;
    PERFORM FROM fence.lease l WHERE l.name = lease FOR SHARE;
   END IF;
   RAISE SQLSTATE 'PF999';
  EXCEPTION WHEN SQLSTATE 'PF999' THEN NULL;
  END;
 END IF;
 SELECT * INTO held FROM fence.lease l WHERE l.name = lease;
 is_locked := is_locked AND coalesce(speaks(held, token), false);
 IF is_locked AND held.granted_in = pg_current_xact_id_if_assigned() AND keeps_snapshot() THEN
  RETURN ARRAY['55000', 'this transaction''s snapshot is older than its grant of ' || named,
   'Acquire and commit, then begin this one.', jsonb_build_object('lease', shown)::text];
 ELSIF is_locked AND latest(held) > minimum() THEN
  RETURN NULL;
 END IF;
 RETURN ARRAY['PF004', format('fencing token %s does not speak for %s', token, named),
  CASE WHEN is_locked THEN 'After a failover or a copy call lease_renew with this token; NULL means: stop.'
  ELSE 'It has expired, been released, revoked or taken over, or was never granted: stop.' END,
  jsonb_build_object('lease', shown, 'presented', token, 'renew_first', nullif(is_locked, false), 'holder', held.holder,
   'expires_at', iso(held.expires_at))::text];
END $$;

-- Who keeps a lease from being granted; 0: a prepared transaction.
CREATE OR REPLACE FUNCTION blocking_pids(locker xid) RETURNS int[] LANGUAGE plpgsql STABLE AS $$
DECLARE lockers xid[] := ARRAY[locker];
BEGIN
 BEGIN
  lockers := lockers || ARRAY(SELECT xid FROM pg_get_multixact_members(locker));
 EXCEPTION WHEN OTHERS THEN NULL;
 END;
 RETURN ARRAY(SELECT DISTINCT coalesce(x.pid, 0) FROM pg_locks x JOIN pg_locks t USING (virtualtransaction)
    WHERE x.locktype = 'transactionid' AND x.granted AND x.transactionid = ANY (lockers)
     AND t.relation = 'fence.lease'::regclass AND t.mode LIKE 'Row%');
END $$;

CREATE OR REPLACE VIEW fence.leases AS
SELECT name, 'exclusive'::text AS mode,
  CASE WHEN closing_token IS NOT NULL THEN 'free' WHEN is_live(l) THEN 'held' ELSE 'expired' END AS state,
  holder, role, coalesce(closing_token, latest(l)) AS token, first_token, acquired_at, renewed_at, expires_at,
  greatest(CASE WHEN closing_token IS NULL THEN expires_at - clock_timestamp() END, '0') AS remaining,
  renewals, metadata, CASE xmax WHEN '0' THEN '{}' ELSE blocking_pids(xmax) END AS blocking_pids, false AS adopted
FROM fence.lease l;
COMMENT ON VIEW fence.leases IS 'a row per lease: who holds what until when';

-- The fence --
-- fence_protect writes a trigger function, which calls check_write or check_row. All of it runs with the
-- writer's rights except relies, which only roles that may use leases may call.

CREATE OR REPLACE FUNCTION no_token(is_new bool, way text) RETURNS text[]
 RETURN ARRAY['PF002', 'no fencing token presented', CASE WHEN is_new THEN 'Leave the fence column out. Load data before fence_protect, '
  'or under session_replication_role = replica.' ELSE way END];
CREATE OR REPLACE FUNCTION may_show(relation oid) RETURNS bool
 RETURN NOT row_security_active(relation) AND has_table_privilege(relation, 'SELECT')
  AND pg_has_role(session_user, current_user, 'MEMBER');  -- otherwise a cascade's

-- A first trigger notes the row's version if the statement names the fence. (Forging the note gains
-- what naming it allows.)
CREATE OR REPLACE FUNCTION note_named() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM set_config('fence_lite.named', concat_ws(' ', TG_RELID, OLD.ctid, OLD.xmin), true); RETURN NEW; END $$;
CREATE OR REPLACE FUNCTION issued(token bigint) RETURNS bool
 RETURN token > 0 AND (token <= last_token() OR token <= ensure_advanced());
CREATE OR REPLACE FUNCTION iso(at timestamptz) RETURNS text
 RETURN to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"');

CREATE OR REPLACE FUNCTION refuse_row(r text[], more jsonb, token bigint, shows bool, key jsonb, stored bigint, relation oid, col text)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE seen bigint := CASE WHEN shows THEN stored END;
BEGIN
 token := coalesce(token, CASE r[1] WHEN 'PF001' THEN seen END);
 r := r || CASE r[1]
  WHEN 'PF001' THEN ARRAY[concat('stale fencing token', ' ' || nullif(token, seen), ': the row has ',
    CASE WHEN seen IS NULL THEN 'seen a greater one' WHEN token = seen THEN 'already been written with token ' || seen
     ELSE 'already seen ' || seen END), CASE WHEN token = seen
   THEN 'In strict mode write the row again with lease_renew''s token.' ELSE 'A newer holder may be at work: stop, and do not retry.' END]
  WHEN 'PF003' THEN ARRAY[format('fencing token %s was never issued by this database', token), CASE
    WHEN token > 1 AND token - 1 = seen AND current_setting('pg_fence.token', true) IS DISTINCT FROM token::text
   THEN 'An ORM counts this column: map it otherwise, or use managed mode.' ELSE 'After a restore, call fence_new_epoch().' END] END;
 PERFORM refuse(r[1], r[2], r[3], jsonb_build_object('presented', token, 'key', CASE WHEN shows THEN nullif(key, '{}') END, 'stored', seen)
  || coalesce(more, '{}'), relation, col);
END $$;

CREATE OR REPLACE FUNCTION check_write(op text, relation oid, col text, mode text, columns text[], parted bool,
 is_free bool, stored bigint, shown bigint, old_lease text, lease text, place text, key jsonb) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
 is_replica bool := current_setting('session_replication_role') = 'replica';  -- only order is checked
 presents bool := is_replica OR mode <> 'managed' AND op <> 'DELETE' AND shown IS DISTINCT FROM stored;
 ambient text := coalesce(current_setting('pg_fence.token', true), '');
 named bool := NOT presents AND coalesce(current_setting('fence_lite.named', true) = place, false);
 token bigint := CASE WHEN presents THEN shown WHEN ambient <> '' THEN ambient::bigint WHEN named AND mode = 'monotonic' THEN stored END;
 is_stale bool := coalesce(token < stored OR token = stored AND mode = 'strict', false);
 is_new bool := mode = 'managed' AND op = 'INSERT' AND is_free AND NOT is_replica
  AND (token IS NULL OR columns IS NOT NULL AND NOT (parted AND shown IS NOT DISTINCT FROM token));
 is_bound bool := NOT (is_new OR is_replica OR columns IS NULL);
 shows bool := may_show(relation);
 refused text[];
BEGIN
 IF is_new AND (shown > 0) IS NOT TRUE OR is_replica AND (op <> 'UPDATE' OR stored IS NULL OR token >= stored AND NOT is_stale) THEN
  RETURN CASE WHEN NOT is_new THEN shown END;
 END IF;
 refused := CASE
  WHEN is_bound AND (op <> 'DELETE' AND lease IS NULL OR op <> 'INSERT' AND old_lease IS NULL) THEN ARRAY['22004',
   format('column "%s" is NULL, so the row names no lease', array_to_string(columns, '" or "')),
   'Mend it in one transaction: fence_unprotect, UPDATE, SET NOT NULL, fence_protect.']
  WHEN is_bound AND (greatest(octet_length(lease), octet_length(old_lease)) > 512 OR '' IN (lease, old_lease)) THEN ARRAY['22023',
   'the row''s columns make no lease name of 1 to 512 bytes', 'Bind by shorter ones.']
  WHEN is_new OR token IS NULL AND NOT (named AND mode = 'strict' AND stored IS NOT NULL)
  THEN no_token(is_new,
   'SET LOCAL pg_fence.token to your lease''s, or lease_guard. NULL is a lease that lease_renew or lease_release found lost.')
  WHEN token IS NULL OR is_replica THEN ARRAY['PF001']
  WHEN NOT issued(token) THEN ARRAY['PF003']
  WHEN is_stale AND (mode = 'strict' OR NOT is_bound) THEN ARRAY['PF001']
  WHEN is_bound AND NOT has_function_privilege('relies'::regproc, 'EXECUTE')
  THEN ARRAY['42501', format('role "%s" may not use leases', current_user), 'fence_grant lets it.'] END;
 IF refused IS NULL AND is_bound THEN
  refused := relies(coalesce(lease, old_lease), token, CASE WHEN shows THEN coalesce(lease, old_lease) END);
  IF refused IS NULL AND old_lease <> lease THEN
   refused := relies(old_lease, token, CASE WHEN shows THEN old_lease END);
  END IF;
  IF is_stale AND refused[1] = 'PF004' AND refused[4]::jsonb -> 'renew_first' = 'null' THEN
   refused := ARRAY['PF001'];
  END IF;
 END IF;
 IF refused IS NOT NULL THEN
  PERFORM refuse_row(refused, refused[4]::jsonb, token, shows, key, stored, relation, col);
 ELSIF is_bound OR parted AND token::text <> ambient THEN
  -- For the INSERT of a move to another partition.
  ambient := set_config('fence_lite.guard', set_config('pg_fence.token', token::text, true), true);
 END IF;
 -- Nobody else was granted the lease meanwhile, so the greater fence stays.
 RETURN greatest(token, CASE WHEN is_bound THEN stored END);
END $$;

-- Row leases --
-- True if this transaction has written the version. The 32-bit id of an old one may be a future transaction's.
CREATE OR REPLACE FUNCTION is_own(version bigint) RETURNS bool LANGUAGE plpgsql AS $$
DECLARE own bigint := pg_current_xact_id_if_assigned()::text; ahead bigint := version - own & 4294967295;
BEGIN
 RETURN coalesce(CASE WHEN ahead < 16777216 AND version > 2 THEN pg_xact_status((own + ahead)::text::xid8) = 'in progress' END, false);
EXCEPTION WHEN invalid_parameter_value THEN RETURN false;
END $$;
CREATE OR REPLACE FUNCTION claim() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RETURN draw(0); END $$;

-- The row's new fence and deadline. A number from the table is never passed to draw.
CREATE OR REPLACE FUNCTION check_row(op text, relation oid, col text, mode text, deadline text, INOUT fence bigint, shown bigint,
 was timestamptz, INOUT until timestamptz, place text, key jsonb) LANGUAGE plpgsql AS $$
DECLARE
 time timestamptz := clock_timestamp();  -- under the row's lock
 named bool := op = 'UPDATE' AND current_setting('fence_lite.named', true) = place;
 by_setting bool := op = 'DELETE' OR mode = 'managed';  -- but not by a guard's
 ambient text := nullif(current_setting('pg_fence.token', true), coalesce(current_setting('fence_lite.guard', true), ''));
 token bigint := CASE WHEN op = 'INSERT' THEN NULL WHEN by_setting THEN nullif(ambient, '')::bigint WHEN named THEN shown END;
 is_own bool := op <> 'INSERT' AND is_own(split_part(place, ' ', 3)::bigint);
 is_held bool := fence IS NOT NULL AND was > time;
 is_before bool := fence IS NULL AND was IS NOT NULL;  -- from before the fence
 is_holders bool := fence IS NOT NULL AND was IS NOT NULL AND (token IS NOT NULL OR is_own);
 changes bool := op <> 'DELETE' AND until IS DISTINCT FROM was AND (is_holders AND until < was
  OR abs(extract(epoch FROM until) - extract(epoch FROM was)) < 0.001 AND (is_holders OR until = date_trunc('msec', until))) IS NOT TRUE;
 drawn bigint; shows bool := may_show(relation); refused text[];
BEGIN
 IF current_setting('session_replication_role') = 'replica' THEN
  PERFORM check_write(op, relation, col, 'monotonic', NULL, false, false, fence, shown, NULL, NULL, NULL, key);
  fence := shown;
  RETURN;
 END IF;
 refused := CASE
  WHEN op = 'INSERT' AND shown > 0 OR named AND NOT by_setting AND shown IS NULL AND fence IS NOT NULL
  THEN no_token(op = 'INSERT', format('Set column "%s" to the row''s token. NULL is mostly a row that was lost: stop.', col))
  WHEN named AND by_setting AND token IS NULL AND shown IS DISTINCT FROM fence
  THEN ARRAY['PF004', 'the statement writes back an old copy of the row', 'Read it again; its holder sets pg_fence.token.']
  WHEN token < fence THEN ARRAY['PF001']
  WHEN token IS NOT NULL AND token IS DISTINCT FROM fence AND NOT issued(token) THEN ARRAY['PF003']
  WHEN token IS NOT NULL AND (token IS DISTINCT FROM fence OR was IS NULL AND NOT is_own)
  THEN ARRAY['PF004', concat('fencing token ', token, ' does not speak for the row',
   CASE WHEN token = fence THEN ', which nobody holds' END), 'Claim the row anew, or stop.']
  WHEN token IS NULL AND is_held AND NOT is_own
  THEN ARRAY['PF006', concat('the row is held', CASE WHEN shows THEN ' until ' || iso(was) END, ', and its token was not presented'),
   format(CASE mode WHEN 'managed' THEN 'Its holder sets pg_fence.token. Others wait, or evict by that: SET %2$I = NULL.'
    ELSE 'Its holder shows its token in column "%1$s", or to DELETE in pg_fence.token. Others wait, or evict: '
    'SET %2$I = NULL, %1$I = %1$I.' END, col, deadline)]
  WHEN is_holders AND changes AND until > was AND NOT is_held
  THEN ARRAY['PF004', format('fencing token %s can no longer renew the row', token), 'Late: claim the row anew, or stop.']
  WHEN changes AND until <= time AND NOT is_holders AND NOT is_before THEN ARRAY['22023', format('the deadline in column "%s" has passed',
   deadline), 'Compute it from clock_timestamp().']
  WHEN changes AND until > time + interval '8784 hours' THEN ARRAY['22023', 'a deadline may be at most 366 days ahead',
   'Usual is clock_timestamp() + ''30 s''.'] END;
 IF refused IS NULL AND changes AND until > time AND NOT is_holders THEN
  drawn := claim();
  refused := CASE WHEN fence >= drawn THEN ARRAY['PF003', concat('the row''s fence', CASE WHEN shows THEN ' ' || fence END,
   ' was never issued by this database'), 'Call fence_new_epoch(). Near 2^63: DELETE and INSERT the row.'] END;
 ELSIF is_holders THEN
  until := CASE WHEN changes THEN until ELSE was END;
 ELSIF NOT is_before THEN
  until := NULL;  -- any write ends an expired claim
 END IF;
 IF refused IS NOT NULL THEN
  PERFORM refuse_row(refused, jsonb_build_object('expires_at', CASE WHEN shows THEN iso(was) END),
   CASE WHEN shows OR token <> fence THEN token END, shows, key, fence, relation, col);
 END IF;
 fence := coalesce(drawn, fence);
END $$;

CREATE OR REPLACE FUNCTION refuse_truncate() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM refuse('PF005', 'TRUNCATE cannot be fenced: it shows no token', 'Use DELETE with a token, or fence_unprotect first.',
 '{}', TG_RELID) WHERE current_setting('session_replication_role') <> 'replica';
 RETURN NULL; END $$;

-- The parts of a template; an unpaired brace is odd.
CREATE OR REPLACE FUNCTION pieces(template text, OUT col text, OUT literal text, OUT is_odd bool) RETURNS SETOF record
LANGUAGE sql IMMUTABLE ROWS 9 AS $$
 SELECT CASE WHEN m[1] ~ '^[{].+[}]$' THEN btrim(m[1], '{}') END,
   CASE WHEN m[1] IN ('{{', '}}') THEN left(m[1], 1) WHEN m[1] !~ '^[{}]' THEN m[1] END, m[1] IN ('{', '}')
 FROM regexp_matches(template, '([{][{]|[}][}]|[{][^{}]+[}]|[^{}]+|.)', 'g') AS m
$$;
CREATE OR REPLACE FUNCTION columns_of(template text) RETURNS text[]
 RETURN CASE WHEN template IS NOT NULL THEN ARRAY(SELECT col FROM pieces(template) WHERE col IS NOT NULL) END;

-- The name of the lease of OLD or NEW, or the deadline, as code.
CREATE OR REPLACE FUNCTION lease_of(side text, template text, deadline text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
 SELECT coalesce(side || '.' || quote_ident(deadline), string_agg(CASE WHEN p.col IS NULL THEN format('%L', p.literal) ELSE
   format('%s.%I::text', side, p.col) END, ' || ' ORDER BY p.n), 'NULL')
  FROM pieces(template) WITH ORDINALITY AS p (col, literal, is_odd, n)
$$;
CREATE OR REPLACE FUNCTION trigger_body(relation oid, a text[]) RETURNS text LANGUAGE sql STABLE AS $$
 SELECT format($body$-- %s
DECLARE stored bigint; shown bigint; key jsonb; was %8$s; becomes %8$s; place text := concat_ws(' ', TG_RELID, OLD.ctid, OLD.xmin);
BEGIN
 BEGIN
  stored := OLD.%2$I; shown := NEW.%2$I; was := %3$s; becomes := %4$s;
  key := jsonb_build_object(%7$s);
 EXCEPTION WHEN undefined_column OR datatype_mismatch THEN
  PERFORM refuse(SQLSTATE, SQLERRM, 'Altered? Call fence_protect again.', '{}', TG_RELID);
 END;
 %9$s(TG_OP, TG_RELID, %2$L, %5$L, %6$s, stored, shown, was, becomes, place, key);
 IF TG_OP = 'DELETE' THEN
  RETURN OLD;
 ELSIF stored IS DISTINCT FROM shown THEN
  NEW.%2$I := stored;
 END IF;
 %10$s
 RETURN NEW;
END $body$, to_jsonb(a), a[1], lease_of('OLD', a[3], a[6]), lease_of('NEW', a[3], a[6]), a[2],
   coalesce(quote_literal(a[6]), format('%L, %L, %L', columns_of(a[3]),
    a[5], a[3] IS NULL OR coalesce(a[4] !~ 'insert', false))),
   string_agg(format('%1$L, coalesce(OLD.%1$I, NEW.%1$I)', attname), ', '),  -- other types may bring casts
   CASE WHEN a[6] <> '' THEN 'timestamptz' ELSE 'text' END,
    CASE WHEN a[6] <> '' THEN 'SELECT * INTO stored, becomes FROM check_row' ELSE 'stored := check_write' END,
    'NEW.' || quote_ident(a[6]) || ' := becomes;')
 FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey[:indnkeyatts - 1])
 WHERE indrelid = relation AND indisprimary AND atttypid < 10000
$$;
CREATE OR REPLACE FUNCTION put_function(name text, body text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
 EXECUTE format('CREATE OR REPLACE FUNCTION %1$s() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, fence_lite, pg_temp '
  'AS %2$L; COMMENT ON FUNCTION %1$s() IS ''a fence of fence_protect''; GRANT EXECUTE ON FUNCTION %1$s() TO PUBLIC',
  name, body);
END $$;
CREATE OR REPLACE FUNCTION write_trigger(relation oid, arguments text[] = '{}') RETURNS text LANGUAGE plpgsql AS $$
DECLARE
 body text := (SELECT CASE WHEN arguments = '{}' THEN '' ELSE trigger_body(relation, arguments) END FROM pg_class WHERE oid = relation
  AND pg_has_role(session_user, relowner, 'MEMBER'));
 name text := format('fence_lite.fenced_%s_%s', relation, to_hex(hashtextextended(body, 0)));
BEGIN
 PERFORM refuse('42501', 'only the owner may', 'Ask the owner.') WHERE body IS NULL;
 LOCK fence.lease IN ACCESS SHARE MODE;  -- who waits sees the fence
 PERFORM sweep(format('^fenced_%s_', relation));
 PERFORM put_function(name, body) WHERE body <> '';
 RETURN name;
END $$;
CREATE OR REPLACE FUNCTION sweep(names text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
 EXECUTE coalesce((SELECT string_agg(format('DROP FUNCTION fence_lite.%I()', proname), '; ') FROM pg_proc p WHERE proname ~ names
  AND pronamespace = 'fence_lite'::regnamespace AND NOT EXISTS (SELECT FROM pg_trigger WHERE tgfoid = p.oid)), '');
END $$;

-- The first line of a trigger function: column, mode, lease, events, partitioned, deadline.
CREATE OR REPLACE FUNCTION triggers(OUT relation regclass, OUT name name, OUT type int, OUT enabled "char",
 OUT parent oid, OUT function text, OUT arguments text[]) RETURNS SETOF record LANGUAGE sql STABLE ROWS 9 AS $$
 SELECT tgrelid, tgname, tgtype::int, tgenabled, tgparentid, 'fence_lite.' || proname,
   CASE WHEN proname ~ '^fenced_' THEN ARRAY(SELECT jsonb_array_elements_text(substring(prosrc, '^-- ([^\n]+)')::jsonb)) END
 FROM pg_trigger JOIN pg_proc p ON p.oid = tgfoid
 WHERE pronamespace = 'fence_lite'::regnamespace AND tgrelid::regclass::text !~ '^pg_temp'
$$;
-- True if no setting changes the text of the column's values; or if it is of the fence's own type, which nothing fills.
CREATE OR REPLACE FUNCTION is_fit(relation oid, col text, own text = NULL) RETURNS bool
 RETURN EXISTS (SELECT FROM pg_attribute WHERE attrelid = relation AND attname = col AND attnum > 0 AND attgenerated = ''
   AND CASE WHEN own <> ''
    THEN atttypid = own::regtype AND atttypmod = -1 AND NOT (atthasdef OR attidentity <> '' OR attnotnull AND own <> 'int8')
    ELSE atttypid = ANY ('{int2,int4,int8,text,varchar,uuid,bool}'::regtype[]) END);
CREATE OR REPLACE FUNCTION family(relation regclass) RETURNS SETOF regclass LANGUAGE sql STABLE ROWS 9 AS $$
 WITH RECURSIVE f (oid) AS (SELECT relation::oid UNION SELECT inhrelid FROM f JOIN pg_inherits ON inhparent = oid)
 SELECT oid::regclass FROM f
$$;
CREATE OR REPLACE FUNCTION take_off(table_name regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
 EXECUTE coalesce((SELECT string_agg(format('DROP TRIGGER IF EXISTS %I ON %s', name, relation), '; ') FROM triggers()
  WHERE parent = 0 AND relation IN (SELECT family(table_name))), '');
 PERFORM write_trigger(table_name);
END $$;

CREATE OR REPLACE FUNCTION refuse_table(relation regclass, fault text[]) RETURNS void RETURN CASE WHEN fault <> '{}' THEN
 refuse(fault[1], format('cannot fence %s: %s', relation, fault[2]), fault[3], '{}', relation, fault[4]) END;
CREATE OR REPLACE FUNCTION table_fault(relation regclass, is_new bool) RETURNS text[] LANGUAGE sql STABLE AS $$
 SELECT CASE
  WHEN c.oid IS NULL THEN ARRAY[CASE WHEN relation IS NULL THEN '22004' ELSE '42P01' END, 'there is no such table', 'Name another.']
  WHEN NOT pg_has_role(c.relowner, 'USAGE') THEN ARRAY['42501', 'only its owner may', format('Ask %s.', c.relowner::regrole)]
  WHEN EXISTS (SELECT FROM pg_trigger WHERE tgrelid = c.oid AND pg_get_triggerdef(oid) IS NULL)  -- at REPEATABLE READ
  THEN ARRAY['40001', 'its fence was changed meanwhile', 'Retry.']
  WHEN NOT is_new THEN NULL
  WHEN EXISTS (SELECT FROM family(relation) AS p JOIN pg_class ON oid = p WHERE relkind NOT IN ('r', 'p') OR relpersistence <> 'p')
  THEN ARRAY['42809', 'it is no logged table', 'A crash empties an unlogged one.']
  WHEN EXISTS (SELECT FROM pg_inherits WHERE inhrelid = c.oid OR inhparent = c.oid AND c.relkind = 'r')
  THEN ARRAY['42809', 'it is a partition, or of an inheritance', 'Protect the top of the partitions, or NO INHERIT.'] END
 FROM (SELECT) AS once LEFT JOIN pg_class c ON c.oid = relation
$$;

-- The calls, known by their comments, and what else fence_grant grants.
CREATE OR REPLACE FUNCTION calls(OUT call regprocedure, OUT is_given bool) RETURNS SETOF record
LANGUAGE sql STABLE ROWS 30 AS $$
 SELECT p.oid, proname !~ '^(fence(d|_protect|_unprotect|_audit|_grant|_revoke)|lease_.+_rows?)$'
 FROM pg_proc p JOIN pg_namespace ON nspname = 'fence' AND nspowner = proowner
 WHERE obj_description(p.oid, 'pg_proc') LIKE '%(pg_fence_lite)' OR proname ~ '^lease_.+_rows?$'  -- of 3_row_leases.sql
 UNION ALL
 SELECT 'relies'::regproc, true
$$;

-- The calls --
DO $$ BEGIN PERFORM set_config('search_path', current_setting('fence_lite.home'), false); END $$;
CREATE OR REPLACE FUNCTION lease_acquire(name text, holder text = NULL, ttl interval = '30 s', wait interval = '0',
 metadata jsonb = NULL, shared bool = false, slots int = 1, reclaim bool = false,
 session bool = false) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
 limited text := current_setting('lock_timeout');
 began timestamptz := clock_timestamp(); until timestamptz; token bigint;
BEGIN
 PERFORM vet('lease_acquire', name, 1, ttl, wait, holder, metadata);
 IF reclaim AND holder IS NULL THEN
  PERFORM bad('reclaim', 'reclaim needs a holder');
 ELSIF shared OR slots <> 1 OR session THEN
  PERFORM left_out('a shared, slots or session grant');
 END IF;
 token := try_acquire(name COLLATE "C", holder, ttl, metadata, reclaim, false);
 IF token IS NOT NULL OR coalesce(wait, '0') = '0' THEN
  RETURN token;
 END IF;
 PERFORM left_out('a wait at REPEATABLE READ') WHERE keeps_snapshot();

 -- Waiters take the queue's lock in turn. Its holder tries, as does a caller that reclaims.
 until := began + least(wait, nullif(limited, '0')::interval);
 BEGIN
  LOCK fence.turn IN ACCESS SHARE MODE;
  PERFORM set_config('lock_timeout', least(greatest(ceil(extract(epoch FROM until - clock_timestamp()) * 1000), 1), 2147483647)::text,
   true), pg_advisory_xact_lock(lock_key(name)), set_config('lock_timeout', limited, true) WHERE reclaim IS NOT TRUE;
  LOOP
   token := try_acquire(name COLLATE "C", holder, ttl, metadata, reclaim, reclaim IS NOT TRUE);
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
 RETURN try_acquire(name COLLATE "C", holder, ttl, metadata, reclaim, false);  -- another role may have held it
END $$;
CREATE OR REPLACE FUNCTION lease_renew(name text, token bigint, ttl interval = NULL) RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN RETURN change('lease_renew', name COLLATE "C", token, ttl); END $$;
CREATE OR REPLACE FUNCTION lease_release(name text, token bigint) RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN RETURN change('lease_release', name COLLATE "C", token); END $$;
CREATE OR REPLACE FUNCTION lease_revoke(name text) RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN RETURN change('lease_revoke', name COLLATE "C", 1); END $$;
CREATE OR REPLACE FUNCTION lease_keep(names text[], tokens bigint[])
RETURNS TABLE (name text, token bigint, outcome text, renewed bigint, remaining interval, again_in interval, code text)
LANGUAGE plpgsql ROWS 9 AS $$
#variable_conflict use_column
DECLARE
 places bigint[];  -- of locked leases
 kept text[]; above bigint; fresh bigint;
 time timestamptz := clock_timestamp();
BEGIN
 PERFORM vet('lease_keep', 'any');
 PERFORM bad('names', 'names and tokens must be as many, and at most 10000')
  WHERE cardinality(names) <> cardinality(tokens) OR cardinality(names) > 10000;
 PERFORM bad('names', 'names and tokens must not be NULL', '22004')
  WHERE (num_nulls(VARIADIC names) + num_nulls(VARIADIC tokens) = 0) IS NOT TRUE;
 SELECT array_agg(n), array_agg(name), max(latest) INTO places, kept, above FROM (
  SELECT p.n, l.name, latest(l) AS latest FROM unnest(names COLLATE "C", tokens) WITH ORDINALITY AS p (name, token, n)
   JOIN fence.lease l ON l.name = p.name WHERE has(l, p.token) AND is_live(l) FOR NO KEY UPDATE OF l SKIP LOCKED) AS x;
 IF kept IS NOT NULL THEN
  time := clock_timestamp();
  fresh := draw(above);
  PERFORM renew(kept COLLATE "C", fresh, time, NULL);
 END IF;
 RETURN QUERY
 SELECT p.name, p.token, o.outcome, CASE o.outcome WHEN 'kept' THEN fresh END, x.remaining,
   CASE o.outcome WHEN 'kept' THEN least(x.remaining / 3, '1 day') WHEN 'later' THEN greatest(x.remaining / 10, '10 ms') END,
   CASE o.outcome WHEN 'later' THEN '55P03' WHEN 'refused' THEN '22023' END
 FROM unnest(names COLLATE "C", tokens) WITH ORDINALITY AS p (name, token, n)
 LEFT JOIN fence.lease l ON l.name = p.name LEFT JOIN unnest(places) AS m (n) ON m.n = p.n
 CROSS JOIN LATERAL (SELECT CASE WHEN octet_length(p.name) NOT BETWEEN 1 AND 512 OR p.token < 1 THEN 'refused'
   WHEN m.n IS NOT NULL AND latest(l) = fresh THEN 'kept'
   WHEN m.n IS NULL AND has(l, p.token) AND is_live(l) THEN 'later' ELSE 'lost' END) AS o (outcome)
 CROSS JOIN LATERAL (SELECT CASE WHEN o.outcome IN ('kept', 'later') THEN greatest(l.expires_at - time, '0') END) AS x (remaining)
 ORDER BY p.n;
END $$;
CREATE OR REPLACE FUNCTION lease_guard(name text, token bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE refused text[];
BEGIN
 PERFORM vet('lease_guard', name, token);
 refused := relies(name COLLATE "C", token, name);
 PERFORM refuse(refused[1], refused[2], refused[3], refused[4]::jsonb) WHERE refused IS NOT NULL;
 PERFORM set_config('pg_fence.token', token::text, true), set_config('fence_lite.guard', token::text, true);
 RETURN token;
END $$;
CREATE OR REPLACE FUNCTION lease_check(name text, token bigint) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
 PERFORM vet('', name, token);
 PERFORM left_out('lease_check() at REPEATABLE READ') WHERE keeps_snapshot();
 RETURN EXISTS (SELECT FROM fence.lease l WHERE l.name = $1 COLLATE "C" AND speaks(l, token)
   AND latest(l) > minimum()) AND (pg_is_in_recovery() OR has_advanced() OR NOT is_copy());
END $$;
CREATE OR REPLACE FUNCTION lease_info(name text, token bigint = NULL) RETURNS SETOF fence.leases LANGUAGE plpgsql ROWS 1 AS $$
BEGIN
 PERFORM vet('', name, coalesce(token, 1));
 RETURN QUERY SELECT l.* FROM fence.leases l WHERE l.name = $1 COLLATE "C";
END $$;
CREATE OR REPLACE FUNCTION lease_prune(older_than interval = '1 day') RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE age interval := coalesce(older_than, '1 day'); pruned bigint;
BEGIN
 PERFORM vet('lease_prune', 'any');
 PERFORM bad('older_than', 'older_than must not be negative') WHERE age < '0';
 DELETE FROM fence.lease WHERE name IN (SELECT name FROM fence.lease
  WHERE coalesce(ended_at, expires_at) < clock_timestamp() - least(age, '1900 years') FOR UPDATE SKIP LOCKED);
 GET DIAGNOSTICS pruned = ROW_COUNT;
 RETURN pruned;
END $$;
CREATE OR REPLACE FUNCTION fence_new_epoch() RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN PERFORM vet('fence_new_epoch', 'any'), advance(0, true); RETURN minimum(); END $$;
CREATE OR REPLACE FUNCTION fence_status(OUT last_token bigint, OUT timeline int, OUT system_identifier bigint, OUT jumps bigint,
 OUT in_recovery bool, OUT library_version text, OUT sql_version text) LANGUAGE sql AS $$
 SELECT CASE WHEN NOT pg_is_in_recovery() THEN last_token() END, timeline, system_identifier,
   greatest(coalesce(pg_sequence_last_value('fence.jump_count_seq'), 0) - 1, 0), pg_is_in_recovery(), 'none: pg_fence_lite', '0.2.0'
 FROM identify(minimum())
$$;
CREATE OR REPLACE FUNCTION fence_grant(role regrole, level text = 'worker', prefix text = NULL) RETURNS void LANGUAGE plpgsql AS
$$ BEGIN PERFORM left_out('a level or prefix') WHERE prefix <> '' OR level <> 'worker';
 PERFORM let(role, 'GRANT %s ON %s TO %s'); END $$;
CREATE OR REPLACE FUNCTION fence_revoke(role regrole, prefix text = NULL) RETURNS void LANGUAGE plpgsql AS
$$ BEGIN PERFORM left_out('a prefix') WHERE prefix <> ''; PERFORM let(role, 'REVOKE %s ON %s FROM %s'); END $$;
CREATE OR REPLACE FUNCTION fenced() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM left_out('fenced() by hand'); END $$;
CREATE OR REPLACE FUNCTION fence_protect(relation regclass, fence_column name = 'fence', mode text = NULL,
 lease text = NULL, events text = NULL, verify bool = false, always bool = false, deadline name = NULL)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
 col text := coalesce(fence_column, 'fence'); had record;
 parted bool := pg_partition_root(relation) IS NOT NULL;
 checked_as text; bound_to text; until name; key text; chosen text; on_events text[]; stays bool; fault text[]; item record;
BEGIN
 PERFORM left_out('verify') WHERE verify AND deadline IS NULL;
 PERFORM refuse_table(relation, table_fault(relation, true));
 EXECUTE format('LOCK %s', relation);
 PERFORM refuse_table(relation, table_fault(relation, true));  -- now locked

 -- An omitted argument keeps its value, but without a lease only strict is safe.
 SELECT max(arguments[2]) AS mode, max(arguments[3]) AS lease, max(arguments[4]) AS events, max(arguments[6]) AS deadline,
   bool_or(enabled = 'A') AS always INTO had
 FROM triggers() AS t WHERE t.relation = $1;
 bound_to := nullif(coalesce(lease, had.lease), '');
 until := nullif(coalesce(deadline, had.deadline), '');
 key := coalesce(bound_to, until);
 PERFORM left_out('a deadline of a partitioned table') WHERE parted AND until <> '';
 stays := (key IS NULL) = (coalesce(had.lease, had.deadline) IS NULL);
 checked_as := lower(coalesce(mode, CASE WHEN stays OR had.mode = 'managed' THEN had.mode END,
  CASE WHEN key IS NULL THEN 'strict' ELSE 'monotonic' END));
 chosen := lower(replace(coalesce(events, CASE WHEN stays THEN had.events END), ' ', ''));
 on_events := string_to_array(coalesce(chosen, 'update,delete,truncate' || CASE WHEN key <> '' THEN ',insert' ELSE '' END), ',');

 SELECT CASE
  WHEN col = '' OR checked_as NOT IN ('strict', 'monotonic', 'managed')
   OR NOT on_events <@ '{insert,update,delete,truncate}' OR on_events = '{}'
  THEN ARRAY['22023', 'a mode or event is not known', 'Modes: strict, monotonic, managed.']
  WHEN lease = '' AND had.mode IS NULL
   OR (SELECT bool_or(is_odd) OR octet_length(string_agg(literal, '')) > 512 FROM pieces(bound_to))
  THEN ARRAY['22023', format('"%s" is no name for a lease', lease), 'Write 1 to 512 bytes, {column}, {{ and }}.']
  WHEN deadline = '' AND had.mode IS NULL
   OR until <> '' AND (until = col OR bound_to <> '' OR checked_as = 'strict' OR verify OR cardinality(on_events) < 4)
  THEN ARRAY['22023', 'a deadline has a column of its own, and no lease, strict, verify, events', 'Give lease => '''' to unbind it.']
  WHEN f.attnum IS NULL AND had.mode IS NOT NULL
  THEN ARRAY['42703', format('its fence has no column "%s"', col), 'Name it as fence_column.', col]
  WHEN own <> '' THEN ARRAY[state, format('column "%s" is no %s, or has a default, or is NOT NULL', name, own),
   'Name another.', name]
  WHEN unfit IS NOT NULL THEN ARRAY['42703', format('the lease names {%s}, no column that is fit', unfit),
   'Fit are integers, text, varchar, uuid, bool.', unfit] END INTO fault
 FROM (SELECT min(c) FROM unnest(columns_of(bound_to)) AS c WHERE c = col OR NOT is_fit(relation, c)) AS u (unfit)
 LEFT JOIN pg_attribute f ON f.attrelid = relation AND f.attname = col
 LEFT JOIN (SELECT name, own,
   CASE WHEN attnum < 0 THEN '42701' WHEN atttypid <> own::regtype OR atttypmod >= 0 THEN '42804' ELSE '42611' END
  FROM pg_attribute JOIN (VALUES (col, 'int8'), (until, 'timestamptz')) AS v (name, own) ON attname = name
  WHERE attrelid = relation AND (NOT is_fit(relation, name, own) OR attnotnull AND until <> '') ORDER BY own LIMIT 1
  ) AS o (name, own, state) ON true;
 PERFORM refuse_table(relation, fault);
 FOR item IN
  SELECT * FROM (VALUES (col, 'bigint', 'fencing token of the latest write'), (until, 'timestamptz', 'until when the row is held'))
   AS v (name, type, says)
  WHERE name <> '' AND NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = relation AND attname = name)
 LOOP
  EXECUTE format('ALTER TABLE %1$s ADD %2$I %3$s; COMMENT ON COLUMN %1$s.%2$I IS ''%4$s (pg_fence)''', relation, item.name, item.type,
   item.says);
 END LOOP;
 PERFORM take_off(relation);
 -- Partitions get no statement trigger.
 FOR item IN
  SELECT 'fence_named' AS name, format('UPDATE OF %I', col) AS event, relation AS rel,
    'ROW EXECUTE FUNCTION fence_lite.note_named' AS call WHERE on_events && '{update}'
  UNION ALL
  SELECT 'fenced', string_agg(DISTINCT e, ' OR '), relation,
    'ROW EXECUTE FUNCTION ' || write_trigger(relation, ARRAY[col, checked_as, bound_to, chosen, parted::text, until])
  FROM unnest(on_events || CASE WHEN checked_as = 'managed' THEN '{insert}'::text[] END) AS e WHERE e <> 'truncate' HAVING count(*) > 0
  UNION ALL
  SELECT 'fenced_truncate', 'TRUNCATE', part, 'STATEMENT EXECUTE FUNCTION fence_lite.refuse_truncate'
  FROM family(relation) AS part WHERE on_events && '{truncate}'
 LOOP
  EXECUTE format('CREATE TRIGGER %I BEFORE %s ON %s FOR EACH %s()', item.name, item.event, item.rel, item.call);
  IF coalesce(always, had.always) THEN
   EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', item.rel, item.name);
  END IF;
 END LOOP;
 IF key IS NULL THEN
  RAISE NOTICE '% is bound to no lease: the holder of any lease can write it', relation;
 END IF;
 IF had.always AND NOT always THEN
  RAISE NOTICE '% is no longer fenced with always', relation;
 END IF;
END $$;
CREATE OR REPLACE FUNCTION fence_unprotect(relation regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
 PERFORM refuse_table(relation, table_fault(relation, false));
 PERFORM refuse_table($1, ARRAY['42809', 'it is a partition', format('Take the fence off %s.', pg_partition_root($1))])
  FROM triggers() AS t WHERE t.relation = $1 AND parent <> 0;
 IF EXISTS (SELECT FROM triggers() AS t WHERE t.relation IN (SELECT family($1))) THEN
  EXECUTE format('LOCK %s', relation);
  PERFORM take_off(relation);
 ELSE
  RAISE NOTICE '% is not fenced', relation;
 END IF;
END $$;
CREATE OR REPLACE FUNCTION fence_audit(INOUT relation regclass = NULL, OUT severity text, OUT finding text, OUT remedy text)
RETURNS SETOF record LANGUAGE sql ROWS 9 AS $$
 SELECT refuse_table(relation, table_fault(relation, false)) WHERE relation IS NOT NULL;
 WITH own AS (SELECT * FROM triggers() WHERE function !~ 'note'),
 fence AS (SELECT DISTINCT ON (c.oid) c.oid::regclass AS root, arguments AS a, arguments[2] AS mode,
    coalesce(arguments[3], arguments[6]) AS key, CASE WHEN parent > 0 THEN pg_partition_root(c.oid) ELSE c.oid END AS top
   FROM pg_class c LEFT JOIN own o ON o.relation = c.oid
   WHERE (c.oid = $1 OR $1 IS NULL AND parent = 0 AND (arguments <> '{}' OR NOT relispartition)) AND pg_has_role(relowner, 'USAGE')
   ORDER BY c.oid, arguments)
 SELECT DISTINCT part, f.* FROM fence m CROSS JOIN family(m.root) AS part CROSS JOIN table_fault(m.top, true) AS fault
 CROSS JOIN LATERAL (SELECT array_agg(n) FROM unnest(m.a[1] || columns_of(m.a[3]) || m.a[6]) AS n
  WHERE n <> '' AND NOT is_fit(part, n, CASE n WHEN m.a[1] THEN 'int8' WHEN m.a[6] THEN 'timestamptz' END)) AS u (unfit)
 CROSS JOIN LATERAL (SELECT '; fence_protect refuses: ' || fault[2] || '. ' || fault[3], CASE WHEN fault IS NULL AND unfit IS NULL THEN
   format('SELECT %s(%L::regclass, %L, always => NULL', (SELECT oid::regproc FROM calls() JOIN pg_proc ON oid = call
   WHERE proname = 'fence_protect'), m.top::regclass, m.a[1]) END) AS again (why, call)
 CROSS JOIN LATERAL (
  SELECT 'hole', concat('no trigger of pg_fence fires on ', string_agg(name, ', '), why),
    call || concat(', events => ' || quote_literal(m.a[4] || ',' || string_agg(name, ',')), ');')
  FROM (VALUES ('insert', 7), ('update', 19), ('delete', 11), ('truncate', 34)) AS e (name, bits)
  WHERE (name <> 'insert' OR m.key <> '' OR m.mode = 'managed')
   AND NOT EXISTS (SELECT FROM own o WHERE o.relation = part AND type & bits = bits
    AND enabled IN ('O', 'A')) HAVING count(*) > 0
  UNION ALL
  SELECT 'hole', format('trigger %s runs after the fence', to_json(tgname)),
    format('ALTER TRIGGER %I ON %s RENAME TO %I;', tgname, part, 'a_' || tgname)
  FROM pg_trigger WHERE tgrelid = part AND NOT tgisinternal AND tgparentid = 0 AND tgtype & 3 = 3 AND tgtype & 20 <> 0
   AND tgenabled <> 'D' AND tgname > 'fence_named' AND tgname <> 'fenced' AND NOT EXISTS (SELECT FROM pg_depend
   JOIN pg_extension e ON e.oid = refobjid WHERE objid = tgfoid AND deptype = 'e' AND extname = 'timescaledb')
  UNION ALL
  SELECT CASE m.mode WHEN 'monotonic' THEN 'hole' ELSE 'notice' END,
    concat('it is bound to no lease: the holder of any lease can write it', why), call || format(', lease => %L);',
    replace(replace(concat((SELECT DISTINCT c.relnamespace::regnamespace || ':' FROM own JOIN pg_class o ON o.oid = own.relation
     WHERE o.relname = c.relname AND o.oid <> c.oid), c.relname), '{', '{{'), '}', '}}') || coalesce((
     SELECT string_agg(format(':{%s}', attname), '' ORDER BY attnum) FROM pg_constraint JOIN pg_attribute
      ON attrelid = conrelid AND attnum = ANY (conkey) WHERE conrelid = c.oid AND contype = 'p'
     HAVING bool_and(is_fit(c.oid, attname) AND attname <> m.a[1] AND attname !~ '[{}]')), ''))
  FROM pg_class c WHERE c.oid = m.top AND part = m.root AND m.key IS NULL AND m.mode <> ''
  UNION ALL
  SELECT 'hole', format('column %s has a default, is not there, or of another type', to_json(n)), NULL FROM unnest(unfit) AS n
 ) AS f (severity, finding, remedy) ORDER BY 1, 2, 3
$$;

DO $$
BEGIN
 EXECUTE (SELECT pg_catalog.string_agg(pg_catalog.format('CREATE OR REPLACE FUNCTION %1$I(%2$s) RETURNS bigint LANGUAGE sql AS ''SELECT '
   'left_out(''''%1$s()'''')''; COMMENT ON FUNCTION %1$I IS ''0A000: only the extension has it (pg_fence_lite)''',
   v.name, v.arguments), '; ') FROM (VALUES
  ('lease_acquire_all', 'names text[], holder text = NULL, ttl interval = ''30 s'', metadata jsonb = NULL, '
   'session bool = false'),
  ('lease_renew_all', 'names text[], token bigint, ttl interval = NULL'), ('lease_release_all', 'names text[], token bigint'),
  ('lease_guard_all', 'names text[], token bigint'), ('lease_evict', 'name text, token bigint'), ('lease_adopt',
   'name text, token bigint, holder text = NULL, wait interval = ''0'', metadata jsonb = NULL'),
  ('lease_forget', 'name text'), ('lease_forget_older', 'than interval'), ('fence_stats_reset', '')) AS v (name, arguments));
 EXECUTE (SELECT pg_catalog.string_agg(pg_catalog.format('COMMENT ON FUNCTION %I IS ''docs/reference/sql.md (pg_fence_lite)''', n), '; ')
 FROM pg_catalog.unnest('{lease_acquire,lease_renew,lease_release,lease_revoke,lease_keep,lease_guard,lease_check,lease_info,lease_prune,'
  'fence_new_epoch,fence_status,fence_grant,fence_revoke,fenced,fence_protect,fence_unprotect,fence_audit}'::pg_catalog.text[]) AS n);
END $$;
SET search_path = fence_lite, pg_catalog, pg_temp;

-- Rights --
CREATE OR REPLACE FUNCTION let(role regrole, doing text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
 PERFORM bad('role', 'role must not be NULL', '22004') WHERE role IS NULL;
 EXECUTE format(doing, 'USAGE', 'SCHEMA fence', role);
 EXECUTE format(doing, 'SELECT', 'fence.leases', role);
 EXECUTE format(doing, 'EXECUTE', (SELECT 'FUNCTION ' || string_agg(call::text, ', ') FROM calls() WHERE is_given), role);
END $$;
CREATE OR REPLACE FUNCTION uninstall() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
 LOCK fence.lease;
 PERFORM refuse('2BP01', 'these tables are fenced: ' || string_agg(DISTINCT relation::text, ', '),
  'Call fence_unprotect for each.') FROM triggers() WHERE parent = 0 HAVING count(*) > 0;
 EXECUTE (SELECT 'DROP FUNCTION ' || string_agg(call::text, ', ') || ' CASCADE' FROM calls());
 DROP SCHEMA fence, fence_lite CASCADE;
END $$;
COMMENT ON FUNCTION uninstall IS 'takes pg_fence_lite away, leases and all';

DO $close$
DECLARE
 definers text[] := '{claim,ensure_advanced,write_trigger}';  -- with the owner's rights, as the granted calls
 closed text[] := '{try_acquire,change,vet,draw,identify,advance,nobody_waits,put_function,renew,sweep}';
BEGIN
 -- Revokes what default privileges have granted to roles (Supabase).
 EXECUTE (SELECT format(replace('REVOKE ALL ON SCHEMA fence, fence_lite!ALL TABLES IN SCHEMA fence!ALL SEQUENCES IN SCHEMA fence!ALL '
   'FUNCTIONS IN SCHEMA fence_lite!FUNCTION %2$s', '!', ' FROM %1$s; REVOKE ALL ON ') || ' FROM %1$s',
   'PUBLIC' || coalesce(string_agg(DISTINCT ', ' || grantee::regrole, ''), ''),
   (SELECT string_agg(call::text, ', ') FROM calls()))
  FROM (SELECT nspowner, nspacl FROM pg_namespace WHERE nspname IN ('fence', 'fence_lite')
    UNION ALL SELECT proowner, proacl FROM pg_proc JOIN calls() ON call = oid
    UNION ALL SELECT relowner, relacl FROM pg_class WHERE relnamespace = 'fence'::regnamespace) AS o (owner, acl)
  CROSS JOIN aclexplode(acl) WHERE grantee NOT IN (0, owner));
 GRANT USAGE ON SCHEMA fence_lite TO PUBLIC;
 GRANT SELECT ON SEQUENCE fence.token_seq TO PUBLIC;
 EXECUTE (SELECT string_agg(format(format('ALTER FUNCTION %%1$s SECURITY %1$s%2$s; %3$s PUBLIC',
   CASE WHEN c.is_given OR p.proname = ANY (definers) THEN 'DEFINER' ELSE 'INVOKER' END,
   CASE WHEN p.prosqlbody IS NULL AND p.proname <> ALL (closed) AND p.proname !~ '^lease_.+_rows?$'
    THEN ' SET search_path = pg_catalog, fence_lite, pg_temp' END,
   CASE WHEN c.is_given OR p.proname = ANY (closed || '{fence_grant,fence_revoke,uninstall}'::text[])
   THEN 'REVOKE ALL ON FUNCTION %1$s FROM' ELSE 'GRANT EXECUTE ON FUNCTION %1$s TO' END), p.oid::regprocedure), '; ')
  FROM pg_proc p LEFT JOIN calls() AS c ON c.call = p.oid
  WHERE c.call IS NOT NULL OR p.pronamespace = 'fence_lite'::regnamespace AND p.proname !~ '^fenced_');
 PERFORM let(g::regrole, 'GRANT %s ON %s TO %s') FROM string_to_table(current_setting('fence_lite.given'), ',') AS g;
 PERFORM put_function(function, trigger_body(relation, arguments)) FROM triggers() WHERE parent = 0 AND arguments IS NOT NULL;
 PERFORM sweep('^fenced_'), ensure_advanced();
END $close$;
-- Last: it blocks advance.
COMMENT ON TABLE fence.turn IS 'locked by who waits';

RESET check_function_bodies;
RESET quote_all_identifiers;
DO $$ BEGIN PERFORM set_config('search_path', current_setting('fence_lite.path'), false); END $$;
