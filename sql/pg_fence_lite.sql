-- pg_fence_lite: the calls of pg_fence in SQL and PL/pgSQL, for servers where no library can be installed.
--
--   psql -1 -f pg_fence_lite.sql       as the owner of the database; again for a newer version
--   SELECT fence.uninstall();          takes all of it away
--
-- It needs PostgreSQL 15 or newer and a role with CREATE on the database and on the first schema of its search_path,
-- where the calls go; no superuser. It has no psql commands, so any migration tool runs it, and pg_tle.
--
-- How it works. fence.lease has a row for each lease. Three advisory locks exclude each other:
--   acquire   tries the exclusive lock of the lease's name, keeps it until its transaction ends, and looks again
--   guard     takes the same lock shared: while its transaction is open, nobody else can be granted the lease
--   wait      a second lock of the name is the queue: its owner alone looks, and a try that finds it taken gives up
--   adopt     waits for the exclusive lock, so that who would guard the older grant waits behind it
-- Renew, release and revoke go by the row's own lock. Time is clock_timestamp(), read after the lock.
-- A new grant deletes the row and inserts another: so a transaction at REPEATABLE READ that locks the row FOR KEY SHARE
-- gets 40001 for a newer grant, and for a mere renewal not.
-- Tokens come from fence.token_seq. Each start of the server, and each copy of the database, moves it on to the clock.
--
-- What is weaker than in the extension (docs/reference/lite.md has all of it, and the tests that show it):
--   any role can take advisory locks, and so hold up an acquire or a guard. A stale write never lands by that
--   the owner of the schema fence can write the state: let applications use other roles
--   the caller is the role of SET ROLE, else the session's: not the owner of a SECURITY DEFINER function in between
--   a waiter looks up to 20 times a second, and its snapshot holds back vacuum while it waits
--   DISCARD ALL gives back a guard that was taken while a statement was planned (behind any other it is refused)
--   who has used a lease holds up VACUUM FULL, CLUSTER and REINDEX of fence.lease until its transaction ends
--   a data-only restore over the live state looks like no restore: call fence_new_epoch() after it
--   tokens move on by the clock alone after a crash: a clock set back by hand across a crash can repeat tokens
--   a trigger made by hand cannot tell whether the statement names the fence column: use fence_protect
--   fence_audit finds less, and fence_protect and fence_grant say less of what they did
--   no shared leases, slots, session leases, several at once, verify, counters, refusals: 0A000
--
-- The one schema name that bodies rely on is fence, whose owner alone can rename it.

-- Operators and functions of others, where they may create such, must not get into these. So names are looked up in
-- pg_catalog alone, but while the calls are created: in those no expression is read until they run.
DO $home$
BEGIN
    PERFORM pg_catalog.set_config('pg_fence.path', pg_catalog.current_setting('search_path'), false),
            pg_catalog.set_config('pg_fence.home', pg_catalog.quote_ident(pg_catalog.current_schema()::pg_catalog.text), false);
END
$home$;
SET search_path = pg_catalog, pg_temp;

DO $install$
DECLARE
    call regprocedure;
BEGIN
    IF current_setting('server_version_num')::integer < 150000 THEN
        RAISE EXCEPTION USING ERRCODE = '0A000', MESSAGE = 'pg_fence_lite needs PostgreSQL 15 or newer';
    ELSIF EXISTS (SELECT FROM pg_catalog.pg_extension e WHERE e.extname = 'pg_fence') THEN
        RAISE EXCEPTION USING ERRCODE = '42710', MESSAGE = 'the extension pg_fence is installed here already',
            HINT = 'It has all that pg_fence_lite has. Nothing was changed.';
    ELSIF EXISTS (SELECT FROM pg_catalog.pg_proc p WHERE p.pronamespace = to_regnamespace(current_setting('pg_fence.home'))
               AND p.proname ~ ('^(fenced|fence_(protect|unprotect|audit|grant|revoke|status|new_epoch|stats_reset)|'
                   'lease_(acquire|renew|release|guard|check|info|revoke|prune|adopt|forget))')
               AND p.proowner <> to_regrole(quote_ident(current_user))) THEN
        -- CREATE OR REPLACE would leave it to its owner, who could change it.
        RAISE EXCEPTION USING ERRCODE = '42723', MESSAGE = 'there is a function of somebody else''s with the name of one of these calls',
            HINT = 'Drop it, or install into another schema: SET search_path.';
    ELSIF to_regnamespace('fence') IS NULL THEN
        CREATE SCHEMA fence;
        COMMENT ON SCHEMA fence IS 'pg_fence_lite: state of leases and tokens; read fence.leases, write nothing here';
    ELSIF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = 'fence'
               AND n.nspowner = to_regrole(quote_ident(current_user))
               AND starts_with(obj_description(n.oid, 'pg_namespace'), 'pg_fence_lite')) THEN
        RAISE EXCEPTION USING ERRCODE = '42P06', MESSAGE = 'there is a schema fence that is not pg_fence_lite''s',
            HINT = 'Rename or drop it, or install as its owner.';
    END IF;
    -- What an older file made and this one does not, stays without a comment, and is dropped in the end.
    FOR call IN SELECT p.oid FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'fence'::regnamespace LOOP
        EXECUTE format('COMMENT ON FUNCTION %s IS NULL', call);
    END LOOP;
END
$install$;


-- State -------------------------------------------------------------------------------------------------------------
-- The names and columns are those of the extension, so that moving up keeps them. Two columns are lite's own.

CREATE SEQUENCE IF NOT EXISTS fence.token_seq AS bigint INCREMENT 1 MINVALUE 1 START 1 CACHE 1 NO CYCLE;
CREATE SEQUENCE IF NOT EXISTS fence.database_identity_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
CREATE SEQUENCE IF NOT EXISTS fence.jump_token_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
CREATE SEQUENCE IF NOT EXISTS fence.jump_count_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
CREATE UNLOGGED SEQUENCE IF NOT EXISTS fence.server_start_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
CREATE UNLOGGED SEQUENCE IF NOT EXISTS fence.server_start_token_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
CREATE UNLOGGED SEQUENCE IF NOT EXISTS fence.verdict_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.token_seq IS 'every fencing token; must stay logged, CACHE 1, NO CYCLE and ascending';
COMMENT ON SEQUENCE fence.database_identity_seq IS 'mark of the database: another one means that this is a copy';
COMMENT ON SEQUENCE fence.jump_token_seq IS 'where the latest jump went to: a token up to it speaks once its holder has renewed';
COMMENT ON SEQUENCE fence.jump_count_seq IS 'how often the tokens jumped: for a copy of the database, or by fence_new_epoch()';
COMMENT ON SEQUENCE fence.server_start_seq IS 'mark of the latest start; must stay unlogged, so that any recovery empties it';
COMMENT ON SEQUENCE fence.server_start_token_seq IS 'where that start moved the tokens on to: below it they are older ones';
COMMENT ON SEQUENCE fence.verdict_seq IS 'its currval is what a session remembers of its latest verdict; the value means nothing';

CREATE UNLOGGED SEQUENCE IF NOT EXISTS fence.sweep_seq AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.sweep_seq IS 'how often rows were deleted, or adopted: what a session remembers from before counts no more';

CREATE TABLE IF NOT EXISTS fence.lease (
    name        text COLLATE "C" PRIMARY KEY,
    holder      text,
    session_label text NOT NULL,
    role        name NOT NULL,
    first_token bigint NOT NULL,
    renewal_tokens bigint[] NOT NULL DEFAULT '{}',
    closing_token bigint,
    acquired_at timestamptz NOT NULL,
    renewed_at  timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    ended_at    timestamptz,
    ttl_us      bigint NOT NULL,
    renewals    bigint NOT NULL DEFAULT 0,
    metadata    jsonb,
    adopted_floor bigint,
    granted_in  xid8,
    closed_in   xid8
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE fence.lease IS 'the latest grant of each lease; read fence.leases, write nothing here';
COMMENT ON COLUMN fence.lease.name IS 'the lease';
COMMENT ON COLUMN fence.lease.holder IS 'as it named itself';
COMMENT ON COLUMN fence.lease.session_label IS 'application_name and process id';
COMMENT ON COLUMN fence.lease.role IS 'by name: oids mean other roles elsewhere';
COMMENT ON COLUMN fence.lease.first_token IS 'of the grant';
COMMENT ON COLUMN fence.lease.renewal_tokens IS 'of the latest 16 renewals';
COMMENT ON COLUMN fence.lease.closing_token IS 'NULL while the grant is current';
COMMENT ON COLUMN fence.lease.acquired_at IS 'when it was granted';
COMMENT ON COLUMN fence.lease.renewed_at IS 'or granted, or adopted';
COMMENT ON COLUMN fence.lease.expires_at IS 'the deadline';
COMMENT ON COLUMN fence.lease.ended_at IS 'released or revoked';
COMMENT ON COLUMN fence.lease.ttl_us IS 'the ttl in microseconds';
COMMENT ON COLUMN fence.lease.renewals IS 'how many';
COMMENT ON COLUMN fence.lease.metadata IS 'the caller''s';
COMMENT ON COLUMN fence.lease.adopted_floor IS 'of an adopted lease: the latest jump at that time';
COMMENT ON COLUMN fence.lease.granted_in IS 'transaction, which cannot rely on the grant at REPEATABLE READ';
COMMENT ON COLUMN fence.lease.closed_in IS 'transaction, for the rest of which the closing token speaks';
COMMENT ON INDEX fence.lease_pkey IS 'finds a lease';

CREATE TABLE IF NOT EXISTS fence.role_prefix (
    role   name NOT NULL,
    prefix text COLLATE "C" NOT NULL,
    level  text COLLATE "C" NOT NULL CHECK (level IN ('monitor', 'worker', 'adopter', 'admin')),
    PRIMARY KEY (role, prefix)
);
COMMENT ON TABLE fence.role_prefix IS 'which leases a role may see and take; written by fence_grant and fence_revoke';
COMMENT ON COLUMN fence.role_prefix.role IS 'by name';
COMMENT ON COLUMN fence.role_prefix.prefix IS 'what names begin with; empty for all';
COMMENT ON COLUMN fence.role_prefix.level IS 'monitor, worker, adopter or admin';
COMMENT ON INDEX fence.role_prefix_pkey IS 'one level for each prefix of a role';


-- Who calls, and how a refusal is raised ------------------------------------------------------------------------------

-- A function with RETURN means the operators that it was made with, whatever search_path its caller has, and becomes a part of
-- the expression that calls it. In PL/pgSQL without a search_path of its own, variables have types of pg_catalog by name: what a
-- session has compiled with a type of its caller's stays, and would run the CHECK of his domain with the owner's rights.

-- Inside SECURITY DEFINER current_user is the owner of pg_fence_lite, so the caller is told from the session.
CREATE OR REPLACE FUNCTION fence.caller() RETURNS name LANGUAGE sql STABLE
    RETURN CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role')::name END;
COMMENT ON FUNCTION fence.caller IS 'the role that calls: that of SET ROLE, else that of the session';

CREATE OR REPLACE FUNCTION fence.acts_for(role name) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM pg_roles c LEFT JOIN pg_roles r ON r.rolname = acts_for.role
                    WHERE c.rolname = fence.caller() AND (c.rolsuper OR r.oid IS NOT NULL AND (pg_has_role(c.oid, r.oid, 'USAGE')
                       OR pg_has_role(c.oid, r.oid,
                              CASE WHEN current_setting('server_version_num') < '160000' THEN 'MEMBER' ELSE 'SET' END))))
$$;
COMMENT ON FUNCTION fence.acts_for IS 'may the caller use the grants of this role, as a member of it or a superuser?';

CREATE OR REPLACE FUNCTION fence.rank(level text) RETURNS integer LANGUAGE sql IMMUTABLE
    RETURN array_position('{monitor,worker,adopter,admin}', level);
COMMENT ON FUNCTION fence.rank IS 'the levels of fence_grant in their order; NULL for another word';

CREATE OR REPLACE FUNCTION fence.may_name(lease text, least_rank integer DEFAULT 1) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF pg_has_role(fence.caller(), current_user, 'USAGE') THEN
        RETURN true;
    END IF;
    -- What is recorded counts for a role that was itself given fence.leases: one made later under the same name was not.
    PERFORM FROM fence.role_prefix p
       JOIN aclexplode((SELECT c.relacl FROM pg_class c WHERE c.oid = 'fence.leases'::regclass)) AS a
         ON a.grantee <> 0 AND pg_get_userbyid(a.grantee) = p.role
      WHERE starts_with(lease, p.prefix) AND fence.rank(p.level) >= least_rank AND pg_has_role(fence.caller(), a.grantee, 'USAGE');
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION fence.may_name IS
    'may the caller use this lease at that level: see it, take it, adopt it? Prefixes are compared byte by byte';

CREATE OR REPLACE FUNCTION fence.may_be_told(lease text) RETURNS boolean LANGUAGE sql STABLE
    RETURN has_table_privilege(fence.caller(), 'fence.leases', 'SELECT') AND fence.may_name(lease);
COMMENT ON FUNCTION fence.may_be_told IS 'may an error tell the caller of this lease?';

CREATE OR REPLACE FUNCTION fence.quoted(text) RETURNS text LANGUAGE sql IMMUTABLE
    RETURN '"' || replace(replace(replace($1, E'\n', '\n'), E'\r', '\r'), E'\t', '\t') || '"';
COMMENT ON FUNCTION fence.quoted IS 'a name as a message shows it: in quotes, on one line';

CREATE OR REPLACE FUNCTION fence.cut(text, most integer DEFAULT 256) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN octet_length(convert_to(to_json($1)::text, 'UTF8')) - 2 <= most THEN $1
                ELSE (SELECT left($1, max(n)) || '...' FROM generate_series(0, most) AS n
                       WHERE octet_length(convert_to(to_json(left($1, n))::text, 'UTF8')) + 1 <= most) END
$$;
COMMENT ON FUNCTION fence.cut IS 'as much of a text as DETAIL shows: what JSON writes in so many bytes';

CREATE OR REPLACE FUNCTION fence.refuse(code text, message text, hint text, detail jsonb DEFAULT '{}') RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF jsonb_strip_nulls(detail) = '{}' THEN
        RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint;
    END IF;
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint, DETAIL = jsonb_strip_nulls(detail);
END
$$;
COMMENT ON FUNCTION fence.refuse IS 'raises an error with DETAIL in JSON';

CREATE OR REPLACE FUNCTION fence.bad_argument(argument text, message text, hint text, code text DEFAULT '22023') RETURNS void
LANGUAGE sql AS $$
    SELECT fence.refuse(code, message, hint, jsonb_build_object('argument', argument))
$$;
COMMENT ON FUNCTION fence.bad_argument IS 'refuses an argument';

CREATE OR REPLACE FUNCTION fence.left_out(what text) RETURNS void LANGUAGE sql AS $$
    SELECT fence.refuse('0A000', what || ' is not in pg_fence_lite',
        'The extension pg_fence has it: CREATE EXTENSION pg_fence, where its library can be installed, keeps the leases of pg_fence_lite.')
$$;
COMMENT ON FUNCTION fence.left_out IS 'refuses what only the extension has (0A000)';

CREATE OR REPLACE FUNCTION fence.microseconds(span interval) RETURNS numeric LANGUAGE sql IMMUTABLE
    RETURN (extract(epoch FROM span) - extract(year FROM span) * 453600) * 1000000;
COMMENT ON FUNCTION fence.microseconds IS 'an interval in microseconds; a month counts as 30 days';

-- `writes` is the call, where it is one that writes.
CREATE OR REPLACE FUNCTION fence.check(writes text, name text, token bigint DEFAULT 1, ttl interval DEFAULT NULL,
    wait interval DEFAULT NULL, holder text DEFAULT NULL, metadata jsonb DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF name IS NULL THEN
        PERFORM fence.bad_argument('name', 'name must not be NULL', 'Pass a value.', '22004');
    ELSIF octet_length(name) NOT BETWEEN 1 AND 512 THEN
        PERFORM fence.bad_argument('name', 'the name of a lease is 1 to 512 bytes long',
            'Name what only one may do at a time, as ''invoice-run'' or ''order:7''; for a longer name, use a hash of it.');
    ELSIF token IS NULL THEN
        PERFORM fence.bad_argument('token', 'token must not be NULL', 'NULL often means that '
            || CASE writes WHEN 'lease_adopt' THEN 'the other lock service has not granted the lease: adopt only what it grants.'
               ELSE 'lease_acquire, lease_renew or lease_release found the lease taken or lost: stop working.' END, '22004');
    ELSIF token < 1 THEN
        PERFORM fence.bad_argument('token', 'a fencing token is at least 1', 'Pass what lease_acquire or lease_renew returned.');
    ELSIF ttl <= '0' OR ttl > '366 days' THEN
        PERFORM fence.bad_argument('ttl', 'ttl must be positive and at most 366 days', 'Three to ten times the heartbeat is usual.');
    ELSIF wait < '0' OR wait >= '290000 years' THEN
        PERFORM fence.bad_argument('wait', 'wait must be finite and not negative', 'Zero tries once; ''10 s'' waits in line.');
    ELSIF octet_length(holder) > 512 THEN
        PERFORM fence.bad_argument('holder', 'a holder is at most 512 bytes long', 'Name the worker, as ''invoices@host7''.');
    ELSIF octet_length(metadata::text) > 65536 THEN
        PERFORM fence.bad_argument('metadata', 'metadata is at most 64 kB', 'Keep the work''s data in a table of its own.');
    ELSIF writes <> '' AND current_setting('transaction_read_only') = 'on' THEN
        RAISE EXCEPTION USING ERRCODE = '25006', MESSAGE = format('cannot execute %s() %s', writes,
            CASE WHEN pg_is_in_recovery() THEN 'during recovery' ELSE 'in a read-only transaction' END);
    END IF;
END
$$;
COMMENT ON FUNCTION fence.check IS 'refuses bad arguments, and a call that writes where nothing can be written';

CREATE OR REPLACE FUNCTION fence.keeps_snapshot() RETURNS boolean LANGUAGE sql STABLE
    RETURN current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
COMMENT ON FUNCTION fence.keeps_snapshot IS 'is this transaction at REPEATABLE READ or above?';

CREATE OR REPLACE FUNCTION fence.lock_key(lease text, kind bigint DEFAULT 1) RETURNS bigint LANGUAGE sql IMMUTABLE
    RETURN hashtextextended(lease, 7382 + kind);
COMMENT ON FUNCTION fence.lock_key IS 'the advisory lock of a leases name; kind 2 is the queue of those who wait';


-- Tokens --------------------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION fence.floor() RETURNS bigint LANGUAGE sql VOLATILE
    RETURN coalesce(pg_sequence_last_value('fence.jump_token_seq'), 0);
COMMENT ON FUNCTION fence.floor IS 'where the latest jump went to';

-- A hash as a value of a sequence is at least 1. The path of the file has the oid of the database in it, and changes with
-- each ALTER SEQUENCE. With the oids of both sequences, marks that a dump has loaded are not taken for this database's own;
-- with the latest jump, a jump that was loaded over a later one is noticed.
CREATE OR REPLACE FUNCTION fence.start_mark(floor bigint) RETURNS bigint LANGUAGE sql VOLATILE
    RETURN greatest(1, 9223372036854775807 & hashtextextended(pg_relation_filepath('fence.token_seq'::regclass)
        || ' ' || 'fence.server_start_seq'::regclass::oid || ' ' || 'fence.token_seq'::regclass::oid
        || ' ' || floor || ' ' || extract(epoch FROM pg_postmaster_start_time()), 0));
COMMENT ON FUNCTION fence.start_mark IS 'this start of the server, in this database, with this sequence';

CREATE OR REPLACE FUNCTION fence.identity(floor bigint, OUT timeline integer, OUT system_identifier bigint, OUT mark bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    BEGIN
        SELECT s.system_identifier INTO system_identifier FROM pg_control_system() AS s;
    EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
        system_identifier := 0;
    END;
    BEGIN
        IF pg_is_in_recovery() THEN
            SELECT c.timeline_id INTO timeline FROM pg_control_checkpoint() AS c;
        ELSE
            timeline := ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer;
        END IF;
    EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
        timeline := 0;
    END;
    mark := greatest(1, 9223372036854775807 & hashtextextended(concat_ws(' ', timeline, system_identifier,
        (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()), 'fence.token_seq'::regclass::oid, floor), 0));
END
$$;
COMMENT ON FUNCTION fence.identity IS
    'what tells this database from a copy of it. Where a platform does not let an ordinary role ask, 0 stands for it';

CREATE OR REPLACE FUNCTION fence.has_begun() RETURNS boolean LANGUAGE sql VOLATILE
    RETURN coalesce(pg_sequence_last_value('fence.server_start_seq') = fence.start_mark(fence.floor())
       AND pg_sequence_last_value('fence.token_seq') >= pg_sequence_last_value('fence.server_start_token_seq'), false);
COMMENT ON FUNCTION fence.has_begun IS 'has this life begun, and has nobody altered the sequence since? That is all that a draw asks';

CREATE OR REPLACE FUNCTION fence.is_copy() RETURNS boolean LANGUAGE sql VOLATILE AS $$
    SELECT pg_sequence_last_value('fence.database_identity_seq') IS DISTINCT FROM i.mark
        OR coalesce(pg_sequence_last_value('fence.token_seq') < pg_sequence_last_value('fence.server_start_token_seq'), false)
      FROM fence.identity(fence.floor()) AS i
$$;
COMMENT ON FUNCTION fence.is_copy IS
    'is this another database than the one that drew last, or an older one? Then no earlier token speaks until renewed';

-- What is set of a sequence stays set when a transaction is rolled back; so the lock is given back at once, by an error that
-- is caught here.
CREATE OR REPLACE FUNCTION fence.move_on(jumps boolean, above bigint DEFAULT 0) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    stride CONSTANT bigint := 1048576;
    zero CONSTANT pg_catalog.timestamptz := '2026-01-01 00:00:00+00';
    fault pg_catalog.text;
    jump boolean;
    floor bigint;
    last bigint;
    by_clock bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(fence.lock_key('', 3));
    IF fence.has_begun() AND NOT jumps THEN
        RAISE SQLSTATE 'PF999';
    END IF;
    SELECT CASE WHEN c.relpersistence <> 'p' THEN 'is not logged' WHEN s.seqincrement < 1 THEN 'does not ascend'
                WHEN s.seqcache <> 1 THEN 'has a CACHE above 1' WHEN s.seqcycle THEN 'may CYCLE' END INTO fault
      FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid WHERE s.seqrelid = 'fence.token_seq'::regclass;
    IF fault IS NOT NULL THEN
        PERFORM fence.refuse('55000', format('fence.token_seq %s, so its values are no fencing tokens', fault),
            'Mend it: ALTER SEQUENCE fence.token_seq INCREMENT 1 CACHE 1 NO CYCLE; and ALTER SEQUENCE fence.token_seq '
            'SET LOGGED where it is unlogged. Commit that first.');
    END IF;
    floor := fence.floor();
    jump := jumps OR fence.is_copy();
    last := greatest(pg_sequence_last_value('fence.token_seq'), pg_sequence_last_value('fence.server_start_token_seq'), above, 0);
    by_clock := floor(extract(epoch FROM clock_timestamp() - zero) * stride);
    -- Two moves within a second would take the sequence ahead of the clock, and a copy made between them behind it.
    IF last + stride - by_clock BETWEEN 1 AND 2 * stride THEN
        PERFORM pg_sleep((last + stride - by_clock)::float8 * 0.00000095367431640625 + 0.000001);  -- of 1048576 in a second
        by_clock := floor(extract(epoch FROM clock_timestamp() - zero) * stride);
    END IF;
    last := setval('fence.token_seq', greatest(last + stride, by_clock));
    IF jump THEN
        floor := last;
        PERFORM setval('fence.jump_token_seq', floor),
                setval('fence.jump_count_seq', coalesce(pg_sequence_last_value('fence.jump_count_seq'), 0) + 1);
    END IF;
    -- Marks of the jump that was looked at: what a restore may have loaded over it meanwhile is noticed.
    PERFORM setval('fence.database_identity_seq', i.mark) FROM fence.identity(floor) AS i;
    PERFORM setval('fence.server_start_token_seq', last);
    -- On disk before anything is drawn; older servers have no call for it, and rely on the clock.
    IF current_setting('server_version_num')::integer >= 170000 THEN
        EXECUTE 'SELECT pg_logical_emit_message(false, ''pg_fence_lite'', '''', true)';
    END IF;
    -- The mark of the start comes last, for with it the rest is believed.
    PERFORM setval('fence.server_start_seq', fence.start_mark(floor));
    RAISE SQLSTATE 'PF999';
EXCEPTION WHEN SQLSTATE 'PF999' THEN
    NULL;
END
$$;
COMMENT ON FUNCTION fence.move_on IS 'moves the sequence on to the greater of its last value + 2^20 and the clock';

CREATE OR REPLACE FUNCTION fence.settle() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT fence.has_begun() THEN
        PERFORM fence.move_on(false);
    END IF;
END
$$;
COMMENT ON FUNCTION fence.settle IS 'has the sequence moved on after a start; also for the trigger, which cannot write it';

CREATE OR REPLACE FUNCTION fence.draw(above bigint) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    IF NOT fence.has_begun() THEN
        PERFORM fence.move_on(false);
    END IF;
    IF pg_sequence_last_value('fence.token_seq') < above THEN
        PERFORM fence.move_on(true, above);  -- somebody has set it back
    END IF;
    RETURN nextval('fence.token_seq');
END
$$;
COMMENT ON FUNCTION fence.draw IS 'the next token, for who has the lease''s lock; `above` is the greatest that the lease has had';


-- Leases --------------------------------------------------------------------------------------------------------------

-- The tokens by which this transaction guards leases, {"name": token}, in a setting, which goes with a savepoint as its
-- locks do. It is no proof, for anybody may set it: what it shows is judged like any other token.
CREATE OR REPLACE FUNCTION fence.noted(lease text) RETURNS bigint LANGUAGE sql STABLE
    RETURN (nullif(current_setting('pg_fence.guards', true), '')::jsonb ->> lease)::bigint;
COMMENT ON FUNCTION fence.noted IS 'the token by which this transaction guards a lease, as the setting says: no proof';

CREATE OR REPLACE FUNCTION fence.latest(first_token bigint, renewal_tokens bigint[]) RETURNS bigint LANGUAGE sql IMMUTABLE
    RETURN coalesce(renewal_tokens[cardinality(renewal_tokens)], first_token);
COMMENT ON FUNCTION fence.latest IS 'the latest token of a grant, but for the one that closed it';

CREATE OR REPLACE FUNCTION fence.outlived_jump(adopted_floor bigint, latest bigint) RETURNS boolean LANGUAGE sql VOLATILE
    RETURN CASE WHEN adopted_floor IS NULL THEN latest > fence.floor() ELSE adopted_floor = fence.floor() END;
COMMENT ON FUNCTION fence.outlived_jump IS 'was a grant made, renewed or adopted since the latest jump?';

CREATE OR REPLACE FUNCTION fence.check_given(name text, least_rank integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    prefixes pg_catalog.text;
BEGIN
    IF fence.may_name(name, least_rank) THEN
        RETURN;
    END IF;
    SELECT array_to_string((array_agg(fence.quoted(p.prefix) ORDER BY p.prefix))[:10]
               || CASE WHEN count(*) > 10 THEN ARRAY[count(*) - 10 || ' more'] END, ' or ') INTO prefixes FROM fence.role_prefix p
     WHERE fence.rank(p.level) >= least_rank AND pg_has_role(fence.caller(), to_regrole(quote_ident(p.role)), 'USAGE');
    PERFORM fence.refuse('42501', format('lease %s is not for this role', fence.quoted(name)),
        format(CASE WHEN prefixes IS NULL THEN 'Role "%s" may take no lease yet: an administrator gives it names by fence_grant.'
                    ELSE 'Role "%s" may take names that begin with %s.' END, fence.caller(), prefixes),
        jsonb_build_object('lease', fence.cut(name), 'role', fence.caller()));
END
$$;
COMMENT ON FUNCTION fence.check_given IS '42501 where no prefix lets the caller take this lease (2), or adopt it (3)';

CREATE OR REPLACE FUNCTION fence.refuse_kind(lease text, is_adopted boolean) RETURNS void LANGUAGE sql AS $$
    SELECT fence.refuse('55000',
        format(CASE WHEN is_adopted THEN 'lease %s is granted by somebody else, and adopted here'
                    ELSE 'lease %s is granted here, and cannot be adopted' END, fence.quoted(lease)),
        CASE WHEN is_adopted THEN 'Adopt the number that its own service grants. For leases of this database take another name.'
             ELSE 'Take another name for leases that somebody else grants. (lease_prune deletes what is long over.)' END,
        jsonb_build_object('lease', fence.cut(lease)))
$$;
COMMENT ON FUNCTION fence.refuse_kind IS 'refuses a call for a lease that is granted here, or that somebody else grants (55000)';

CREATE OR REPLACE FUNCTION fence.put(lease text, holder text, token bigint, ttl_us bigint, metadata jsonb, adopted_floor bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    time CONSTANT pg_catalog.timestamptz := clock_timestamp();
BEGIN
    INSERT INTO fence.lease (name, holder, session_label, role, first_token, acquired_at, renewed_at, expires_at, ttl_us,
                             metadata, adopted_floor, granted_in)
    VALUES (lease, holder, coalesce(nullif(current_setting('application_name'), ''), 'session') || '[' || pg_backend_pid() || ']',
            fence.caller(), token, time, time, CASE WHEN adopted_floor IS NULL THEN time + ttl_us * interval '1 us' ELSE 'infinity' END,
            ttl_us, metadata, adopted_floor, pg_current_xact_id());
    IF fence.keeps_snapshot() THEN
        RAISE WARNING USING ERRCODE = '01000',
            MESSAGE = format('this transaction''s reads may be older than its grant of lease %s', fence.quoted(lease)),
            DETAIL = jsonb_build_object('lease', fence.cut(lease)),
            HINT = 'At REPEATABLE READ and above it can neither guard this grant nor write what is bound to the lease: '
                'commit first, then begin the transaction that works under it.';
    END IF;
    RETURN token;
END
$$;
COMMENT ON FUNCTION fence.put IS 'writes the row of a new grant, whose lock the caller has, and whose old row is gone';

CREATE OR REPLACE FUNCTION fence.attempt(
    lease text, holder text, ttl interval, metadata jsonb, reclaim boolean, is_head boolean) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    old fence.lease;
    is_held boolean;
    is_mine boolean;  -- to be reclaimed
BEGIN
    -- A try that loses mostly loses here, and has written nothing and locked nothing.
    SELECT l.* INTO old FROM fence.lease l WHERE l.name = attempt.lease;
    is_held := coalesce(old.closing_token IS NULL AND old.expires_at > clock_timestamp(), false);
    is_mine := is_held AND reclaim AND coalesce(old.holder = attempt.holder AND old.role = fence.caller(), false);
    IF old.adopted_floor IS NOT NULL THEN
        PERFORM fence.refuse_kind(lease, true);
    ELSIF is_held AND NOT is_mine THEN
        IF is_head AND fence.keeps_snapshot() THEN
            PERFORM fence.check_snapshot(lease);  -- which shows the same for ever
        END IF;
        RETURN NULL;
    END IF;
    -- The lock, if it is taken in vain, goes with the block that an error ends.
    BEGIN
        IF NOT (is_head OR is_mine OR fence.nobody_waits(lease)) OR NOT pg_try_advisory_xact_lock(fence.lock_key(lease)) THEN
            RETURN NULL;
        END IF;
        SELECT l.* INTO old FROM fence.lease l WHERE l.name = attempt.lease;
        IF FOUND AND old.closing_token IS NULL THEN
            -- Its holder may be about to renew it: then it is taken. So it is where this very transaction relies on it.
            SELECT l.* INTO old FROM fence.lease l WHERE l.name = attempt.lease FOR UPDATE SKIP LOCKED;
            IF NOT FOUND OR old.first_token = fence.noted(lease) OR fence.noted(lease) = ANY (old.renewal_tokens)
               OR old.closing_token IS NULL AND old.expires_at > clock_timestamp()
                  AND NOT coalesce(reclaim AND old.holder = attempt.holder AND old.role = fence.caller(), false) THEN
                RAISE SQLSTATE 'PF999';
            END IF;
        END IF;
    EXCEPTION WHEN SQLSTATE 'PF999' THEN
        RETURN NULL;
    END;
    IF old.adopted_floor IS NOT NULL THEN
        PERFORM fence.refuse_kind(lease, true);
    ELSIF old.name IS NOT NULL THEN
        DELETE FROM fence.lease l WHERE l.name = attempt.lease;
    ELSIF fence.keeps_snapshot() THEN
        PERFORM fence.check_snapshot(lease);
    END IF;
    RETURN fence.put(lease, holder, fence.draw(greatest(fence.latest(old.first_token, old.renewal_tokens), old.closing_token, 0)),
                     fence.microseconds(ttl)::bigint, metadata, NULL);
END
$$;
COMMENT ON FUNCTION fence.attempt IS
    'one try. It blocks nowhere: what somebody else has locked is taken. `is_head` is for who owns the queue''s lock';

-- Taken and given back at once; nothing can come between the two.
CREATE OR REPLACE FUNCTION fence.nobody_waits(lease text) RETURNS boolean LANGUAGE sql AS $$
    SELECT CASE WHEN pg_try_advisory_lock_shared(fence.lock_key(lease, 2)) THEN pg_advisory_unlock_shared(fence.lock_key(lease, 2))
                ELSE false END
$$;
COMMENT ON FUNCTION fence.nobody_waits IS 'does nobody own the lock of the leases queue?';

CREATE OR REPLACE FUNCTION fence.wait_for(key bigint, row_of text, longest_us numeric) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    patience CONSTANT pg_catalog.text := current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', least(nullif(extract(epoch FROM patience::interval) * 1000, 0),
        greatest(ceil(longest_us / 1000), 1), 2147483647)::integer::text, true);
    PERFORM pg_advisory_xact_lock(key);
    IF row_of IS NOT NULL THEN
        PERFORM FROM fence.lease l WHERE l.name = row_of FOR UPDATE;
    END IF;
    PERFORM set_config('lock_timeout', patience, true);
END
$$;
COMMENT ON FUNCTION fence.wait_for IS
    'waits for a lock, and then for that of a lease''s row; raises 55P03 when either takes longer than it may';

-- (Who catches 55P03 has lost a statement_timeout that was due with it.)
CREATE OR REPLACE FUNCTION fence.is_out_of_patience(began timestamptz) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    longest CONSTANT interval := nullif(current_setting('statement_timeout'), '0');
    patience CONSTANT interval := nullif(current_setting('lock_timeout'), '0');
BEGIN
    IF clock_timestamp() - statement_timestamp() >= longest THEN
        RAISE query_canceled USING MESSAGE = 'canceling statement due to statement timeout';
    END IF;
    RETURN coalesce(clock_timestamp() - began >= patience, false);
END
$$;
COMMENT ON FUNCTION fence.is_out_of_patience IS 'is the caller''s lock_timeout over, which counts for a whole call?';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION lease_acquire(
    name text, holder text DEFAULT NULL, ttl interval DEFAULT '30 s', wait interval DEFAULT '0',
    metadata jsonb DEFAULT NULL, shared boolean DEFAULT false, slots integer DEFAULT 1,
    reclaim boolean DEFAULT false, session boolean DEFAULT false)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    longest CONSTANT interval := coalesce(ttl, '30 s');
    again CONSTANT boolean := coalesce(reclaim, false);
    left_us numeric;
    token bigint;
    began timestamptz;
    pause float8 := 0.005;
    is_head boolean := false;
BEGIN
    PERFORM fence.check('lease_acquire', name, 1, longest, wait, holder, metadata);
    IF slots < 1 OR shared AND slots > 1 THEN
        PERFORM fence.bad_argument('slots', 'slots must be at least 1, and shared excludes more', 'shared has no limit; slots has one.');
    ELSIF again AND holder IS NULL THEN
        PERFORM fence.bad_argument('reclaim', 'reclaim needs a holder', 'Only a holder that names itself can be known again.');
    ELSIF shared OR slots > 1 OR session THEN
        PERFORM fence.left_out(CASE WHEN shared THEN 'shared' WHEN slots > 1 THEN 'slots' ELSE 'session' END);
    END IF;
    IF NOT pg_has_role(fence.caller(), current_user, 'USAGE') THEN
        PERFORM fence.check_given(name, 2);
    END IF;
    token := fence.attempt(name, holder, longest, metadata, again, false);
    IF token IS NOT NULL OR coalesce(wait, '0') = '0' THEN
        RETURN token;
    END IF;

    -- In the queue: its lock is had by one waiter at a time, in the order in which they came, and he alone looks.
    began := clock_timestamp();
    BEGIN
        LOOP
            left_us := fence.microseconds(wait) - extract(epoch FROM clock_timestamp() - began) * 1000000;
            IF left_us <= 0 AND is_head THEN
                RAISE SQLSTATE 'PF999';
            ELSIF fence.is_out_of_patience(began) THEN
                RAISE lock_not_available USING MESSAGE = 'canceling statement due to lock timeout';
            ELSIF NOT is_head THEN
                PERFORM fence.wait_for(fence.lock_key(name, 2), NULL, left_us);
                is_head := true;
            ELSE
                PERFORM pg_sleep(least(pause, left_us::float8 * 0.000001));
                pause := least(pause * 1.5, 0.05);
            END IF;
            PERFORM fence.check_given(name, 2);  -- a prefix may be taken away meanwhile
            token := fence.attempt(name, holder, longest, metadata, again, true);
            EXIT WHEN token IS NOT NULL;
        END LOOP;
    EXCEPTION
        WHEN SQLSTATE 'PF999' THEN
            RETURN NULL;
        WHEN lock_not_available THEN
            IF fence.is_out_of_patience(began) THEN
                RAISE;
            END IF;
            RETURN NULL;
    END;
    RETURN token;
END
$$;
COMMENT ON FUNCTION lease_acquire IS 'a fencing token when the lease is granted, NULL when it is taken (and stayed so for wait)';
SET search_path = pg_catalog, pg_temp;

CREATE OR REPLACE FUNCTION fence.not_your_lease(lease text, role name) RETURNS void LANGUAGE sql AS $$
    SELECT fence.refuse('42501', format('lease %s was granted to another role', fence.quoted(lease)),
        'Only the role that acquired a lease, a member of it or a superuser may use its tokens; lease_revoke ends anybody''s.',
        jsonb_build_object('lease', fence.cut(lease), 'role', role))
     WHERE fence.may_be_told(lease)
$$;
COMMENT ON FUNCTION fence.not_your_lease IS 'refuses a grant of another role, where the caller may be told of it';

CREATE OR REPLACE FUNCTION fence.commit_durably() RETURNS void LANGUAGE sql AS $$
    SELECT set_config('synchronous_commit', 'local', true) WHERE current_setting('synchronous_commit') = 'off'
$$;
COMMENT ON FUNCTION fence.commit_durably IS
    'a commit that waits for the disk, whatever the session says: nobody acquires next who would make it durable';

CREATE OR REPLACE FUNCTION fence.change(call text, lease text, token bigint, ttl interval) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    held fence.lease;
    time pg_catalog.timestamptz;
    fresh bigint;
BEGIN
    -- Who is too late locks nothing. Who is not waits for an open transaction that has changed the lease.
    SELECT l.* INTO held FROM fence.lease l WHERE l.name = change.lease
       AND (l.closing_token IS NULL AND l.expires_at > clock_timestamp()
            OR call = 'lease_release' AND l.closed_in = pg_current_xact_id_if_assigned())
       AND (call = 'lease_revoke' OR token IN (l.first_token, l.closing_token) OR token = ANY (l.renewal_tokens))
       FOR NO KEY UPDATE;
    time := clock_timestamp();
    IF held.name IS NULL OR held.closing_token IS NULL AND held.expires_at <= time THEN
        IF call = 'lease_renew' AND fence.may_be_told(lease)
           AND EXISTS (SELECT FROM fence.lease l WHERE l.name = change.lease AND l.adopted_floor IS NOT NULL) THEN
            PERFORM fence.refuse_kind(lease, true);
        END IF;
        RETURN NULL;
    ELSIF call <> 'lease_revoke' AND held.role <> fence.caller() AND NOT fence.acts_for(held.role) THEN
        PERFORM fence.not_your_lease(lease, held.role);
        RETURN NULL;  -- who may not see the lease does not learn that it is a token of it
    ELSIF held.closing_token IS NOT NULL THEN
        RETURN held.closing_token;
    ELSIF held.adopted_floor IS NOT NULL THEN
        IF call = 'lease_renew' THEN
            PERFORM fence.refuse_kind(lease, true);
        END IF;
        fresh := held.first_token;  -- which closes it: nothing is drawn for an adopted lease
        PERFORM fence.commit_durably();
    ELSE
        fresh := fence.draw(fence.latest(held.first_token, held.renewal_tokens));
    END IF;
    IF call = 'lease_renew' THEN
        UPDATE fence.lease l
           SET renewal_tokens = l.renewal_tokens[greatest(cardinality(l.renewal_tokens) - 14, 1):] || fresh,
               renewals = l.renewals + 1, renewed_at = time, ttl_us = coalesce(fence.microseconds(ttl)::bigint, l.ttl_us),
               expires_at = time + coalesce(fence.microseconds(ttl)::bigint, l.ttl_us) * interval '1 us'
         WHERE l.name = change.lease;
    ELSE
        UPDATE fence.lease l SET closing_token = fresh, ended_at = time, closed_in = pg_current_xact_id() WHERE l.name = change.lease;
    END IF;
    RETURN fresh;
END
$$;
COMMENT ON FUNCTION fence.change IS
    'renews or ends the grant that the token is of; NULL where there is none. lease_revoke has no token, and means any';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION lease_renew(name text, token bigint, ttl interval DEFAULT NULL)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fence.check('lease_renew', name, token, ttl);
    RETURN fence.change('lease_renew', name, token, ttl);
END
$$;
COMMENT ON FUNCTION lease_renew IS 'a new, greater token, and a deadline of now + ttl; NULL when the lease was lost: stop';

CREATE OR REPLACE FUNCTION lease_release(name text, token bigint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fence.check('lease_release', name, token);
    RETURN fence.change('lease_release', name, token, NULL);
END
$$;
COMMENT ON FUNCTION lease_release IS 'ends the grant: a closing token, good for a last write in this transaction; NULL when it was lost';

CREATE OR REPLACE FUNCTION lease_revoke(name text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    closing bigint;
BEGIN
    PERFORM fence.check('lease_revoke', name);
    -- Waits for an acquire in an open transaction, and lets none begin until this transaction ends. In vain, it locks nothing.
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(fence.lock_key(name));
        closing := fence.change('lease_revoke', name, NULL, NULL);
        IF closing IS NULL THEN
            RAISE SQLSTATE 'PF999';
        END IF;
    EXCEPTION WHEN SQLSTATE 'PF999' THEN
        NULL;
    END;
    RETURN closing;
END
$$;
COMMENT ON FUNCTION lease_revoke IS 'ends the grant, also that of another role, and returns the closing token; NULL when there was none';
SET search_path = pg_catalog, pg_temp;

-- At REPEATABLE READ and above a plain read shows an old grant. Locking what has changed since is 40001, and a row that is
-- newer than the snapshot shows by its key.
CREATE OR REPLACE FUNCTION fence.check_snapshot(lease text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM fence.lease l WHERE l.name = lease FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND AND NOT EXISTS (SELECT FROM fence.lease l WHERE l.name = lease) THEN
        INSERT INTO fence.lease (name, session_label, role, first_token, acquired_at, renewed_at, expires_at, ttl_us)
        VALUES (lease, '', '', 1, now(), now(), now(), 1);
    END IF;
    RAISE SQLSTATE 'PF999';
EXCEPTION
    WHEN SQLSTATE 'PF999' THEN
        NULL;
    WHEN unique_violation THEN
        RAISE serialization_failure USING MESSAGE = 'could not serialize access due to concurrent update';
END
$$;
COMMENT ON FUNCTION fence.check_snapshot IS '40001 where the row of a lease is another by now than the snapshot shows; keeps no lock';

-- May a transaction rely on this token from now until it ends? NULL when it may, else what to refuse it with. It takes the
-- lock that keeps everybody else from being granted the lease, and only then looks.
CREATE OR REPLACE FUNCTION fence.verdict(lease text, token bigint)
RETURNS jsonb LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    keeps_snapshot CONSTANT boolean := fence.keeps_snapshot();
    guards CONSTANT text := nullif(current_setting('pg_fence.guards', true), '');
    noted CONSTANT bigint := fence.noted(lease);
    key CONSTANT bigint := fence.lock_key(lease);
    held fence.lease;
    is_own boolean;  -- a token of the grant, which is neither closed nor over
    outlived boolean;  -- the latest jump; NULL where it is not the grant's
    sees boolean;
BEGIN
    IF noted IS NULL AND NOT fence.has_begun() THEN
        PERFORM fence.move_on(false);
    END IF;
    -- In a block of its own the lock is the transaction's: else it would go with a cursor that calls this and fails. Of a
    -- verdict that refuses nothing is left.
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(key);
        IF keeps_snapshot THEN
            -- A new grant deletes the row that the snapshot has, so that this is 40001; a renewal does not.
            SELECT l.* INTO held FROM fence.lease l WHERE l.name = verdict.lease FOR KEY SHARE;
            IF NOT FOUND OR held.closing_token IS NULL AND (held.expires_at <= clock_timestamp()
                   OR token <> held.first_token AND token <> ALL (held.renewal_tokens)) THEN
                PERFORM fence.check_snapshot(lease);  -- the token may be a renewal's that it does not know
            END IF;
        ELSE
            SELECT l.* INTO held FROM fence.lease l WHERE l.name = verdict.lease;
        END IF;
        -- A grant that this transaction guards cannot have been replaced, whatever has ended it meanwhile. (Who only pretends
        -- to guard it has the lock now, and the row shows that nobody else was granted the lease before.)
        is_own := (token = held.first_token OR token = ANY (held.renewal_tokens))
                  AND (held.closing_token IS NULL AND held.expires_at > clock_timestamp()
                       OR coalesce(noted = held.first_token OR noted = ANY (held.renewal_tokens), false))
               OR token = held.closing_token AND coalesce(held.closed_in = pg_current_xact_id_if_assigned(), false);
        outlived := CASE WHEN is_own THEN
            fence.outlived_jump(held.adopted_floor, fence.latest(held.first_token, held.renewal_tokens)) END;
        IF NOT coalesce(outlived AND (held.role = fence.caller() OR fence.acts_for(held.role)), false) THEN
            RAISE SQLSTATE 'PF999';
        ELSIF keeps_snapshot AND held.granted_in = pg_current_xact_id_if_assigned() THEN
            RETURN '{"code": "55000"}';
        END IF;
        PERFORM set_config('pg_fence.relied', gen_random_uuid() || ' ' || token || ' ' || lease, true),
                setval('fence.verdict_seq', CASE WHEN held.adopted_floor IS NOT NULL THEN 1
                    ELSE fence.seal(lease, token, pg_sequence_last_value('fence.token_seq')) END),
                -- Of a transaction that guards very many, the latest are noted.
                set_config('pg_fence.guards', (coalesce(CASE WHEN length(guards) < 8000 THEN guards::jsonb END, '{}')
                    || jsonb_build_object(lease, token))::text, true);
        RETURN NULL;
    EXCEPTION
        WHEN SQLSTATE 'PF999' THEN
            NULL;
        WHEN serialization_failure THEN
            RETURN '{"code": "40001"}';
    END;
    sees := fence.may_be_told(lease);
    IF outlived AND sees THEN
        RETURN jsonb_build_object('code', '42501', 'role', held.role);
    END IF;
    RETURN jsonb_strip_nulls(jsonb_build_object('code', 'PF004',
        'renew_first', CASE WHEN NOT outlived AND (sees OR held.role = fence.caller() OR fence.acts_for(held.role)) THEN true END,
        'holder', CASE WHEN sees THEN fence.cut(coalesce(held.holder, held.session_label)) END,
        'expires_at', CASE WHEN sees AND isfinite(held.expires_at)
                           THEN to_char(held.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') END));
END
$$;
COMMENT ON FUNCTION fence.verdict IS 'may a transaction rely on this token from now until it ends?';

-- What fence.verdict was content with is remembered where nobody else can write: in the value that this session has of a
-- sequence. The role, the transaction, the last token drawn and the last sweep are a part of it: while they are the same,
-- nobody was granted anything, and no name was made free for an adoption. A lock that goes with a savepoint takes the setting
-- pg_fence.relied with it. What begins that setting is drawn for each verdict: so nobody can look beforehand for a lease of his
-- own whose hash is that of another's, which half of the bits of a hash would make easy.
CREATE OR REPLACE FUNCTION fence.seal(lease text, token bigint, last bigint) RETURNS bigint LANGUAGE sql VOLATILE
    RETURN 1 + (9223372036854775806 & hashtextextended(encode(sha256(
        replace(concat_ws(' ', left(current_setting('pg_fence.relied', true), 36), last,
                coalesce(pg_sequence_last_value('fence.sweep_seq'), 0), token, octet_length(lease), lease, fence.caller()),
            '\', '\\')::bytea), 'hex'),
        (date_part('epoch', now()) * 1000000)::bigint));
COMMENT ON FUNCTION fence.seal IS 'what is remembered of a verdict, for this role and transaction; `last` is the last token drawn';

CREATE OR REPLACE FUNCTION fence.last_behind_lock(lease text) RETURNS bigint LANGUAGE sql VOLATILE
    RETURN CASE WHEN lease = '' OR pg_try_advisory_xact_lock_shared(fence.lock_key(lease))
                THEN pg_sequence_last_value('fence.token_seq') END;
COMMENT ON FUNCTION fence.last_behind_lock IS 'the last token drawn, read behind the lock of the lease; NULL where that is not free';

CREATE OR REPLACE FUNCTION fence.remembers(lease text, token bigint, last bigint) RETURNS boolean LANGUAGE sql VOLATILE
    RETURN CASE WHEN substr(current_setting('pg_fence.relied', true), 38) = token || ' ' || lease
                THEN currval('fence.verdict_seq') = fence.seal(lease, token, last) END;
COMMENT ON FUNCTION fence.remembers IS 'true where fence.verdict was content with this a moment ago, and still would be';

CREATE OR REPLACE FUNCTION fence.words(verdict jsonb, named text, token bigint, OUT message text, OUT hint text, OUT detail jsonb)
LANGUAGE plpgsql AS $$
DECLARE
    lease CONSTANT pg_catalog.text := coalesce('lease ' || fence.quoted(named), 'the row''s lease');
BEGIN
    detail := verdict - 'code' || jsonb_build_object('lease', fence.cut(named));
    CASE verdict ->> 'code'
    WHEN '40001' THEN
        message := format('could not serialize access to %s due to concurrent changes', lease);
        hint := 'The grant is newer than the transaction''s snapshot: retry the transaction.';
    WHEN '55000' THEN
        message := format('this transaction''s snapshot is older than its grant of %s', lease);
        hint := 'Acquire in a transaction of its own and commit it, then begin this one.';
    WHEN '42501' THEN
        message := format('%s was granted to another role', lease);
        hint := 'Only the role that acquired a lease, a member of it or a superuser may use its tokens.';
    ELSE
        message := format('fencing token%s does not speak for %s', ' ' || token, lease);
        detail := jsonb_build_object('presented', token) || detail;
        hint := CASE WHEN verdict ? 'renew_first' THEN 'The database has failed over, or been restored or copied, since the grant was '
                     'last renewed: call lease_renew with this token, and go on with the one it returns. NULL means: stop.'
                ELSE 'The lease has expired, been released, revoked or taken over, or was never granted with it: stop.' END;
    END CASE;
END
$$;
COMMENT ON FUNCTION fence.words IS 'the words of a verdict; `named` is the lease where the caller may know its name';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION lease_guard(name text, token bigint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    verdict jsonb;
BEGIN
    PERFORM fence.check('lease_guard', name, token);
    verdict := fence.verdict(name, token);
    IF verdict IS NOT NULL THEN
        PERFORM fence.refuse(verdict ->> 'code', w.message, w.hint, w.detail) FROM fence.words(verdict, name, token) AS w;
    END IF;
    PERFORM set_config('pg_fence.token', token::text, true);
    RETURN token;
END
$$;
COMMENT ON FUNCTION lease_guard IS 'the token, or PF004; nobody else can be granted the lease until this transaction ends';

CREATE OR REPLACE FUNCTION lease_check(name text, token bigint)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    held fence.lease;
BEGIN
    PERFORM fence.check('', name, token);
    SELECT l.* INTO held FROM fence.lease l WHERE l.name = lease_check.name;
    IF NOT FOUND OR NOT fence.outlived_jump(held.adopted_floor, fence.latest(held.first_token, held.renewal_tokens))
       OR NOT fence.may_name(name) OR NOT pg_is_in_recovery() AND NOT fence.has_begun() AND fence.is_copy() THEN
        RETURN false;
    ELSIF held.closing_token IS NOT NULL THEN
        RETURN token = held.closing_token AND coalesce(held.closed_in = pg_current_xact_id_if_assigned(), false);
    END IF;
    RETURN (token = held.first_token OR token = ANY (held.renewal_tokens)) AND held.expires_at > clock_timestamp();
END
$$;
COMMENT ON FUNCTION lease_check IS 'does the token speak for the lease at this instant? Takes no lock and promises nothing beyond it';
SET search_path = pg_catalog, pg_temp;

CREATE OR REPLACE FUNCTION fence.adopts(lease text, token bigint, held fence.lease) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    had CONSTANT bigint := greatest(held.first_token, held.closing_token);
BEGIN
    PERFORM fence.check_given(lease, 3);  -- at each look: a prefix may be taken away while its role waits
    IF held.name IS NULL THEN
        RETURN 'greater';
    ELSIF held.adopted_floor IS NULL THEN
        PERFORM fence.refuse_kind(lease, false);
    ELSIF held.closing_token IS NULL AND token = held.first_token THEN
        IF held.role <> fence.caller() AND NOT fence.acts_for(held.role) THEN
            PERFORM fence.not_your_lease(lease, held.role);
        END IF;
        RETURN CASE WHEN held.adopted_floor = fence.floor() THEN 'current' ELSE 'again' END;
    ELSIF token > held.first_token AND token >= had THEN
        RETURN 'greater';
    END IF;
    PERFORM fence.refuse('PF001',
        format(CASE WHEN token < had THEN 'stale fencing token %s: lease %s has had %s'
                    ELSE 'stale fencing token %s: it was released or revoked' END, token, fence.quoted(lease), had),
        'Stop, and do not retry with this token: adopt the number of a new grant. After a mistake: lease_revoke, then lease_forget.',
        jsonb_build_object('lease', fence.cut(lease), 'presented', token, 'stored', had));
END
$$;
COMMENT ON FUNCTION fence.adopts IS
    'what becomes of a number that somebody else has granted: greater than all, current, again (after a jump); else it is refused';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION lease_adopt(
    name text, token bigint, holder text DEFAULT NULL, wait interval DEFAULT '0', metadata jsonb DEFAULT NULL)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    began CONSTANT timestamptz := clock_timestamp();
    relies CONSTANT boolean := fence.noted(name) IS NOT NULL;
    left_us numeric;
    held fence.lease;
    finds text;
BEGIN
    PERFORM fence.check('lease_adopt', name, token, NULL, wait, holder, metadata), fence.settle();
    LOOP
        SELECT l.* INTO held FROM fence.lease l WHERE l.name = lease_adopt.name;
        finds := fence.adopts(name, token, held);
        left_us := fence.microseconds(coalesce(wait, '0')) - extract(epoch FROM clock_timestamp() - began) * 1000000;
        -- What is locked in vain is given back with the block.
        BEGIN
            IF finds = 'current' THEN
                RETURN token;
            ELSIF finds = 'again' THEN
                -- One fellow makes it known, and the others wait for that. Guards are not held up.
                PERFORM pg_advisory_xact_lock(fence.lock_key(name, 2));
                SELECT l.* INTO held FROM fence.lease l WHERE l.name = lease_adopt.name;
                IF fence.adopts(name, token, held) <> 'again' THEN
                    RAISE SQLSTATE 'PF999';
                END IF;
                UPDATE fence.lease l SET adopted_floor = fence.floor(), renewed_at = clock_timestamp() WHERE l.name = lease_adopt.name;
                PERFORM fence.commit_durably();
                RETURN token;
            ELSIF relies THEN
                RAISE lock_not_available;  -- a transaction does not exclude itself
            END IF;
            -- Who would guard the older grant meanwhile waits behind this.
            IF left_us > 0 THEN
                PERFORM fence.wait_for(fence.lock_key(name), name, left_us);
            ELSIF pg_try_advisory_xact_lock(fence.lock_key(name)) THEN
                PERFORM FROM fence.lease l WHERE l.name = lease_adopt.name FOR UPDATE NOWAIT;
            ELSE
                RAISE lock_not_available;
            END IF;
            SELECT l.* INTO held FROM fence.lease l WHERE l.name = lease_adopt.name;
            IF fence.adopts(name, token, held) <> 'greater' THEN
                RAISE SQLSTATE 'PF999';
            ELSIF held.name IS NOT NULL THEN
                DELETE FROM fence.lease l WHERE l.name = lease_adopt.name;
            ELSIF fence.keeps_snapshot() THEN
                PERFORM fence.check_snapshot(name);
            END IF;
            PERFORM fence.put(name, holder, token, 0, metadata, fence.floor()), fence.commit_durably(), nextval('fence.sweep_seq');
            RETURN token;
        EXCEPTION
            WHEN SQLSTATE 'PF999' THEN
                NULL;
            WHEN lock_not_available THEN
                IF fence.is_out_of_patience(began) THEN
                    RAISE;
                END IF;
                -- The older grant is ended all the same: so guards that overlap are over some time.
                SELECT l.* INTO held FROM fence.lease l
                 WHERE l.name = lease_adopt.name AND (l.closing_token IS NULL OR l.closing_token < token) FOR NO KEY UPDATE SKIP LOCKED;
                IF FOUND AND fence.adopts(name, token, held) = 'greater' THEN
                    UPDATE fence.lease l SET closing_token = token, ended_at = clock_timestamp(), closed_in = NULL
                     WHERE l.name = lease_adopt.name;
                    PERFORM fence.commit_durably();
                END IF;
                RETURN NULL;
            WHEN serialization_failure THEN
                PERFORM fence.refuse('40001', w.message, w.hint, w.detail) FROM fence.words('{"code": "40001"}', name, token) AS w;
        END;
    END LOOP;
END
$$;
COMMENT ON FUNCTION lease_adopt IS 'makes known what somebody else has granted: the token, or NULL while an older grant is relied on';
SET search_path = pg_catalog, pg_temp;

-- Up to 1000, for each takes a lock. Who is guarding a lease, or just acquiring it, has its lock.
CREATE OR REPLACE FUNCTION fence.sweep(call text, only_name text, older_than interval) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    horizon pg_catalog.timestamptz;
    swept bigint;
BEGIN
    IF older_than IS NULL THEN
        PERFORM fence.bad_argument('older_than', 'older_than must not be NULL', 'Pass a value.', '22004');
    ELSIF older_than < interval '0' THEN
        PERFORM fence.bad_argument('older_than', 'older_than must not be negative', '''1 day'' keeps what ended within the last day.');
    END IF;
    PERFORM fence.check(call, coalesce(only_name, 'any'));
    horizon := CASE WHEN fence.microseconds(older_than) > 60000000000000000 THEN '-infinity'  -- before all time
                    ELSE clock_timestamp() - older_than END;
    WITH over AS MATERIALIZED (
        SELECT l.name FROM fence.lease l
         WHERE (only_name IS NULL OR l.name = only_name) AND (l.adopted_floor IS NOT NULL) = (call = 'lease_forget')
           AND coalesce(l.ended_at, l.expires_at) < horizon AND fence.noted(l.name) IS NULL
         LIMIT 1000),
    gone AS MATERIALIZED (
        SELECT l.name FROM fence.lease l
         WHERE l.name IN (SELECT o.name FROM over o WHERE pg_try_advisory_xact_lock(fence.lock_key(o.name)))
           AND coalesce(l.ended_at, l.expires_at) < horizon
           FOR UPDATE SKIP LOCKED)
    DELETE FROM fence.lease l USING gone g WHERE l.name = g.name;
    GET DIAGNOSTICS swept = ROW_COUNT;
    PERFORM nextval('fence.sweep_seq') WHERE swept > 0;
    RETURN swept;
END
$$;
COMMENT ON FUNCTION fence.sweep IS 'deletes rows of leases that ended longer ago, up to 1000, and tells how many';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION lease_prune(older_than interval DEFAULT '1 day')
RETURNS bigint LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT fence.sweep('lease_prune', NULL, coalesce(older_than, '1 day'))
$$;
COMMENT ON FUNCTION lease_prune IS 'deletes up to 1000 rows of grants that ended more than older_than ago, and returns how many';

CREATE OR REPLACE FUNCTION lease_forget(name text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fence.check('lease_forget', name);
    PERFORM fence.refuse_kind(l.name, false) FROM fence.lease l WHERE l.name = lease_forget.name AND l.adopted_floor IS NULL;
    RETURN fence.sweep('lease_forget', name, '0');
END
$$;
COMMENT ON FUNCTION lease_forget(text) IS 'deletes the row of an adopted lease that is free, so that any token can be adopted again';

CREATE OR REPLACE FUNCTION lease_forget_older(than interval)
RETURNS bigint LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT fence.sweep('lease_forget', NULL, than)
$$;
COMMENT ON FUNCTION lease_forget_older(interval) IS 'the same of up to 1000 adopted leases that have been free for longer; returns how many';
SET search_path = pg_catalog, pg_temp;

-- A barrier: a condition of the caller's must not see the leases that the caller may not.
CREATE OR REPLACE VIEW fence.leases WITH (security_barrier) AS
SELECT l.name, 'exclusive'::text AS mode,
       CASE WHEN l.closing_token IS NOT NULL THEN 'free'
            WHEN l.expires_at <= clock_timestamp() THEN 'expired' ELSE 'held' END AS state,
       coalesce(l.holder, l.session_label) AS holder, l.role,
       coalesce(l.closing_token, fence.latest(l.first_token, l.renewal_tokens)) AS token,
       l.first_token, l.acquired_at, l.renewed_at, l.expires_at,
       CASE WHEN l.closing_token IS NOT NULL THEN interval '0' WHEN isfinite(l.expires_at)
            THEN greatest(l.expires_at - clock_timestamp(), interval '0') END AS remaining,
       l.renewals, l.metadata, coalesce(b.pids, '{}') AS blocking_pids, l.adopted_floor IS NOT NULL AS adopted
  FROM fence.lease l
  LEFT JOIN (SELECT (p.classid::bigint << 32) | p.objid::bigint AS key, array_agg(DISTINCT coalesce(p.pid, 0)) AS pids
               FROM pg_locks p WHERE p.locktype = 'advisory' AND p.objsubid = 1 AND p.granted
                AND p.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
              GROUP BY 1) AS b ON b.key = fence.lock_key(l.name) WHERE fence.may_name(l.name);
COMMENT ON VIEW fence.leases IS 'one row per lease: who holds what until when, and who holds up a take-over';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION lease_info(name text, token bigint DEFAULT NULL)
RETURNS SETOF fence.leases LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fence.check('', name, coalesce(token, 1));
    RETURN QUERY SELECT l.* FROM fence.leases l WHERE l.name = lease_info.name;
END
$$;
COMMENT ON FUNCTION lease_info IS
    'the rows of fence.leases for one lease, as of this call; with a token from the same statement, what that has just granted is there';

CREATE OR REPLACE FUNCTION fence_new_epoch()
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fence.check('fence_new_epoch', 'any');
    PERFORM fence.move_on(true);
    RETURN fence.floor();
END
$$;
COMMENT ON FUNCTION fence_new_epoch IS 'makes the token sequence jump, for copies of a database that nothing can see from inside';

CREATE OR REPLACE FUNCTION fence_status(
    OUT last_token bigint, OUT timeline integer, OUT system_identifier bigint, OUT jumps bigint,
    OUT in_recovery boolean, OUT library_version text, OUT sql_version text)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN NOT pg_is_in_recovery() THEN coalesce(pg_sequence_last_value('fence.token_seq'), 0) END,
           i.timeline, i.system_identifier, coalesce(pg_sequence_last_value('fence.jump_count_seq'), 0),
           pg_is_in_recovery(), 'none: pg_fence_lite', '0.1.0' FROM fence.identity(fence.floor()) AS i
$$;
COMMENT ON FUNCTION fence_status IS 'the token sequence, the identity of the database and the versions; last_token is NULL on a standby';
SET search_path = pg_catalog, pg_temp;


-- The fence -----------------------------------------------------------------------------------------------------------

-- These run with the rights of the role that writes the table.

CREATE OR REPLACE FUNCTION fence.may_read(relation oid, columns text[]) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT NOT row_security_active(relation) AND NOT EXISTS (
        SELECT FROM unnest(columns) AS c (name), (VALUES (current_user), (fence.caller())) AS u (role)
         WHERE NOT has_column_privilege(u.role, relation, c.name, 'SELECT'))
$$;
COMMENT ON FUNCTION fence.may_read IS 'may the caller read these columns in every row? The current user and the session''s role both must';

CREATE OR REPLACE FUNCTION fence.refuse_row(
    code text, relation oid, data jsonb, col text, message text, hint text, detail jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    place pg_catalog.record;
    key_columns CONSTANT pg_catalog.text[] := ARRAY (
        SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey::smallint[])
         WHERE i.indrelid = relation AND i.indisprimary AND array_position(i.indkey::smallint[], a.attnum) < i.indnkeyatts
         ORDER BY a.attnum);
    shown CONSTANT integer := least(greatest(cardinality(key_columns), 1), 8);
    key pg_catalog.jsonb;
BEGIN
    SELECT n.nspname, c.relname INTO place FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    IF data IS NOT NULL AND fence.may_read(relation, key_columns) THEN
        SELECT jsonb_object_agg(fence.cut(k, 64), CASE jsonb_typeof(data -> k)
                   WHEN 'string' THEN to_jsonb(fence.cut(data ->> k, least(256, 512 / shown)))
                   WHEN 'boolean' THEN to_jsonb(left(data ->> k, 1))
                   WHEN 'number' THEN CASE WHEN data ->> k ~ '^-?[0-9]{1,19}$' THEN data -> k ELSE to_jsonb(data ->> k) END
                   ELSE data -> k END)
          INTO key FROM unnest(key_columns[:8]) AS k;
        IF cardinality(key_columns) > shown THEN
            key := key || jsonb_build_object('...', format('%s more columns', cardinality(key_columns) - shown));
        END IF;
    END IF;
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint,
        DETAIL = jsonb_strip_nulls(detail || jsonb_build_object(
            'relation', fence.cut(format('%I.%I', place.nspname, place.relname)), 'key', key)),
        SCHEMA = place.nspname, TABLE = place.relname, COLUMN = coalesce(col, '');
END
$$;
COMMENT ON FUNCTION fence.refuse_row IS 'refuses a row: `data` is it, `col` its fence column';

CREATE OR REPLACE FUNCTION fence.lease_of(template text, data jsonb, relation oid, fence_column text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    piece pg_catalog.text;
    name pg_catalog.text := '';
BEGIN
    IF template IS NULL OR data IS NULL THEN
        RETURN NULL;
    END IF;
    FOR piece IN SELECT m[1] FROM regexp_matches(template, '(\{\{|\}\}|\{[^{}]+\}|[^{}]+|.)', 'g') AS m LOOP
        name := name || CASE WHEN piece ~ '^\{.+\}$' THEN data ->> btrim(piece, '{}')
                             WHEN piece IN ('{{', '}}') THEN left(piece, 1) WHEN piece NOT IN ('{', '}') THEN piece END;
        IF name IS NULL AND data ? btrim(piece, '{}') THEN
            PERFORM fence.refuse_row('22004', relation, data, fence_column,
                format('column %s is NULL, so the row names no lease', fence.quoted(btrim(piece, '{}'))),
                'Give it a value. Rows that have none are mended by the table''s owner, in one transaction: fence_unprotect, '
                'UPDATE or DELETE, ALTER COLUMN ... SET NOT NULL, fence_protect with the arguments that the table had.',
                jsonb_build_object('column', fence.cut(btrim(piece, '{}'))));
        ELSIF name IS NULL THEN
            PERFORM fence.refuse_row(CASE WHEN length(piece) > 1 THEN '42703' ELSE '22023' END, relation, data, fence_column,
                format('the lease %s cannot be worked out: %s is no column', fence.quoted(template), fence.quoted(piece)),
                'Call fence_protect again with the present names; until then no write can land.',
                jsonb_build_object('column', fence.cut(nullif(btrim(piece, '{}'), ''))));
        END IF;
    END LOOP;
    IF octet_length(name) NOT BETWEEN 1 AND 512 THEN
        PERFORM fence.refuse_row('22023', relation, data, fence_column, 'the row''s columns make no lease name of 1 to 512 bytes',
            'Bind the table to a lease by shorter columns.');
    END IF;
    RETURN name;
END
$$;
COMMENT ON FUNCTION fence.lease_of IS 'the name of a row''s lease; NULL where there is no row, or the table is bound to none';

-- `is_shown`: the token is the statement's or the transaction's own, so that nobody learns it by this.
CREATE OR REPLACE FUNCTION fence.refuse_write(code text, relation oid, data jsonb, col text, mode text, stored bigint, token bigint,
    is_shown boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    reads CONSTANT boolean := fence.may_read(relation, ARRAY[col]);
    seen CONSTANT bigint := CASE WHEN reads THEN stored END;
    presented CONSTANT bigint := CASE WHEN reads OR is_shown THEN token END;
    own CONSTANT bigint := substring(current_setting('pg_fence.token', true) FROM '^[0-9]{1,18}$')::bigint;
BEGIN
    IF code = 'PF002' THEN
        PERFORM fence.refuse_row(code, relation, data, col, 'no fencing token presented',
            format('In this transaction, SET LOCAL pg_fence.token to the token of your lease, or call lease_guard, %s. '
                   'A NULL often means that lease_renew or lease_release found the lease lost: stop.',
                   format(CASE mode WHEN 'managed' THEN 'for column %s is managed: what a statement writes there is ignored'
                                    ELSE 'or set column %s to it; for a client that writes NULL there, use managed mode' END,
                          fence.quoted(col))), jsonb_build_object('stored', seen));
    END IF;
    PERFORM fence.refuse_row(code, relation, data, col,
        CASE WHEN presented = seen THEN format('stale fencing token: the row has already been written with token %s', seen)
             WHEN presented <> seen THEN format('stale fencing token %s: the row has already seen %s', presented, seen)
             ELSE format('stale fencing token%s: the row has seen the same or a greater one', ' ' || presented) END,
        CASE WHEN presented = seen THEN 'Nobody newer is at work; but in strict mode use lease_renew''s token, or monotonic mode.'
             WHEN own >= seen THEN 'The statement wrote an older value, which counts before the transaction''s own token.'
             ELSE 'A newer holder may have taken the lease over: stop, and do not retry with this token.' END
        || CASE mode WHEN 'managed' THEN '' ELSE format(' A client that writes column %s back as it had read it: leave the column out, '
                     'or use managed mode.', fence.quoted(col)) END,
        jsonb_build_object('presented', presented, 'stored', seen));
END
$$;
COMMENT ON FUNCTION fence.refuse_write IS 'refuses a row for a token that is stale (PF001) or missing (PF002)';

-- fenced(fence column; strict, monotonic or managed; lease; '' or 'partitioned'; events).
--
-- It judges all that the short way in fenced() leaves to it, by way of JSON, with the rights of the writer: a column's type may
-- bring code of its own. What it needs of the state it asks of fence.verdict. It returns what to replace in the new row.
CREATE OR REPLACE FUNCTION fence.judge(
    op text, level text, moment text, arguments text[], n integer, relation oid, old_row jsonb, new_row jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    col CONSTANT text := coalesce(nullif(arguments[0], ''), 'fence');
    mode CONSTANT text := coalesce(nullif(arguments[1], ''), 'strict');
    template CONSTANT text := nullif(arguments[2], '');
    data CONSTANT jsonb := coalesce(old_row, new_row);
    is_replica CONSTANT boolean := current_setting('session_replication_role') = 'replica';
    stored bigint;     -- the fence of the old row
    shown bigint;      -- and of the new one
    named boolean := true;
    presents boolean;  -- the column itself presents a token, or a NULL
    ambient bigint;    -- what the transaction has beside the column
    token bigint;      -- what the write presents
    fence bigint;      -- what the row's fence is to be
    lease text;        -- of the new row
    old_lease text;    -- of the old one; NULL where it is the same
    each text;
    moving bigint[];
    arrives boolean := false;
    is_stale boolean;
    type CONSTANT oid := (SELECT a.atttypid FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = col AND a.attnum > 0);
    verdict jsonb;
BEGIN
    IF op = 'TRUNCATE' AND is_replica THEN
        RETURN NULL;
    ELSIF op = 'TRUNCATE' THEN
        PERFORM fence.refuse_row('PF005', relation, NULL, NULL, 'TRUNCATE cannot be fenced: it shows no token',
            'Use DELETE with a token, or let the owner call fence_unprotect, truncate and fence_protect in one transaction.');
    END IF;
    IF level <> 'ROW' OR moment <> 'BEFORE' THEN
        PERFORM fence.refuse('39P01', 'fenced() must fire BEFORE the write and FOR EACH ROW', 'Call fence_protect, which attaches it.');
    ELSIF arguments[3] = 'verify' THEN
        PERFORM fence.left_out('verify');
    ELSIF n > 5 OR mode NOT IN ('strict', 'monotonic', 'managed') OR arguments[3] NOT IN ('', 'partitioned')
          OR arguments[4] !~ '^((insert|update|delete|truncate)(,(?!$)|$))*$' THEN
        PERFORM fence.refuse('22023', format('fenced() does not know these arguments: %s', fence.quoted(arguments::text)),
            'Call fence_protect, which attaches it.');
    ELSIF type IS DISTINCT FROM 'bigint'::regtype THEN
        PERFORM fence.refuse_row(CASE WHEN type IS NULL THEN '42703' ELSE '42804' END, relation, NULL, col,
            format('the trigger fenced finds no column %s of type bigint', fence.quoted(col)),
            'Was it renamed or dropped? Call fence_protect again with the present name; until then no write can land.',
            jsonb_build_object('column', fence.cut(col)));
    END IF;
    stored := old_row ->> col;
    shown := new_row ->> col;
    IF op = 'UPDATE' THEN
        named := mode <> 'managed' AND coalesce(current_setting('pg_fence.named', true), '') = relation || ' ' || pg_trigger_depth();
        PERFORM set_config('pg_fence.named', '', true) WHERE named;
    END IF;
    presents := mode <> 'managed' AND CASE op WHEN 'INSERT' THEN shown IS NOT NULL
                                              WHEN 'UPDATE' THEN shown IS DISTINCT FROM stored ELSE false END;
    IF is_replica THEN
        -- The publisher has judged the rest.
        IF op = 'UPDATE' AND stored IS NOT NULL AND NOT coalesce(shown > stored OR shown = stored AND mode <> 'strict', false) THEN
            PERFORM fence.refuse_write(CASE WHEN shown IS NULL THEN 'PF002' ELSE 'PF001' END, relation, data, col, mode, stored, shown,
                shown IS DISTINCT FROM stored);
        END IF;
        RETURN NULL;
    END IF;

    -- The update of a row of a partition, whose DELETE here and INSERT there may follow: its token, the row, its fence, its lease.
    IF arguments[3] = 'partitioned' AND op <> 'UPDATE' THEN
        moving := string_to_array(nullif(current_setting('pg_fence.moving', true), ''), ' ')::bigint[];
        arrives := template IS NOT NULL AND op = 'INSERT' AND coalesce(shown = moving[3], false);
    END IF;
    IF mode = 'managed' AND op = 'INSERT' AND NOT arrives
       AND (arguments[4] <> '' AND 'insert' <> ALL (string_to_array(arguments[4], ','))
            OR template IS NULL AND coalesce(current_setting('pg_fence.token', true), '') = '') THEN
        -- Who creates a row needs no token here, and no fence that it brings is blanked in silence.
        IF shown > 0 THEN
            PERFORM fence.refuse_row('PF002', relation, data, col, 'no fencing token presented',
                format('The row brings a fence, and column %s is managed: it would be lost. To load rows with their fences, have the '
                       'triggers not fire (pg_restore --disable-triggers, SET session_replication_role = replica). To create rows, '
                       'leave the column out.', fence.quoted(col)), '{}');
        END IF;
        RETURN jsonb_build_object(col, NULL);
    END IF;
    lease := fence.lease_of(template, new_row, relation, col);
    old_lease := fence.lease_of(template, old_row, relation, col);
    IF lease IS NULL OR lease = old_lease THEN
        lease := coalesce(lease, old_lease);
        old_lease := NULL;
    END IF;

    -- Else it has that fence by chance. (The setting is no proof: anybody may set it, to any number.)
    arrives := arrives AND moving[4] = hashtext(lease)
               AND (shown <= pg_sequence_last_value('fence.token_seq') OR fence.is_adopted(lease));
    IF arrives THEN
        token := moving[1];
    ELSIF presents THEN
        token := shown;
    ELSE
        -- A row that leaves its partition was judged a moment ago: it presents the same token again.
        ambient := coalesce(fence.noted(lease), fence.noted(old_lease),
                            CASE WHEN op = 'DELETE' AND moving[2] = hashtext(old_row::text) THEN moving[1] END);
        IF ambient IS NULL AND current_setting('pg_fence.token', true) <> '' THEN
            -- No backslash d, for standard_conforming_strings may be off.
            IF current_setting('pg_fence.token') !~ '^[[:space:]]*[0-9]{1,19}[[:space:]]*$' THEN
                PERFORM fence.refuse('22023', format('invalid value for parameter "pg_fence.token": %s',
                    fence.quoted(current_setting('pg_fence.token'))), 'It is a fencing token, or empty for none.');
            END IF;
            ambient := current_setting('pg_fence.token')::bigint;
        END IF;
        token := coalesce(ambient, CASE WHEN mode = 'monotonic' AND named AND op = 'UPDATE' THEN stored END);
    END IF;
    IF token IS NULL THEN
        PERFORM fence.refuse_write(CASE WHEN mode = 'strict' AND NOT presents AND named AND stored IS NOT NULL AND op = 'UPDATE'
            THEN 'PF001' ELSE 'PF002' END, relation, data, col, mode, stored, CASE WHEN NOT presents THEN stored END, false);
    END IF;

    fence := CASE WHEN arrives THEN shown ELSE token END;
    is_stale := op <> 'INSERT' AND coalesce(token < stored OR token = stored AND mode = 'strict', false);
    IF is_stale OR NOT token BETWEEN 1 AND coalesce(pg_sequence_last_value('fence.token_seq'), 0) THEN
        -- It is refused, unless a start has lost the latest of the sequence, or the row is bound to a lease.
        PERFORM fence.settle();
        -- A number of somebody else's may be adopted; and who may not see leases is told the same of each that does not speak.
        IF NOT token BETWEEN 1 AND coalesce(pg_sequence_last_value('fence.token_seq'), 0)
           AND (lease IS NULL OR fence.may_be_told(lease)
                                 AND NOT (fence.is_adopted(lease) OR old_lease IS NOT NULL AND fence.is_adopted(old_lease))) THEN
            PERFORM fence.refuse_row('PF003', relation, data, col, format('fencing token %s was never issued by this database', token),
                'Tokens come from lease_acquire or lease_renew. After a restore, fence_new_epoch() makes the sequence outrun others.',
                jsonb_build_object('presented', token));
        ELSIF is_stale AND (lease IS NULL OR mode = 'strict') THEN
            PERFORM fence.refuse_write('PF001', relation, data, col, mode, stored, token, presents OR ambient IS NOT NULL);
        ELSIF is_stale THEN
            -- Nobody who excludes a token that speaks was granted the lease since: the row keeps the greater one.
            fence := stored;
        END IF;
    END IF;

    FOREACH each IN ARRAY array_remove(ARRAY[lease, old_lease], NULL) LOOP
        verdict := CASE WHEN fence.remembers(each, token, fence.last_behind_lock(each)) THEN NULL ELSE fence.verdict(each, token) END;
        IF stored > token AND verdict ->> 'code' = 'PF004' AND NOT verdict ? 'renew_first' THEN
            PERFORM fence.refuse_write('PF001', relation, data, col, mode, stored, token, presents OR ambient IS NOT NULL);
        ELSIF verdict IS NOT NULL THEN
            PERFORM fence.refuse_row(verdict ->> 'code', relation, data, col, w.message, w.hint, w.detail)
              FROM fence.words(verdict,
                  CASE WHEN fence.may_read(relation, fence.template_columns(template)) THEN each END,
                  CASE WHEN presents OR ambient IS NOT NULL OR fence.may_read(relation, ARRAY[col]) THEN token END) AS w;
        END IF;
    END LOOP;
    IF op = 'UPDATE' AND arguments[3] = 'partitioned' THEN
        PERFORM set_config('pg_fence.moving', concat_ws(' ', token, hashtext(old_row::text), fence, hashtext(lease)), true);
    END IF;
    RETURN CASE WHEN shown IS DISTINCT FROM fence THEN jsonb_build_object(col, fence) END;
END
$$;
COMMENT ON FUNCTION fence.judge IS 'refuses the write of a row, or returns what is to be replaced in it';

-- The short way, for a column "fence" and a lease that is one for all rows or made of a column "id". It has no search_path
-- set, so all that it calls is named in full, and has its operators from RETURN.

CREATE OR REPLACE FUNCTION fence.plain_lease(op text, level text, moment text, n integer, arguments text[]) RETURNS text
LANGUAGE sql IMMUTABLE
    RETURN CASE WHEN op IN ('UPDATE', 'INSERT') AND n < 4 AND level = 'ROW' AND moment = 'BEFORE'
                     AND coalesce(arguments[0], 'fence') = 'fence'
                     AND coalesce(arguments[1], 'strict') IN ('strict', 'monotonic', 'managed')
                THEN coalesce(arguments[2], '') END;
COMMENT ON FUNCTION fence.plain_lease IS 'the lease of a trigger that can go the short way, empty where it has none; NULL where it cannot';

CREATE OR REPLACE FUNCTION fence.with_id(template text, op text, old_id text, new_id text) RETURNS text LANGUAGE sql IMMUTABLE
    RETURN CASE WHEN op = 'INSERT' OR old_id = new_id THEN nullif(replace(template, '{id}', new_id), '') END;
COMMENT ON FUNCTION fence.with_id IS 'the lease of a row; NULL where the write changes it, or it would be empty';

CREATE OR REPLACE FUNCTION fence.plain_token(mode text, lease text, stored bigint, shown bigint) RETURNS bigint LANGUAGE sql STABLE
    RETURN CASE WHEN lease IS NULL OR lease LIKE '%{%' OR lease LIKE '%}%' THEN NULL
                WHEN mode <> 'managed' AND shown IS DISTINCT FROM stored THEN shown
                WHEN coalesce(current_setting('pg_fence.named', true), '') <> ''
                     OR current_setting('session_replication_role') = 'replica' THEN NULL
                ELSE coalesce(fence.noted(lease), CASE WHEN current_setting('pg_fence.token', true) ~ '^\d{1,18}$'
                                                       THEN current_setting('pg_fence.token', true)::bigint END) END;
COMMENT ON FUNCTION fence.plain_token IS 'what the write presents, where that is plain';

CREATE OR REPLACE FUNCTION fence.passes(mode text, type regtype, stored bigint, token bigint, last bigint) RETURNS boolean
LANGUAGE sql STABLE
    RETURN token > 0 AND token <= last AND type = 'bigint'::regtype
       AND (stored IS NULL OR token > stored OR token = stored AND mode <> 'strict');
COMMENT ON FUNCTION fence.passes IS 'is the token one of this database, and not stale?';

CREATE OR REPLACE FUNCTION fence.relies(lease text, token bigint, last bigint) RETURNS boolean LANGUAGE sql VOLATILE
    RETURN lease = '' OR fence.remembers(lease, token, last) OR current_setting('session_replication_role') = 'replica'
        OR fence.verdict(lease, token) IS NULL;
COMMENT ON FUNCTION fence.relies IS 'may the transaction rely on it from now until it ends? It need not where there is no lease';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION fenced() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    lease pg_catalog.text := fence.plain_lease(TG_OP, TG_LEVEL, TG_WHEN, TG_NARGS, TG_ARGV);
    token bigint;
    last bigint;
    replaced pg_catalog.jsonb;
BEGIN
    IF lease IS NOT NULL THEN
        IF pg_catalog.strpos(lease, '{id}') OPERATOR(pg_catalog.>) 0 THEN
            lease := fence.with_id(lease, TG_OP, OLD.id::pg_catalog.text, NEW.id::pg_catalog.text);
        END IF;
        token := fence.plain_token(coalesce(TG_ARGV[1], 'strict'), lease, OLD.fence, NEW.fence);
        last := fence.last_behind_lock(lease);
        IF fence.passes(coalesce(TG_ARGV[1], 'strict'), pg_catalog.pg_typeof(NEW.fence), OLD.fence, token, last)
           AND fence.relies(lease, token, last) THEN
            IF pg_catalog.int8eq(NEW.fence, token) IS NOT TRUE THEN
                NEW.fence := token;
            END IF;
            RETURN NEW;
        END IF;
    END IF;
    IF TG_LEVEL OPERATOR(pg_catalog.=) 'STATEMENT' THEN
        PERFORM fence.judge(TG_OP, TG_LEVEL, TG_WHEN, TG_ARGV, TG_NARGS, TG_RELID, NULL, NULL);
        RETURN NULL;
    END IF;
    replaced := fence.judge(TG_OP, TG_LEVEL, TG_WHEN, TG_ARGV, TG_NARGS, TG_RELID, pg_catalog.to_jsonb(OLD), pg_catalog.to_jsonb(NEW));
    IF replaced IS NOT NULL THEN
        NEW := pg_catalog.jsonb_populate_record(NEW, replaced);
    END IF;
    IF TG_OP OPERATOR(pg_catalog.=) 'DELETE' THEN
        RETURN OLD;
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION fenced IS
'trigger function, which fence_protect attaches: refuses a write whose token is stale, missing or never issued';
SET search_path = pg_catalog, pg_temp;

CREATE OR REPLACE FUNCTION fence.is_adopted(lease text DEFAULT NULL) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT (lease IS NULL OR fence.may_be_told(lease))
       AND EXISTS (SELECT FROM fence.lease l WHERE l.name = coalesce(is_adopted.lease, l.name) AND l.adopted_floor IS NOT NULL)
$$;
COMMENT ON FUNCTION fence.is_adopted IS 'is it adopted, as far as the caller may know? Is any?';

-- PL/pgSQL does not see which columns a statement names. This trigger, BEFORE UPDATE OF the fence column and by its name
-- the first of all, notes that it does.
CREATE OR REPLACE FUNCTION fence.note_named() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM set_config('pg_fence.named', TG_RELID || ' ' || pg_trigger_depth(), true);
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION fence.note_named IS 'notes that the statement names the fence column, which PL/pgSQL does not see';

CREATE OR REPLACE FUNCTION fence.template_columns(template text) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN template ~ '^(\{\{|\}\}|\{[^{}]+\}|[^{}])*$' THEN ARRAY (
        SELECT m[1] FROM regexp_matches(template, '\{\{|\}\}|\{([^{}]+)\}|[^{}]+', 'g') AS m WHERE m[1] IS NOT NULL) END
$$;
COMMENT ON FUNCTION fence.template_columns IS 'the columns that the name of a lease is made of; NULL where its braces do not pair';

CREATE OR REPLACE FUNCTION fence.trigger_arguments(tgargs bytea, tgnargs smallint) RETURNS text[] LANGUAGE sql STABLE
    RETURN ARRAY (SELECT convert_from(decode(replace(x.part, ' ', ''), 'hex'), getdatabaseencoding())
                    FROM unnest(string_to_array(regexp_replace(encode(tgargs, 'hex'), '(..)', '\1 ', 'g'), '00 '))
                         WITH ORDINALITY AS x (part, n) WHERE x.n <= tgnargs ORDER BY x.n);
COMMENT ON FUNCTION fence.trigger_arguments IS 'the arguments of a trigger, between which pg_trigger has zero bytes';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION fence.trigger_function() RETURNS regproc LANGUAGE sql STABLE
    RETURN 'fenced'::regproc;
SET search_path = pg_catalog, pg_temp;
COMMENT ON FUNCTION fence.trigger_function IS 'fenced(), wherever the calls are';


-- Fencing a table -----------------------------------------------------------------------------------------------------
-- With the rights of the caller, so that PostgreSQL itself stands behind every check.

CREATE OR REPLACE FUNCTION fence.refuse_table(
    relation regclass, doing text, code text, fault text, hint text, col text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    place pg_catalog.record;
BEGIN
    SELECT n.nspname, c.relname INTO place FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    RAISE EXCEPTION USING ERRCODE = code, HINT = hint,
        MESSAGE = format('cannot %s %s: %s', doing, coalesce(relation::text, 'a table'), fault),
        DETAIL = jsonb_strip_nulls(jsonb_build_object('relation', relation::text, 'column', col)),
        SCHEMA = coalesce(place.nspname, ''), TABLE = coalesce(place.relname, ''), COLUMN = coalesce(col, '');
END
$$;
COMMENT ON FUNCTION fence.refuse_table IS 'what neither fence_protect nor fence_unprotect can do';

CREATE OR REPLACE FUNCTION fence.check_table(relation regclass, doing text) RETURNS void LANGUAGE sql AS $$
    SELECT fence.refuse_table(relation, doing, r.code, r.fault, r.hint)
      FROM (VALUES (1)) AS once
      LEFT JOIN pg_class c ON c.oid = relation
     CROSS JOIN LATERAL (VALUES
        (relation IS NULL, '22004', 'relation must not be NULL', 'Name the table.'),
        (c.oid IS NULL, '42P01', 'there is no such table', 'Name a table that exists.'),
        (NOT pg_has_role(c.relowner, 'USAGE'), '42501', 'only its owner may', format('Ask %I to do it.', pg_get_userbyid(c.relowner))),
        (doing = 'fence' AND (c.oid < 16384 OR c.relnamespace = 'fence'::regnamespace), '42809',
         'it belongs to Postgres or to pg_fence itself', 'Fence tables of your own.'),
        (doing = 'fence' AND c.relkind NOT IN ('r', 'p'), '42809', 'it is not a table of this server',
         'Fence the table that stores the rows.'),
        (doing = 'fence' AND c.relpersistence <> 'p', '42809', 'it is temporary, or unlogged: a crash would empty it, fences and all',
         format('ALTER TABLE %s SET LOGGED;', relation)),
        (doing = 'fence' AND c.relispartition, '42809', 'it is a partition: rows could move around a fence on it alone',
         format('Protect %s, which covers its partitions.', pg_partition_root(c.oid))),
        (doing = 'fence' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid), '42809', 'it is an inheritance child',
         'Protect the parent, and give the child a trigger of its own.')
     ) AS r (applies, code, fault, hint) WHERE r.applies LIMIT 1
$$;
COMMENT ON FUNCTION fence.check_table IS 'refuses a table that is not there, not the callers, or of no kind that can be fenced';

CREATE OR REPLACE FUNCTION fence.family(relation regclass) RETURNS SETOF regclass LANGUAGE sql STABLE AS $$
    SELECT relation UNION SELECT p.relid FROM pg_partition_tree(relation) AS p
$$;
COMMENT ON FUNCTION fence.family IS 'a table and its partitions';

CREATE OR REPLACE FUNCTION fence.take_off(relation regclass) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    item pg_catalog.record;
    dropped bigint := 0;
BEGIN
    FOR item IN SELECT t.tgname, t.tgrelid::regclass AS rel FROM pg_trigger t
                 WHERE t.tgfoid IN (fence.trigger_function(), 'fence.note_named'::regproc) AND t.tgparentid = 0
                   AND t.tgrelid IN (SELECT fence.family(relation)) LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', item.tgname, item.rel);
        dropped := dropped + 1;
    END LOOP;
    RETURN dropped;
END
$$;
COMMENT ON FUNCTION fence.take_off IS 'drops the triggers of a table and its partitions, and tells how many there were';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION fence_protect(relation regclass, fence_column name DEFAULT 'fence', mode text DEFAULT NULL,
    lease text DEFAULT NULL, events text DEFAULT NULL, verify boolean DEFAULT false, always boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ours CONSTANT oid := fence.trigger_function();
    mark CONSTANT text := 'fencing token of the latest write (pg_fence)';
    table_name CONSTANT text := relation::text;
    had record;       -- the fence that the table has
    refusal record;
    col name;
    judged_as text;
    bound_to text;
    kept_events text;
    on_events text[];
    free_insert boolean;  -- of a managed table: a row may be created without its lease
    chosen text;
    item record;
BEGIN
    IF verify THEN
        PERFORM fence.left_out('verify');
    END IF;
    PERFORM fence.check_table(relation, 'fence');
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', relation);
    PERFORM fence.check_table(relation, 'fence');  -- what was seen before the lock may have changed meanwhile
    IF relation::text <> table_name THEN
        PERFORM fence.refuse_table(relation, 'fence', '40001', 'it was renamed meanwhile', 'Call fence_protect again.');
    END IF;

    -- What the table has stays, where the call does not say otherwise. A call that binds the table, or unbinds it, takes
    -- the other default: a leased row may be written often under one token; without a lease only strict is safe.
    SELECT count(*) > 0 AS is_fenced, max(a.arguments[1]) AS fence_column, max(nullif(a.arguments[2], '')) AS mode,
           max(nullif(a.arguments[3], '')) AS lease, max(nullif(a.arguments[5], '')) AS events,
           bool_or(t.tgname = 'fenced' AND t.tgtype & 4 <> 0) AS inserts, coalesce(bool_or(t.tgenabled = 'A'), false) AS fires_always
      INTO had
      FROM pg_trigger t CROSS JOIN LATERAL (SELECT fence.trigger_arguments(t.tgargs, t.tgnargs)) AS a (arguments)
     WHERE t.tgrelid = relation AND t.tgfoid = ours AND t.tgnargs >= 2 AND t.tgname IN ('fenced', 'fenced_truncate');
    col := coalesce(fence_column, had.fence_column, 'fence');
    bound_to := CASE WHEN lease = '' AND had.is_fenced THEN NULL ELSE coalesce(lease, had.lease) END;
    judged_as := lower(coalesce(mode,
        CASE WHEN had.mode = 'managed' OR (bound_to IS NULL) = (had.lease IS NULL) THEN had.mode END,
        CASE WHEN bound_to IS NULL THEN 'strict' ELSE 'monotonic' END));
    kept_events := CASE WHEN bound_to IS NULL OR had.lease IS NOT NULL THEN had.events END;
    on_events := regexp_split_to_array(lower(btrim(coalesce(events, kept_events, 'update,delete,truncate'))), '[[:space:]]*,[[:space:]]*')
        || CASE WHEN events IS NULL AND kept_events IS NULL
                     AND (bound_to IS NOT NULL OR had.lease IS NOT NULL OR had.mode = 'managed' OR had.inserts)
                  OR judged_as = 'managed' AND bound_to IS NULL THEN '{insert}'::text[] END;
    free_insert := judged_as = 'managed' AND 'insert' <> ALL (on_events);
    chosen := CASE WHEN NOT (on_events @> '{update,delete,truncate}'
            AND ('insert' = ANY (on_events)) = (bound_to IS NOT NULL OR judged_as = 'managed'))
        THEN (SELECT string_agg(DISTINCT e, ',') FROM unnest(on_events) AS e) END;

    SELECT r.*, c.relkind = 'p' AS is_partitioned, f.attnum IS NOT NULL AS has_column INTO refusal
      FROM pg_class c
      LEFT JOIN pg_attribute f ON f.attrelid = c.oid AND f.attname = col
      LEFT JOIN LATERAL (
           SELECT p.name, a.attnum, a.attgenerated FROM unnest(fence.template_columns(bound_to)) AS p (name)
             LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = p.name AND a.attnum > 0 AND NOT a.attisdropped
            WHERE a.attnum IS NULL OR a.attgenerated <> ''
               OR a.atttypid <> ALL ('{int2,int4,int8,text,varchar,uuid,bool}'::regtype[])
            LIMIT 1) AS unfit ON true
      LEFT JOIN LATERAL (SELECT * FROM (VALUES
        (col = '', '22023', 'the fence column needs a name', 'Leave fence_column out for a column "fence".', NULL),
        (judged_as NOT IN ('strict', 'monotonic', 'managed'), '22023', format('there is no mode "%s"', judged_as),
         'The modes are strict, monotonic and managed.', NULL),
        (NOT on_events <@ '{insert,update,delete,truncate}', '22023', format('events "%s" are not known', events),
         'Give one or more of insert, update, delete, truncate, with commas between them.', NULL),
        (free_insert AND c.relkind = 'p' AND on_events @> '{update}' AND NOT on_events @> '{delete}', '22023',
         'a managed partitioned table needs delete among the events',
         'A row that moves to another partition is a DELETE here and an INSERT there.', NULL),
        (bound_to IS NOT NULL AND (fence.template_columns(bound_to) IS NULL
            OR octet_length(regexp_replace(bound_to, '\{[^{}]+\}', '', 'g')) NOT BETWEEN (bound_to !~ '\{')::integer AND 512), '22023',
         format('"%s" is no name for a lease', bound_to),
         'Write 1 to 512 bytes, {column} for the value of a column, {{ and }} for braces.', NULL),
        (col = ANY (fence.template_columns(bound_to)), '22023', 'the lease of a row cannot depend on its fence column',
         'Use the columns that identify the row.', col),
        (EXISTS (SELECT FROM fence.family(relation) AS p JOIN pg_class pc ON pc.oid = p
                  WHERE pc.relkind = 'f' OR pc.relpersistence <> 'p'), '42809',
         'a partition of it is foreign, temporary or unlogged', 'Detach that partition first.', NULL),
        (EXISTS (SELECT FROM pg_trigger t WHERE t.tgfoid NOT IN (ours, 'fence.note_named'::regproc)
                    AND t.tgname IN ('fence_named', 'fenced', 'fenced_truncate', 'fenced_verify')
                    AND t.tgrelid IN (SELECT fence.family(relation))), '42710',
         'another trigger bears the name fenced, fenced_truncate, fenced_verify or fence_named', 'Rename that trigger.', NULL),
        (f.attnum IS NULL AND c.reloftype <> 0, '42809', format('its type has no attribute "%s"', col),
         format('ALTER TYPE %s ADD ATTRIBUTE %I bigint CASCADE;', c.reloftype::regtype, col), col),
        (f.attnum < 0, '42701', format('"%s" is a column of Postgres itself', col), 'Give the fence column another name.', col),
        (f.atttypid <> 'int8'::regtype, '42804', format('column "%s" is of type %s, not bigint', col,
         format_type(f.atttypid, f.atttypmod)), 'Make it bigint, or name another fence_column.', col),
        (f.attgenerated <> '' OR f.atthasdef OR f.attidentity <> '', '42611',
         format('column "%s" is generated, or has a default, which would pass for a token', col),
         'Name a plain bigint column as fence_column, or drop the default.', col),
        (unfit.name IS NOT NULL AND unfit.attnum IS NULL, '42703', format('the lease names {%s}, no column of it', unfit.name),
         'Write a column exactly as it is stored, capitals included.', unfit.name),
        (unfit.name IS NOT NULL, CASE unfit.attgenerated WHEN '' THEN '42804' ELSE '42611' END,
         format('the lease names {%s}, which is generated or of a type that is not fit', unfit.name),
         'Fit are smallint, integer, bigint, text, character varying, uuid, boolean: no setting changes their text.', unfit.name)
        ) AS v (applies, code, fault, hint, about) WHERE v.applies LIMIT 1) AS r ON true
     WHERE c.oid = relation;
    IF refusal.code IS NOT NULL THEN
        PERFORM fence.refuse_table(relation, 'fence', refusal.code, refusal.fault, refusal.hint, refusal.about);
    END IF;
    IF NOT refusal.has_column THEN
        EXECUTE format('ALTER TABLE %s ADD COLUMN %I bigint', relation, col);
        FOR item IN SELECT a.attname FROM pg_attribute a
                     WHERE a.attrelid = relation AND col_description(relation, a.attnum) = mark LOOP
            RAISE WARNING USING MESSAGE = format('column "%s" is new and empty: the tokens seen so far are in "%s"', col, item.attname),
                HINT = format('If that was renamed, call fence_protect with fence_column => %L.', item.attname);
        END LOOP;
    END IF;
    EXECUTE (SELECT format('COMMENT ON COLUMN %s.%I IS %L', relation, col, coalesce(col_description(relation, a.attnum), mark))
               FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = col);

    PERFORM fence.take_off(relation);
    -- Postgres copies a row trigger to every partition, present and future, but no statement trigger. fence_named comes
    -- before fenced by its name, and only where the column is written with the value that it has.
    FOR item IN
        SELECT 'fence_named' AS tgname, relation AS rel, 'fence.note_named()' AS call,
               format('BEFORE UPDATE OF %I ON %s FOR EACH ROW WHEN (NEW.%I IS NOT DISTINCT FROM OLD.%I)', col, relation, col, col) AS at
         WHERE on_events && '{update}' AND judged_as <> 'managed'
        UNION ALL
        SELECT t.tgname, t.rel, format(CASE WHEN t.use <> '' OR chosen IS NOT NULL THEN '%s(%L, %L, %L, %L, %L)' ELSE '%s(%L, %L, %L)' END,
                                       ours::regproc, col, judged_as, coalesce(bound_to, ''), t.use, coalesce(chosen, '')), t.at
          FROM (SELECT 'fenced', relation, format('BEFORE %s ON %s FOR EACH ROW', string_agg(DISTINCT e, ' OR '), relation),
                       CASE WHEN refusal.is_partitioned THEN 'partitioned' ELSE '' END
                  FROM unnest(on_events || CASE WHEN free_insert THEN '{insert}'::text[] END) AS e WHERE e <> 'truncate' HAVING count(*) > 0
                UNION ALL
                SELECT 'fenced_truncate', part, format('BEFORE TRUNCATE ON %s FOR EACH STATEMENT', part), ''
                  FROM fence.family(relation) AS part WHERE 'truncate' = ANY (on_events)) AS t (tgname, rel, at, use)
    LOOP
        EXECUTE format('CREATE TRIGGER %I %s EXECUTE FUNCTION %s', item.tgname, item.at, item.call);
        IF coalesce(always, had.fires_always) THEN
            EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', item.rel, item.tgname);
        END IF;
    END LOOP;

    IF bound_to IS NULL THEN
        RAISE NOTICE USING MESSAGE = format('%s is bound to no lease: the holder of any lease can write it', relation),
            HINT = format('SELECT fence_protect(%L, lease => ''order:{id}''); binds its rows to leases of such names.', relation);
    END IF;
    IF EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = relation AND NOT c.relispartition) THEN
        RAISE WARNING USING MESSAGE = format('the inheritance children of %s are not fenced with it', relation),
            HINT = format('fence_audit(%L) names them; each needs a trigger of its own.', relation);
    END IF;
END
$$;
COMMENT ON FUNCTION fence_protect IS 'fences a table, or again; what is left out or NULL stays as it was; lease => '''' unbinds it';

CREATE OR REPLACE FUNCTION fence_unprotect(relation regclass) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fence.check_table(relation, 'take the fence off');
    IF EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = relation AND t.tgfoid = fence.trigger_function() AND t.tgparentid <> 0) THEN
        PERFORM fence.refuse_table(relation, 'take the fence off', '42809', 'it is fenced as a partition',
            format('Take the fence off %s.', pg_partition_root(relation)));
    ELSIF EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid IN (SELECT fence.family(relation)) AND t.tgfoid = fence.trigger_function()) THEN
        EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', relation);
    END IF;
    IF fence.take_off(relation) = 0 THEN
        RAISE NOTICE '% is not fenced', relation;
    END IF;
END
$$;
COMMENT ON FUNCTION fence_unprotect IS 'takes the triggers of pg_fence off a table and its partitions; the fence column stays';
SET search_path = pg_catalog, pg_temp;

-- Shorter than the extension's: the ways around a fence that are met most.
DO $type$
BEGIN
    IF to_regtype('fence.audit_finding') IS NULL THEN
        CREATE TYPE fence.audit_finding AS (relation regclass, severity text, finding text, remedy text);
        COMMENT ON TYPE fence.audit_finding IS 'what fence_audit finds, and the statement that mends it';
    END IF;
END
$type$;
DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION fence_audit(relation regclass DEFAULT NULL) RETURNS SETOF fence.audit_finding
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    ours CONSTANT oid := fence.trigger_function();
    home CONSTANT text := (SELECT p.pronamespace::regnamespace FROM pg_proc p WHERE p.oid = ours);
    last CONSTANT bigint := CASE WHEN NOT pg_is_in_recovery() THEN pg_sequence_last_value('fence.token_seq') END;
    item record;
    highest bigint;
BEGIN
    PERFORM fence.check_table(fence_audit.relation, 'audit') WHERE fence_audit.relation IS NOT NULL;
    RETURN QUERY
    WITH RECURSIVE own AS (
        SELECT t.tgrelid, t.tgname, t.tgenabled, t.tgtype, t.tgparentid,
               coalesce(nullif(a.arguments[2], ''), 'strict') AS mode, nullif(a.arguments[3], '') AS lease
          FROM pg_trigger t CROSS JOIN LATERAL (SELECT fence.trigger_arguments(t.tgargs, t.tgnargs)) AS a (arguments)
         WHERE t.tgfoid = ours),
    root AS (
        SELECT DISTINCT ON (c.oid) c.oid, c.oid::regclass AS rel, o.mode, o.lease, o.tgrelid IS NOT NULL AS is_fenced
          FROM pg_class c LEFT JOIN own o ON o.tgrelid = c.oid
         WHERE (c.oid = fence_audit.relation OR fence_audit.relation IS NULL AND o.tgrelid IS NOT NULL AND o.tgparentid = 0
                AND NOT EXISTS (SELECT FROM pg_inherits i JOIN own p ON p.tgrelid = i.inhparent WHERE i.inhrelid = c.oid))
           AND pg_has_role(c.relowner, 'USAGE') ORDER BY c.oid, o.tgtype & 1 DESC),
    part (root, oid) AS (
        SELECT r.oid, r.oid FROM root r UNION SELECT p.root, i.inhrelid FROM part p JOIN pg_inherits i ON i.inhparent = p.oid),
    tree AS (
        SELECT c.*, c.oid::regclass AS rel, r.rel AS root, r.mode, r.lease
          FROM part p JOIN pg_class c ON c.oid = p.oid JOIN root r ON r.oid = p.root WHERE r.is_fenced),
    found (rel, severity, finding, remedy) AS (
        SELECT r.rel, 'hole', 'no trigger of pg_fence is on this table', format('SELECT %s.fence_protect(%L);', home, r.rel)
          FROM root r WHERE NOT r.is_fenced
        UNION ALL
        SELECT m.rel, 'notice', 'this table is unlogged: a crash empties it, fences and all', format('ALTER TABLE %s SET LOGGED;', m.rel)
          FROM tree m WHERE m.relpersistence = 'u'
        UNION ALL
        SELECT m.rel, 'hole', 'this table is foreign: nothing fences it on its own server', 'Detach it.' FROM tree m WHERE m.relkind = 'f'
        UNION ALL
        SELECT m.rel, 'hole', format('no trigger of pg_fence fires on %s of this table', string_agg(e.name, ', ' ORDER BY e.n)),
               format('SELECT %s.fence_protect(%L);', home, m.root)
          FROM tree m
         CROSS JOIN (VALUES (1, 'insert', 4, 3), (2, 'update', 16, 3), (3, 'delete', 8, 3), (4, 'truncate', 32, 2))
                 AS e (n, name, flag, bits)
         WHERE m.relkind IN ('r', 'p') AND (e.name <> 'insert' OR m.lease IS NOT NULL OR m.mode = 'managed')
           AND NOT EXISTS (SELECT FROM own o WHERE o.tgrelid = m.oid AND o.tgtype & 3 = e.bits AND o.tgtype & e.flag <> 0)
         GROUP BY m.rel, m.root
        UNION ALL
        SELECT m.rel, 'hole', format('trigger "%s" is disabled or fires for apply workers only', o.tgname),
               format('ALTER TABLE %s ENABLE TRIGGER %I;', m.rel, o.tgname)
          FROM own o JOIN tree m ON m.oid = o.tgrelid WHERE o.tgenabled NOT IN ('O', 'A')
        UNION ALL
        SELECT m.rel, 'hole', format('trigger "%s" runs after the fence and may change what it judged', t.tgname),
               format('ALTER TRIGGER %I ON %s RENAME TO %I;', t.tgname, m.rel, 'a_' || t.tgname)
          FROM pg_trigger t JOIN tree m ON m.oid = t.tgrelid
         WHERE t.tgfoid <> ours AND NOT t.tgisinternal AND t.tgtype & 3 = 3 AND t.tgtype & 20 <> 0 AND t.tgenabled <> 'D'
           AND t.tgname > 'fenced'
        UNION ALL
        SELECT m.rel, 'hole',
               format('%s may %s this table', g.name, CASE a.privilege_type WHEN 'TRIGGER' THEN 'create triggers on' ELSE 'truncate' END),
               format('REVOKE %s ON %s FROM %s;', a.privilege_type, m.rel, g.name)
          FROM tree m CROSS JOIN aclexplode(m.relacl) AS a
         CROSS JOIN LATERAL (SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END) AS g (name)
         WHERE a.grantee <> m.relowner AND (a.privilege_type = 'TRIGGER' OR a.privilege_type = 'TRUNCATE'
               AND NOT EXISTS (SELECT FROM own o WHERE o.tgrelid = m.oid AND o.tgtype & 32 <> 0))
        UNION ALL
        SELECT r.rel, 'notice', 'this table is bound to no lease: the holder of any lease can write it',
               format('SELECT %s.fence_protect(%L, lease => ''order:{id}'');', home, r.rel)
          FROM root r WHERE r.is_fenced AND r.lease IS NULL
        UNION ALL
        SELECT r.rel, 'hole', 'monotonic mode without a lease: a client passes with a token that it has read',
               format('SELECT %s.fence_protect(%L, mode => ''strict'');', home, r.rel)
          FROM root r WHERE r.is_fenced AND r.lease IS NULL AND r.mode = 'monotonic'
        UNION ALL
        SELECT r.rel, 'notice', format('column "%s", which the lease names, may be NULL: nobody can write such a row', a.attname),
               format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL;', r.rel, a.attname)
          FROM root r JOIN pg_attribute a ON a.attrelid = r.oid AND NOT a.attnotnull AND a.attname = ANY (fence.template_columns(r.lease)))
    SELECT f.rel, f.severity, f.finding, f.remedy FROM found f ORDER BY f.rel::text, f.severity, f.finding;

    FOR item IN
        SELECT DISTINCT t.tgrelid::regclass AS rel, a.attname
          FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
         CROSS JOIN LATERAL (SELECT fence.trigger_arguments(t.tgargs, t.tgnargs)) AS g (arguments)
          JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = coalesce(nullif(g.arguments[1], ''), 'fence')
         WHERE t.tgfoid = ours AND t.tgparentid = 0 AND t.tgrelid = coalesce(fence_audit.relation, t.tgrelid)
           AND NOT (fence.is_adopted() AND coalesce(g.arguments[3], '') <> '' AND g.arguments[2] <> 'strict')  -- adopted numbers
           AND c.relowner = to_regrole(quote_ident(current_user))  -- to read a table of somebody else's may run code of his
    LOOP
        EXECUTE format('SELECT max(%I) FROM %s', item.attname, item.rel) INTO highest;
        RETURN QUERY SELECT item.rel, 'notice'::text,
            format('rows hold fences up to %s, above the last token drawn here, %s', highest, last),
            format('SELECT %s.fence_new_epoch();', home) WHERE highest > last;
    END LOOP;
END
$$;
COMMENT ON FUNCTION fence_audit IS 'the ways around the fence of a table, or of all of the caller''s, each with its remedy';
SET search_path = pg_catalog, pg_temp;


-- Who may do what -----------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION fence.calls(OUT call regprocedure, OUT rank integer) RETURNS SETOF record
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT p.oid::regprocedure, g.rank
      FROM (VALUES (0, '{fenced,fence_protect,fence_unprotect,fence_audit}'::name[]), (1, '{lease_info,lease_check,fence_status}'),
                   (2, '{lease_acquire,lease_renew,lease_release,lease_guard}'),
                   (2, '{lease_acquire_all,lease_renew_all,lease_release_all,lease_guard_all}'),
                   (3, '{lease_adopt}'), (4, '{lease_revoke,lease_prune,lease_forget,lease_forget_older,fence_new_epoch,fence_stats_reset}'),
                   (5, '{fence_grant,fence_revoke}')) AS g (rank, names)
      JOIN pg_proc p ON p.proname = ANY (g.names)
      JOIN pg_proc t ON t.oid = fence.trigger_function() AND p.pronamespace = t.pronamespace AND p.proowner = t.proowner
$$;
COMMENT ON FUNCTION fence.calls IS 'the calls, and from which level on a role has them: 0 all roles, 5 the owner alone';

CREATE OR REPLACE FUNCTION fence.grants(OUT kind text, OUT object text, OUT rank integer) RETURNS SETOF record
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT 'FUNCTION', c.call::text, c.rank FROM fence.calls() AS c WHERE c.rank BETWEEN 1 AND 4
    UNION ALL
    SELECT 'TABLE', 'fence.leases', 1
    UNION ALL
    SELECT 'TABLE', c.oid::regclass::text, 4 FROM pg_class c
     WHERE c.relnamespace = 'fence'::regnamespace AND c.relkind IN ('r', 'S')  -- what a dump reads
$$;
COMMENT ON FUNCTION fence.grants IS 'all that fence_grant gives, from which level on';

CREATE OR REPLACE FUNCTION fence.check_role(role regrole, hint text) RETURNS name LANGUAGE plpgsql STABLE AS $$
DECLARE
    name CONSTANT pg_catalog.name := (SELECT r.rolname FROM pg_roles r WHERE r.oid = role);
BEGIN
    IF role IS NULL THEN
        PERFORM fence.refuse('22004', 'role must not be NULL', hint);
    ELSIF name IS NULL THEN
        PERFORM fence.refuse('42704', format('there is no role %s', role), 'Name one role: leases are not for PUBLIC.');
    END IF;
    RETURN name;
END
$$;
COMMENT ON FUNCTION fence.check_role IS 'the name of a role; refuses NULL and what is none';

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.home'), false); END $$;
CREATE OR REPLACE FUNCTION fence_grant(role regrole, level text DEFAULT 'worker', prefix text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    grantee CONSTANT name := fence.check_role(role, 'Name the role that is to use leases.');
    asked CONSTANT text := coalesce(level, 'worker');
    beginning CONSTANT text := coalesce(prefix, '');
    item record;
BEGIN
    IF fence.rank(asked) IS NULL THEN
        PERFORM fence.bad_argument('level', format('there is no level "%s"', asked), 'A level is monitor, worker, adopter or admin.');
    ELSIF asked = 'admin' AND beginning <> '' THEN
        PERFORM fence.bad_argument('prefix', 'an admin has all names, and no prefix',
            'What an admin does is done to all leases. Give the names of one prefix to a worker.');
    ELSIF octet_length(beginning) > 512 THEN
        PERFORM fence.bad_argument('prefix', 'a prefix is at most 512 bytes long', 'No name of a lease is longer.');
    END IF;
    -- What is recorded for a role without any privilege was recorded for an earlier role of that name.
    DELETE FROM fence.role_prefix p WHERE p.role = grantee AND NOT has_table_privilege(fence_grant.role, 'fence.leases', 'SELECT');
    INSERT INTO fence.role_prefix AS p VALUES (grantee, beginning, asked)
        ON CONFLICT ON CONSTRAINT role_prefix_pkey DO UPDATE SET level = EXCLUDED.level
        WHERE fence.rank(p.level) < fence.rank(EXCLUDED.level);
    FOR item IN SELECT g.* FROM fence.grants() AS g WHERE g.rank <= fence.rank(asked) LOOP
        EXECUTE format('GRANT %s ON %s %s TO %I', CASE item.kind WHEN 'TABLE' THEN 'SELECT' ELSE 'EXECUTE' END,
                       item.kind, item.object, grantee);
    END LOOP;
END
$$;
COMMENT ON FUNCTION fence_grant IS
    'lets a role see leases (monitor), use (worker), adopt (adopter) or administer them (admin): those with this prefix, or all';

CREATE OR REPLACE FUNCTION fence_revoke(role regrole, prefix text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    grantee CONSTANT name := fence.check_role(role, 'Name the role that is no longer to use leases.');
    item record;
BEGIN
    DELETE FROM fence.role_prefix p WHERE p.role = grantee AND p.prefix = coalesce(fence_revoke.prefix, p.prefix);
    IF prefix IS NOT NULL AND NOT FOUND THEN
        RAISE NOTICE USING MESSAGE = format('%I does not have the prefix "%s"', grantee, prefix),
            HINT = 'Only a prefix that was granted can be taken back, by its exact text.';
    ELSIF prefix IS NULL THEN
        FOR item IN SELECT g.* FROM fence.grants() AS g LOOP
            EXECUTE format('REVOKE ALL ON %s %s FROM %I', item.kind, item.object, grantee);
        END LOOP;
    END IF;
END
$$;
COMMENT ON FUNCTION fence_revoke IS 'takes back all that fence_grant gave to a role, or the names of one prefix';


-- What is left to the extension -----------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION lease_acquire_all(names text[], holder text DEFAULT NULL, ttl interval DEFAULT '30 s',
    metadata jsonb DEFAULT NULL, session boolean DEFAULT false) RETURNS bigint LANGUAGE sql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp AS $$ SELECT fence.left_out('lease_acquire_all()'); SELECT NULL::bigint $$;
COMMENT ON FUNCTION lease_acquire_all IS 'refused with 0A000: only the extension pg_fence has it';
CREATE OR REPLACE FUNCTION lease_renew_all(names text[], token bigint, ttl interval DEFAULT NULL) RETURNS bigint LANGUAGE sql
    SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$ SELECT fence.left_out('lease_renew_all()'); SELECT NULL::bigint $$;
COMMENT ON FUNCTION lease_renew_all IS 'refused with 0A000';
CREATE OR REPLACE FUNCTION lease_release_all(names text[], token bigint) RETURNS bigint LANGUAGE sql
    SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$ SELECT fence.left_out('lease_release_all()'); SELECT NULL::bigint $$;
COMMENT ON FUNCTION lease_release_all IS 'refused with 0A000';
CREATE OR REPLACE FUNCTION lease_guard_all(names text[], token bigint) RETURNS bigint LANGUAGE sql
    SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$ SELECT fence.left_out('lease_guard_all()'); SELECT NULL::bigint $$;
COMMENT ON FUNCTION lease_guard_all IS 'refused with 0A000';
CREATE OR REPLACE FUNCTION fence_stats_reset() RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$ SELECT fence.left_out('fence_stats_reset()') $$;
COMMENT ON FUNCTION fence_stats_reset IS 'refused with 0A000';
SET search_path = pg_catalog, pg_temp;


-- Taking it away --------------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION fence.uninstall() RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    fenced_tables CONSTANT text := (SELECT string_agg(DISTINCT t.tgrelid::regclass::text, ', ') FROM pg_trigger t
                                     WHERE t.tgfoid = fence.trigger_function() AND t.tgparentid = 0);
    calls CONSTANT text[] := ARRAY (SELECT c.call::text FROM fence.calls() AS c);
    call text;
BEGIN
    IF fenced_tables IS NOT NULL THEN
        PERFORM fence.refuse('2BP01', format('cannot uninstall pg_fence_lite: these tables are fenced: %s', fenced_tables),
            'Call fence_unprotect for each of them first.');
    END IF;
    DROP SCHEMA fence CASCADE;
    FOREACH call IN ARRAY calls LOOP
        EXECUTE format('DROP FUNCTION IF EXISTS %s', call);
    END LOOP;
END
$$;
COMMENT ON FUNCTION fence.uninstall IS 'takes pg_fence_lite out of the database, leases and all; refuses while a table is fenced';

-- Postgres lets PUBLIC execute every new function, and the installer's own default privileges may have let others in, even to
-- the state (Supabase has such for the roles of its API). Who was not let in by fence_grant goes. The functions of the schema
-- fence stay open: triggers and fence_audit call them with the rights of their callers, and where one runs with the owner's it
-- changes nothing and tells only what the caller may know. (The last token is no secret: PF003 tells it, too.)
DO $close$
DECLARE
    statement text;
    relation regclass;
BEGIN
    FOR statement IN
        WITH given AS (
            SELECT CASE g.kind WHEN 'FUNCTION' THEN g.object::regprocedure::oid ELSE g.object::regclass::oid END AS oid, p.role
              FROM fence.grants() AS g JOIN fence.role_prefix p ON fence.rank(p.level) >= g.rank),
        object AS (
            SELECT 'SCHEMA' AS kind, n.oid, n.oid::regnamespace::text AS name, n.nspowner AS owner, n.nspacl AS acl
              FROM pg_catalog.pg_namespace n WHERE n.nspname = 'fence'
            UNION ALL
            SELECT 'FUNCTION', p.oid, c.call::text, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
              FROM fence.calls() AS c JOIN pg_catalog.pg_proc p ON p.oid = c.call WHERE c.rank > 0
            UNION ALL
            SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid, c.oid::regclass::text, c.relowner, c.relacl
              FROM pg_catalog.pg_class c WHERE c.relnamespace = 'fence'::regnamespace AND c.relkind IN ('r', 'v', 'S'))
        SELECT DISTINCT format('REVOKE ALL ON %s %s FROM %s', o.kind, o.name,
                   CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END)
          FROM object o CROSS JOIN aclexplode(o.acl) AS a
         WHERE a.grantee <> o.owner AND NOT EXISTS (SELECT FROM given g WHERE g.oid = o.oid AND g.role = pg_get_userbyid(a.grantee))
    LOOP
        EXECUTE statement;
    END LOOP;
    SELECT 'DROP FUNCTION ' || string_agg(p.oid::regprocedure::text, ', ') INTO statement
      FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'fence'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL;
    IF statement IS NOT NULL THEN
        EXECUTE statement;
    END IF;
    GRANT USAGE ON SCHEMA fence TO PUBLIC;
    GRANT SELECT ON SEQUENCE fence.token_seq, fence.verdict_seq, fence.sweep_seq TO PUBLIC;
    -- As an extension of pg_tle: a dump is to carry the state, but not the marks of a start.
    BEGIN
        FOREACH relation IN ARRAY '{fence.token_seq,fence.database_identity_seq,fence.jump_token_seq,fence.jump_count_seq,
                                     fence.lease,fence.role_prefix}'::regclass[] LOOP
            PERFORM pg_extension_config_dump(relation, '');
        END LOOP;
    EXCEPTION WHEN feature_not_supported OR object_not_in_prerequisite_state OR insufficient_privilege THEN
        NULL;
    END;
    -- Where nothing was drawn yet: what a restore loads over this is another life's.
    IF pg_sequence_last_value('fence.token_seq') IS NULL THEN
        PERFORM fence.move_on(true);
        PERFORM setval('fence.jump_count_seq', 1, false);
    END IF;
END
$close$;

DO $$ BEGIN PERFORM set_config('search_path', current_setting('pg_fence.path'), false); END $$;
