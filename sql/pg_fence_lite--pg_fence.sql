-- From pg_fence_lite to the extension pg_fence, in one transaction, with live holders:
--
--   psql -1 -f pg_fence_lite--pg_fence.sql       as a superuser, once the library is installed
--
-- It waits until no transaction that has used a lease is open, and holds up new ones until it commits. What it keeps:
-- every lease with its tokens, holders and deadlines, tokens that are never lower, fenced tables, and what fence_grant gave.
-- The owner of pg_fence_lite, who had all calls, is made an admin of the extension, which is the superuser's.
-- A call that is under way meanwhile may fail once, because the function that it called is gone.
-- It fails, and changes nothing, where other objects depend on those of pg_fence_lite: drop them and create them again.

DO $move$
DECLARE
    home regnamespace;
    last bigint;
    dependent text;
    calls text[];
    call text;
    item record;
BEGIN
    -- From here on no operator or function of somebody else's is looked up.
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF current_setting('is_superuser') <> 'on' THEN
        RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'only a superuser can create the extension pg_fence';
    END IF;
    home := (SELECT p.pronamespace FROM pg_proc p WHERE p.oid = fence.trigger_function());
    SELECT string_agg(DISTINCT c.oid::regclass::text, ', ') INTO dependent
      FROM pg_depend d JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid JOIN pg_class c ON c.oid = r.ev_class
     WHERE d.refclassid = 'pg_class'::regclass AND c.relnamespace <> 'fence'::regnamespace
       AND d.refobjid IN (SELECT o.oid FROM pg_class o WHERE o.relnamespace = 'fence'::regnamespace);
    IF dependent IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = '2BP01', MESSAGE = format('other objects depend on pg_fence_lite: %s', dependent),
            HINT = 'Drop them, and create them again after this script.';
    END IF;

    -- A transaction that guards a lease, or has changed one, is still open, and has read or written this table.
    LOCK TABLE fence.lease IN ACCESS EXCLUSIVE MODE;
    CREATE TEMPORARY TABLE moved_lease ON COMMIT DROP AS SELECT * FROM fence.lease;
    CREATE TEMPORARY TABLE moved_prefix ON COMMIT DROP AS SELECT * FROM fence.role_prefix;
    -- A record counts for a role that has the calls; and who owned the edition had all of it, without a record.
    CREATE TEMPORARY TABLE moved_role ON COMMIT DROP AS
        SELECT p.role, p.level, p.prefix FROM moved_prefix p JOIN pg_roles r ON r.rolname = p.role
         WHERE has_table_privilege(r.oid, 'fence.leases', 'SELECT')
        UNION
        SELECT r.rolname, 'admin', '' FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
         WHERE n.nspname = 'fence' AND NOT r.rolsuper;
    -- Those that fence_protect made are attached by it again; those made by hand as they were.
    CREATE TEMPORARY TABLE moved_fence ON COMMIT DROP AS
        SELECT t.tgrelid::regclass AS rel, t.tgname, t.tgenabled, pg_get_triggerdef(t.oid) AS definition,
               fence.trigger_arguments(t.tgargs, t.tgnargs) AS arguments,
               t.tgnargs >= 2 AND t.tgname IN ('fenced', 'fenced_truncate') AS is_protected,
               (SELECT string_agg(e.name, ',') FROM (VALUES ('insert', 4), ('update', 16), ('delete', 8)) AS e (name, bit) WHERE t.tgtype & e.bit <> 0) AS events
          FROM pg_trigger t WHERE t.tgfoid = fence.trigger_function() AND t.tgparentid = 0;
    last := greatest(pg_sequence_last_value('fence.token_seq'), pg_sequence_last_value('fence.server_start_token_seq'));
    FOR item IN SELECT f.* FROM moved_fence f LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', item.tgname, item.rel);
    END LOOP;
    calls := ARRAY (SELECT c.call::text FROM fence.calls() AS c);
    DROP SCHEMA fence CASCADE;
    FOREACH call IN ARRAY calls LOOP
        EXECUTE format('DROP FUNCTION IF EXISTS %s', call);
    END LOOP;

    EXECUTE format('CREATE EXTENSION pg_fence SCHEMA %s', home);
    PERFORM setval(s.name, greatest(last, pg_sequence_last_value('fence.token_seq')))
       FROM unnest('{fence.token_seq,fence.dumped_token_seq}'::regclass[]) AS s (name);
    -- A new extension silences every token that is older than itself. Nobody can have been granted these leases meanwhile,
    -- so each grant that is current is renewed, or adopted, once more here, and its holder's tokens go on speaking.
    FOR item IN SELECT m.* FROM moved_lease m LOOP
        INSERT INTO fence.lease (name, slot, mode, slots, holder, session_label, role, first_token, renewal_tokens, closing_token,
                                 acquired_at, renewed_at, expires_at, ended_at, ttl_us, renewals, metadata, session_bound, adopted_floor)
        VALUES (item.name, 0, 'x', 0, item.holder, item.session_label, item.role, item.first_token,
                CASE WHEN item.closing_token IS NOT NULL OR item.adopted_floor IS NOT NULL THEN item.renewal_tokens
                     ELSE item.renewal_tokens[greatest(cardinality(item.renewal_tokens) - 14, 1):] || nextval('fence.token_seq') END,
                item.closing_token, item.acquired_at, item.renewed_at, item.expires_at, item.ended_at, item.ttl_us, item.renewals,
                item.metadata, false,
                CASE WHEN item.adopted_floor IS NOT NULL THEN coalesce(pg_sequence_last_value('fence.jump_token_seq'), 0) END);
    END LOOP;

    FOR item IN
        SELECT f.rel, max(f.arguments[1]) AS col, max(f.arguments[2]) AS mode, max(nullif(f.arguments[3], '')) AS lease,
               coalesce(max(nullif(f.arguments[5], '')),
                        concat_ws(',', max(f.events) FILTER (WHERE f.tgname = 'fenced'), max('truncate') FILTER (WHERE f.tgname = 'fenced_truncate'))) AS events,
               bool_or(f.tgenabled = 'A') AS fires_always
          FROM moved_fence f
         WHERE f.is_protected AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = f.rel AND c.relispartition)
         GROUP BY f.rel
    LOOP
        -- All arguments, with their types: so it is no function of the same name that somebody has put beside it.
        EXECUTE format('SELECT %s.fence_protect(%L::regclass, %L::name, %L::text, %L::text, %L::text, false, %L::boolean)',
            home, item.rel, item.col, item.mode, item.lease, item.events, item.fires_always);
    END LOOP;
    FOR item IN SELECT f.* FROM moved_fence f WHERE NOT f.is_protected LOOP
        EXECUTE item.definition;
        IF item.tgenabled <> 'O' THEN
            EXECUTE format('ALTER TABLE %s %s TRIGGER %I', item.rel, CASE item.tgenabled WHEN 'A' THEN 'ENABLE ALWAYS'
                WHEN 'R' THEN 'ENABLE REPLICA' ELSE 'DISABLE' END, item.tgname);
        END IF;
    END LOOP;

    FOR item IN SELECT r.* FROM moved_role r LOOP
        EXECUTE format('SELECT %s.fence_grant(%L::regrole, %L::text, %L::text)', home, quote_ident(item.role), item.level, nullif(item.prefix, ''));
    END LOOP;
END
$move$;
