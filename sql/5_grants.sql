-- The rights of roles. PUBLIC may call the trigger function, the three functions that require the owner of the table, and
-- the three that write its rows with their caller's rights. Everything else is granted role by role: by plain GRANTs, and
-- by the names that the role may see and take.

CREATE FUNCTION fence_grant(role regrole, level text DEFAULT 'worker', prefix text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $fence_grant$
DECLARE
    -- Each level includes the ones before it. src/rules/names.rs has its rights to names.
    levels CONSTANT text[] := '{monitor,worker,adopter,admin}';
    grantee CONSTANT text := (SELECT quote_ident(r.rolname) FROM pg_roles r WHERE r.oid = role);
    home CONSTANT oid := (SELECT e.extnamespace FROM pg_extension e WHERE e.extname = 'pg_fence');
    requested_level CONSTANT text := coalesce(level, 'worker');
    name_prefix CONSTANT text := coalesce(prefix, '');
    level_rank CONSTANT integer := array_position(levels, requested_level);
    item record;
BEGIN
    IF role IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'role must not be NULL',
            HINT = 'Name the role that is to use leases.';
    ELSIF grantee IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '42704', MESSAGE = format('there is no role %s', role),
            HINT = 'Name one role: leases are not for PUBLIC.';
    ELSIF level_rank IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('there is no level "%s"', requested_level),
            DETAIL = jsonb_build_object('argument', 'level'),
            HINT = format('The levels are %s.', array_to_string(levels, ', '));
    ELSIF requested_level = 'admin' AND name_prefix <> '' THEN
        RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'an admin has all names, and no prefix',
            DETAIL = jsonb_build_object('argument', 'prefix'),
            HINT = 'What an admin does is done to all leases. Give the names of one prefix to a worker.';
    ELSIF octet_length(name_prefix) > 512 THEN
        RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'a prefix is at most 512 bytes long',
            DETAIL = jsonb_build_object('argument', 'prefix'),
            HINT = 'Give a shorter one: no name of a lease is longer.';
    END IF;

    FOR item IN
        WITH member AS (
            SELECT d.classid, d.objid FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid
             WHERE e.extname = 'pg_fence' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'),
        needs (level, names) AS (VALUES
            ('monitor', '{leases,stats,lease_info,lease_check,fence_status,blocking_pids,queue_key,visible_grants,uncommitted_grants,grant_state,
                          checked_lease_name,is_visible,read_stats}'::name[]),
            ('worker', '{lease_acquire,lease_renew,lease_keep,lease_release,lease_acquire_all,lease_renew_all,lease_release_all,
                         lease_guard,lease_guard_all}'),
            ('adopter', '{lease_adopt}'),
            -- The relations are those of the extension that pg_dump reads.
            ('admin', '{lease_revoke,lease_evict,lease_prune,lease_forget,lease_forget_older,fence_new_epoch,fence_stats_reset,refusals,read_refusals,
                        lease,role_prefix,token_seq,dumped_token_seq,database_identity_seq,jump_token_seq,jump_count_seq}')),
        needed AS (
            SELECT n.name FROM needs, unnest(needs.names) AS n (name)
             WHERE array_position(levels, needs.level) <= level_rank)
        SELECT 'USAGE' AS privilege, 'SCHEMA' AS kind, objid, objid::regnamespace::text AS name
          FROM member WHERE classid = 'pg_namespace'::regclass
        UNION ALL
        SELECT 'SELECT', 'TABLE', objid, objid::regclass::text
          FROM member JOIN pg_class c ON classid = 'pg_class'::regclass AND c.oid = objid
         WHERE c.relname IN (SELECT n.name FROM needed n)
        UNION ALL
        SELECT 'EXECUTE', 'FUNCTION', objid, objid::regprocedure::text
          FROM member JOIN pg_proc p ON classid = 'pg_proc'::regclass AND p.oid = objid
         WHERE p.proname IN (SELECT n.name FROM needed n)
        UNION ALL
        SELECT NULL, 'TABLE', objid, objid::regclass::text
          FROM member JOIN pg_class c ON classid = 'pg_class'::regclass AND c.oid = objid
         WHERE c.relname = 'role_prefix'
         -- The schema comes before its content, so that a schema renamed meanwhile is reported as such.
         ORDER BY 1 DESC NULLS FIRST
    LOOP
        IF item.privilege IS NULL THEN
            -- Rows of a role without any privilege belong to an earlier role of that name.
            IF NOT EXISTS (SELECT FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid
                             JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
                            CROSS JOIN aclexplode(p.proacl) AS a
                            WHERE e.extname = 'pg_fence' AND d.refclassid = 'pg_extension'::regclass
                              AND d.deptype = 'e' AND a.grantee = role) THEN
                EXECUTE format('DELETE FROM %s AS p WHERE p.role = $1', item.name)
                  USING (SELECT r.rolname FROM pg_roles r WHERE r.oid = role);
            END IF;
            -- An unknown level, written by hand, ranks below all levels.
            EXECUTE format('INSERT INTO %s AS p (role, prefix, level) VALUES ($1, $2, $3)
                ON CONFLICT ON CONSTRAINT role_prefix_pkey DO UPDATE SET level = EXCLUDED.level
                WHERE coalesce(array_position($4, p.level), 0) < array_position($4, EXCLUDED.level)', item.name)
              USING (SELECT r.rolname FROM pg_roles r WHERE r.oid = role), name_prefix, requested_level, levels;
        ELSE
            EXECUTE format('GRANT %s ON %s %s TO %s', item.privilege, item.kind, item.name, grantee);
        END IF;
        -- The name may belong to another object by now.
        IF item.name <> (CASE item.kind WHEN 'SCHEMA' THEN item.objid::regnamespace::text
                WHEN 'TABLE' THEN item.objid::regclass::text ELSE item.objid::regprocedure::text END) THEN
            RAISE EXCEPTION USING ERRCODE = '40001', HINT = 'Call fence_grant again.',
                MESSAGE = format('cannot grant on %s: it was renamed meanwhile', item.name);
        END IF;
    END LOOP;

    -- Only the owner of the functions' schema, usually the installer, may grant USAGE on it.
    IF NOT has_schema_privilege(role, home, 'USAGE') THEN
        RAISE NOTICE USING MESSAGE = format('%s cannot yet look into the schema of the functions', grantee),
            HINT = format('GRANT USAGE ON SCHEMA %s TO %s;', home::regnamespace, grantee);
    END IF;
END
$fence_grant$;

COMMENT ON FUNCTION fence_grant(regrole, text, text) IS
'lets a role see leases (monitor), use them (worker), make others'' known too (adopter), or administer them (admin): those whose names begin with prefix, or all; never takes anything away';


CREATE FUNCTION fence_revoke(role regrole, prefix text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $fence_revoke$
DECLARE
    grantee CONSTANT text := (SELECT quote_ident(r.rolname) FROM pg_roles r WHERE r.oid = role);
    item record;
    deleted bigint;
BEGIN
    IF role IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'role must not be NULL',
            HINT = 'Name the role that is no longer to use leases.';
    ELSIF grantee IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '42704', MESSAGE = format('there is no role %s', role),
            HINT = 'Name a role that exists.';
    END IF;

    -- Revokes the names and, without a prefix, all that the role was granted of pg_fence.
    FOR item IN
        WITH member AS (
            SELECT d.classid, d.objid FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid
             WHERE e.extname = 'pg_fence' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'),
        object AS (
            SELECT 'FUNCTION' AS kind, objid, objid::regprocedure::text AS name, p.proacl AS acl
              FROM member JOIN pg_proc p ON classid = 'pg_proc'::regclass AND p.oid = objid
            UNION ALL
            SELECT 'TABLE', objid, objid::regclass::text, c.relacl
              FROM member JOIN pg_class c ON classid = 'pg_class'::regclass AND c.oid = objid
            UNION ALL
            SELECT 'SCHEMA', objid, objid::regnamespace::text, n.nspacl
              FROM member JOIN pg_namespace n ON classid = 'pg_namespace'::regclass AND n.oid = objid)
        SELECT false AS holds_names, o.kind, o.objid, o.name FROM object o
         WHERE prefix IS NULL AND EXISTS (SELECT FROM aclexplode(o.acl) AS a WHERE a.grantee = role)
        UNION ALL
        SELECT true, 'TABLE', objid, objid::regclass::text
          FROM member JOIN pg_class c ON classid = 'pg_class'::regclass AND c.oid = objid
         WHERE c.relname = 'role_prefix'
    LOOP
        IF item.holds_names THEN
            EXECUTE format('DELETE FROM %s AS p WHERE p.role = $1 AND ($2 IS NULL OR p.prefix = $2)', item.name)
              USING (SELECT r.rolname FROM pg_roles r WHERE r.oid = role), prefix;
            GET DIAGNOSTICS deleted = ROW_COUNT;
        ELSE
            EXECUTE format('REVOKE ALL ON %s %s FROM %s', item.kind, item.name, grantee);
        END IF;
        -- The name may belong to another object by now.
        IF item.name <> (CASE item.kind WHEN 'SCHEMA' THEN item.objid::regnamespace::text
                WHEN 'TABLE' THEN item.objid::regclass::text ELSE item.objid::regprocedure::text END) THEN
            RAISE EXCEPTION USING ERRCODE = '40001', HINT = 'Call fence_revoke again.',
                MESSAGE = format('cannot revoke what was granted on %s: it was renamed meanwhile', item.name);
        END IF;
    END LOOP;
    IF prefix IS NOT NULL AND deleted = 0 THEN
        RAISE NOTICE USING MESSAGE = format('%s does not have the prefix "%s"', grantee, prefix),
            HINT = 'Only a prefix that was granted can be taken back, by its exact text.';
    END IF;
END
$fence_revoke$;

COMMENT ON FUNCTION fence_revoke(regrole, text) IS
'takes back all that fence_grant gave to a role, or the names of one prefix';


-- Postgres lets PUBLIC execute every new function, and default privileges of the installer may have granted more, even
-- on the extension's tables. So all rights but the owner's are revoked; then PUBLIC gets the functions below.
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

-- fence_audit recognizes them by their first argument, a table: its owner calls three of them, and whoever may write it
-- the other three.
GRANT EXECUTE ON FUNCTION
    fenced(),
    fence_protect(regclass, name, text, text, text, boolean, boolean, name),
    fence_unprotect(regclass),
    fence_audit(regclass),
    lease_keep_rows(regclass, name[], jsonb[], bigint[], interval[], name, name),
    lease_guard_row(regclass, name[], jsonb, bigint, name, name),
    lease_release_rows(regclass, name[], jsonb[], bigint[], name, name)
TO PUBLIC;
