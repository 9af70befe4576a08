-- Who may do what. PUBLIC gets the trigger function and the three functions that ask for ownership of the
-- table. Everything else is given role by role, by plain GRANTs that a dump carries.

CREATE FUNCTION fence_grant(role regrole, admin boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $fence_grant$
DECLARE
    grantee CONSTANT text := (SELECT quote_ident(r.rolname) FROM pg_roles r WHERE r.oid = role);
    home CONSTANT oid := (SELECT e.extnamespace FROM pg_extension e WHERE e.extname = 'pg_fence');
    item record;
BEGIN
    IF role IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'role must not be NULL',
            HINT = 'Name the role that is to use leases.';
    ELSIF grantee IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '42704', MESSAGE = format('there is no role %s', role),
            HINT = 'Name one role: leases are not for PUBLIC.';
    END IF;

    FOR item IN
        WITH part AS (
            SELECT d.classid, d.objid FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid
             WHERE e.extname = 'pg_fence' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e')
        SELECT 'USAGE' AS privilege, 'SCHEMA' AS kind, objid, objid::regnamespace::text AS name
          FROM part WHERE classid = 'pg_namespace'::regclass
        UNION ALL
        SELECT 'SELECT', 'TABLE', objid, objid::regclass::text
          FROM part JOIN pg_class c ON classid = 'pg_class'::regclass AND c.oid = objid
         WHERE c.relname IN ('leases', 'stats',
               -- What pg_dump reads of the state: without this, whoever owns a database but not the server could not
               -- dump it.
               'lease', 'token_seq', 'database_identity_seq', 'jump_token_seq', 'jump_count_seq')
            OR admin AND c.relname = 'refusals'
        UNION ALL
        SELECT 'EXECUTE', 'FUNCTION', objid, objid::regprocedure::text
          FROM part JOIN pg_proc p ON classid = 'pg_proc'::regclass AND p.oid = objid
         WHERE p.proname IN ('lease_acquire', 'lease_renew', 'lease_release', 'lease_acquire_all', 'lease_renew_all',
               'lease_release_all', 'lease_guard', 'lease_check', 'lease_info', 'fence_status',
               'blocking_pids', 'uncommitted_grants', 'as_shown', 'checked_lease_name', 'session_alive', 'read_stats')
            OR admin AND p.proname IN ('lease_revoke', 'lease_prune', 'fence_new_epoch', 'fence_stats_reset',
               'read_refusals')
    LOOP
        EXECUTE format('GRANT %s ON %s %s TO %s', item.privilege, item.kind, item.name, grantee);
        -- The name may have become another object's by then.
        IF item.name <> (CASE item.kind WHEN 'SCHEMA' THEN item.objid::regnamespace::text
                WHEN 'TABLE' THEN item.objid::regclass::text ELSE item.objid::regprocedure::text END) THEN
            RAISE EXCEPTION USING ERRCODE = '40001', HINT = 'Call fence_grant again.',
                MESSAGE = format('cannot grant %s on %s: it was renamed meanwhile', item.privilege, item.name);
        END IF;
    END LOOP;

    -- The schema of the functions is the installer's, who alone decides who may look into it.
    IF NOT has_schema_privilege(role, home, 'USAGE') THEN
        RAISE NOTICE USING MESSAGE = format('%s cannot yet look into the schema of the functions', grantee),
            HINT = format('GRANT USAGE ON SCHEMA %s TO %s;', home::regnamespace, grantee);
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
    item record;
BEGIN
    IF role IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'role must not be NULL',
            HINT = 'Name the role that is no longer to use leases.';
    ELSIF grantee IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '42704', MESSAGE = format('there is no role %s', role),
            HINT = 'Name a role that exists.';
    END IF;

    -- All that the role was given of what belongs to pg_fence.
    FOR item IN
        WITH part AS (
            SELECT d.classid, d.objid FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid
             WHERE e.extname = 'pg_fence' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'),
        object AS (
            SELECT 'FUNCTION' AS kind, objid, objid::regprocedure::text AS name, p.proacl AS acl
              FROM part JOIN pg_proc p ON classid = 'pg_proc'::regclass AND p.oid = objid
            UNION ALL
            SELECT 'TABLE', objid, objid::regclass::text, c.relacl
              FROM part JOIN pg_class c ON classid = 'pg_class'::regclass AND c.oid = objid
            UNION ALL
            SELECT 'SCHEMA', objid, objid::regnamespace::text, n.nspacl
              FROM part JOIN pg_namespace n ON classid = 'pg_namespace'::regclass AND n.oid = objid)
        SELECT o.* FROM object o
         WHERE EXISTS (SELECT FROM aclexplode(o.acl) AS a WHERE a.grantee = role)
    LOOP
        EXECUTE format('REVOKE ALL ON %s %s FROM %s', item.kind, item.name, grantee);
        -- The name may have become another object's by then.
        IF item.name <> (CASE item.kind WHEN 'SCHEMA' THEN item.objid::regnamespace::text
                WHEN 'TABLE' THEN item.objid::regclass::text ELSE item.objid::regprocedure::text END) THEN
            RAISE EXCEPTION USING ERRCODE = '40001', HINT = 'Call fence_revoke again.',
                MESSAGE = format('cannot revoke what was granted on %s: it was renamed meanwhile', item.name);
        END IF;
    END LOOP;
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
