-- Moves from pg_fence_lite to the extension pg_fence in one transaction, while leases are held:
--
--   psql -1 -f pg_fence_lite--pg_fence.sql       as a superuser, once the library is installed
--
-- It waits for open transactions that have used a lease or fenced a table, and blocks new ones until it commits. It
-- keeps every lease with its tokens, holder and deadline, the token sequence, the fenced tables, and the rights of
-- fence_grant: such roles become workers of all names. A grant then belongs to the role whose session acquired it. The
-- owner of pg_fence_lite, who could call everything, becomes an admin of the extension, which belongs to the superuser.
-- A concurrent call may fail once, because the function that it called is gone. The script fails and changes nothing if
-- other objects depend on those of pg_fence_lite: drop them and create them again.

-- It moves what is committed when its wait is over, which an older snapshot does not show.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;

DO $move$
DECLARE
    home regnamespace;
    last bigint;
    dependent text;
    calls text;
    fenced regclass;
    item record;
BEGIN
    -- From here on no operator or function of another role is looked up, except those of the owner of pg_fence_lite.
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF current_setting('is_superuser') <> 'on' THEN
        RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'only a superuser can create the extension pg_fence',
            HINT = 'Run the script as a superuser.';
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'leases are moved at READ COMMITTED only',
            HINT = 'psql -1 -f pg_fence_lite--pg_fence.sql';
    END IF;
    SELECT p.pronamespace INTO home FROM fence_lite.calls() AS c JOIN pg_proc p ON p.oid = c.call WHERE p.proname = 'fenced';

    -- A transaction that guards a lease, has changed one or has fenced a table has locked this table until it ends.
    LOCK TABLE fence.lease IN ACCESS EXCLUSIVE MODE;
    CREATE TEMPORARY TABLE moved_lease ON COMMIT DROP AS SELECT * FROM fence.lease;
    -- While this waits for the lock of one table, a row may be claimed in another, which may be dropped, a role
    -- revoked, a view created. So the rest is read afterwards.
    CREATE TEMPORARY TABLE moved_fence (relation regclass, enabled "char", arguments text[]) ON COMMIT DROP;
    LOOP
        fenced := (SELECT min(t.relation::oid) FROM fence_lite.triggers() AS t WHERE t.parent = 0);
        EXIT WHEN fenced IS NULL;
        EXECUTE format('LOCK TABLE %s', fenced);
        FOR item IN SELECT t.* FROM fence_lite.triggers() AS t WHERE t.relation = fenced AND t.parent = 0 LOOP
            INSERT INTO moved_fence VALUES (item.relation, item.enabled, item.arguments);
            EXECUTE format('DROP TRIGGER %I ON %s', item.name, item.relation);
        END LOOP;
    END LOOP;
    last := pg_sequence_last_value('fence.token_seq');
    CREATE TEMPORARY TABLE moved_role ON COMMIT DROP AS
        SELECT r.oid::regrole AS role, 'worker' AS level FROM fence_lite.calls() AS c JOIN pg_proc p ON p.oid = c.call CROSS JOIN aclexplode(p.proacl) AS a
          JOIN pg_roles r ON r.oid = a.grantee WHERE p.proname = 'lease_acquire' AND a.grantee <> p.proowner
        UNION ALL
        SELECT r.oid, 'admin' FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner WHERE n.nspname = 'fence' AND NOT r.rolsuper;
    SELECT string_agg(DISTINCT c.oid::regclass::text, ', ') INTO dependent
      FROM pg_depend d JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid JOIN pg_class c ON c.oid = r.ev_class
     WHERE d.refclassid = 'pg_class'::regclass AND c.relnamespace <> 'fence'::regnamespace
       AND d.refobjid IN (SELECT o.oid FROM pg_class o WHERE o.relnamespace = 'fence'::regnamespace);
    IF dependent IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = '2BP01', MESSAGE = format('other objects depend on pg_fence_lite: %s', dependent),
            HINT = 'Drop them, and create them again after this script.';
    END IF;
    SELECT string_agg(c.call::text, ', ') INTO calls FROM fence_lite.calls() AS c WHERE c.call <> 'fence_lite.relies'::regproc;
    EXECUTE 'DROP FUNCTION ' || calls;
    DROP SCHEMA fence, fence_lite CASCADE;

    EXECUTE format('CREATE EXTENSION pg_fence SCHEMA %s', home);
    PERFORM setval(s.name, greatest(last, pg_sequence_last_value('fence.token_seq')))
       FROM unnest('{fence.token_seq,fence.dumped_token_seq}'::regclass[]) AS s (name);
    -- In a new extension no older token speaks. Nobody can have been granted these leases meanwhile, so each current
    -- grant is renewed here once, and its holder's tokens continue to speak.
    FOR item IN SELECT m.* FROM moved_lease m LOOP
        INSERT INTO fence.lease (name, slot, mode, slots, holder, session_label, role, first_token, renewal_tokens, closing_token,
                                 acquired_at, renewed_at, expires_at, ended_at, ttl_us, renewals, metadata, session_bound, adopted_floor)
        VALUES (item.name, 0, 'x', 0, item.holder, '', item.role, item.first_token,
                CASE WHEN item.closing_token IS NOT NULL THEN item.renewal_tokens
                     ELSE item.renewal_tokens[greatest(cardinality(item.renewal_tokens) - 14, 1):] || nextval('fence.token_seq') END,
                item.closing_token, item.acquired_at, item.renewed_at, item.expires_at, item.ended_at, item.ttl_us, item.renewals,
                item.metadata, false, NULL);
    END LOOP;

    -- The argument types are included, so that no other function of the same name is taken for it.
    FOR item IN
        SELECT f.relation, max(f.arguments[1]) AS col, max(f.arguments[2]) AS mode, max(f.arguments[3]) AS lease,
               max(f.arguments[4]) AS events, max(f.arguments[6]) AS deadline, bool_or(f.enabled = 'A') AS fires_always
          FROM moved_fence f WHERE f.arguments IS NOT NULL GROUP BY f.relation
    LOOP
        EXECUTE format('SELECT %s.fence_protect(%L::regclass, %L::name, %L::text, %L::text, %L::text, false, %L::boolean, %L::name)',
            home, item.relation, item.col, item.mode, item.lease, item.events, item.fires_always, item.deadline);
    END LOOP;
    FOR item IN SELECT r.* FROM moved_role r LOOP
        EXECUTE format('SELECT %s.fence_grant(%L::regrole, %L::text, NULL::text)', home, item.role, item.level);
    END LOOP;
END
$move$;
