-- Who may do what. PUBLIC gets the trigger function and the three functions that ask for ownership of the
-- table. Everything else is given role by role, by plain GRANTs that a dump carries.

CREATE FUNCTION fence_grant(role regrole, admin boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $fence_grant$
DECLARE
    grantee CONSTANT text := (SELECT quote_ident(r.rolname) FROM pg_roles r WHERE r.oid = role);
BEGIN
    IF role IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'role must not be NULL',
            HINT = 'Name the role that is to use leases.';
    ELSIF grantee IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '42704', MESSAGE = format('there is no role %s', role),
            HINT = 'Name one role: leases are not for PUBLIC.';
    END IF;

    EXECUTE format('GRANT USAGE ON SCHEMA fence TO %s', grantee);
    EXECUTE format('GRANT SELECT ON fence.leases, fence.stats TO %s', grantee);
    -- What pg_dump reads of the state: without this, whoever owns a database but not the server could not dump it.
    EXECUTE format('GRANT SELECT ON fence.lease, fence.token_seq, fence.database_identity_seq, '
        'fence.jump_token_seq, fence.jump_count_seq TO %s', grantee);
    EXECUTE 'GRANT EXECUTE ON FUNCTION
        @extschema@.lease_acquire(text, text, interval, interval, jsonb, boolean, integer, boolean, boolean),
        @extschema@.lease_renew(text, bigint, interval),
        @extschema@.lease_release(text, bigint),
        @extschema@.lease_acquire_all(text[], text, interval, jsonb, boolean),
        @extschema@.lease_renew_all(text[], bigint, interval),
        @extschema@.lease_release_all(text[], bigint),
        @extschema@.lease_guard(text, bigint),
        @extschema@.lease_check(text, bigint),
        @extschema@.lease_info(text, bigint),
        @extschema@.fence_status(),
        fence.blocking_pids(text, integer),
        fence.uncommitted_grants(text),
        fence.as_shown(fence.lease),
        fence.max_column_value(regclass, integer),
        fence.checked_lease_name(text, bigint),
        fence.session_alive(bigint),
        fence.read_stats()
        TO ' || grantee;
    IF admin THEN
        EXECUTE 'GRANT EXECUTE ON FUNCTION
            @extschema@.lease_revoke(text),
            @extschema@.lease_prune(interval),
            @extschema@.fence_new_epoch(),
            @extschema@.fence_stats_reset(),
            fence.read_refusals()
            TO ' || grantee;
        EXECUTE format('GRANT SELECT ON fence.refusals TO %s', grantee);
    END IF;

    -- The schema of the functions is the installer's, who alone decides who may look into it.
    IF NOT has_schema_privilege(role, '@extschema@'::regnamespace, 'USAGE') THEN
        RAISE NOTICE USING MESSAGE = format('%s cannot yet look into the schema of the functions', grantee),
            HINT = 'GRANT USAGE ON SCHEMA @extschema@ TO ' || grantee || ';';
    END IF;
END
$fence_grant$;

COMMENT ON FUNCTION fence_grant(regrole, boolean) IS
'lets a role use leases and dump them, with admin also end those of others; never takes anything away';


CREATE FUNCTION fence_revoke(role regrole) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $fence_revoke$
DECLARE
    grantee CONSTANT text := (SELECT quote_ident(r.rolname) FROM pg_roles r WHERE r.oid = role);
BEGIN
    IF role IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'role must not be NULL',
            HINT = 'Name the role that is no longer to use leases.';
    ELSIF grantee IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '42704', MESSAGE = format('there is no role %s', role),
            HINT = 'Name a role that exists.';
    END IF;

    EXECUTE 'REVOKE ALL ON FUNCTION
        @extschema@.lease_acquire(text, text, interval, interval, jsonb, boolean, integer, boolean, boolean),
        @extschema@.lease_renew(text, bigint, interval),
        @extschema@.lease_release(text, bigint),
        @extschema@.lease_acquire_all(text[], text, interval, jsonb, boolean),
        @extschema@.lease_renew_all(text[], bigint, interval),
        @extschema@.lease_release_all(text[], bigint),
        @extschema@.lease_guard(text, bigint),
        @extschema@.lease_check(text, bigint),
        @extschema@.lease_info(text, bigint),
        @extschema@.lease_revoke(text),
        @extschema@.lease_prune(interval),
        @extschema@.fence_new_epoch(),
        @extschema@.fence_status(),
        fence.blocking_pids(text, integer),
        fence.uncommitted_grants(text),
        fence.as_shown(fence.lease),
        fence.max_column_value(regclass, integer),
        fence.checked_lease_name(text, bigint),
        fence.session_alive(bigint),
        fence.read_stats(),
        fence.read_refusals(),
        @extschema@.fence_stats_reset()
        FROM ' || grantee;
    EXECUTE format('REVOKE ALL ON fence.leases, fence.stats, fence.refusals, fence.lease, fence.token_seq, fence.database_identity_seq, '
        'fence.jump_token_seq, fence.jump_count_seq FROM %s', grantee);
    EXECUTE format('REVOKE ALL ON SCHEMA fence FROM %s', grantee);
END
$fence_revoke$;

COMMENT ON FUNCTION fence_revoke(regrole) IS 'takes back what fence_grant gave, with and without admin';


-- Postgres lets PUBLIC execute every new function, and the installer's own default privileges may have let
-- others in, even to the state. Whoever is not the owner goes; then the four are given.
DO $closed$
DECLARE
    script_path CONSTANT text := pg_catalog.current_setting('search_path');
    statement text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    FOR statement IN
        WITH member AS (
            SELECT m.classid, m.objid
              FROM pg_depend home
              JOIN pg_depend m ON m.refclassid = home.refclassid AND m.refobjid = home.refobjid AND m.deptype = 'e'
             WHERE home.classid = 'pg_namespace'::regclass AND home.objid = 'fence'::regnamespace
               AND home.refclassid = 'pg_extension'::regclass AND home.deptype = 'e'),
        object AS (
            SELECT 'SCHEMA' AS kind, quote_ident(nspname) AS name, nspowner AS owner,
                   coalesce(nspacl, acldefault('n', nspowner)) AS acl
              FROM member JOIN pg_namespace o ON classid = 'pg_namespace'::regclass AND o.oid = objid
            UNION ALL
            SELECT 'FUNCTION', o.oid::regprocedure::text, proowner, coalesce(proacl, acldefault('f', proowner))
              FROM member JOIN pg_proc o ON classid = 'pg_proc'::regclass AND o.oid = objid
            UNION ALL
            SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, o.oid::regclass::text, relowner,
                   coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner))
              FROM member JOIN pg_class o ON classid = 'pg_class'::regclass AND o.oid = objid
             WHERE relkind IN ('r', 'v', 'S')
            UNION ALL
            SELECT 'TYPE', o.oid::regtype::text, typowner, coalesce(typacl, acldefault('T', typowner))
              FROM member JOIN pg_type o ON classid = 'pg_type'::regclass AND o.oid = objid
              JOIN pg_class c ON c.oid = o.typrelid AND c.relkind = 'c')
        SELECT DISTINCT format('REVOKE ALL ON %s %s FROM %s CASCADE', kind, name,
                   CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END)
          FROM object CROSS JOIN aclexplode(acl) AS a
         WHERE a.grantee <> owner
    LOOP
        EXECUTE statement;
    END LOOP;
    PERFORM pg_catalog.set_config('search_path', script_path, true);
END
$closed$;

GRANT EXECUTE ON FUNCTION
    fenced(),
    fence_protect(regclass, name, text, text, text, boolean, boolean),
    fence_unprotect(regclass),
    fence_audit(regclass)
TO PUBLIC;
