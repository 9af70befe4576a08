-- The findings of fence_audit that belong to no table: on the extension's own objects, on leases and on names.

-- Reads only the catalogs, so any caller's fence_audit may call it.
CREATE FUNCTION fence.state_findings(about jsonb) RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET jit = off  -- compiling the query would take far longer than running it
AS $state_findings$
    WITH
    -- The extension's tables and sequences as they should be. This is the only list of them.
    expected (relname, persistence, key, columns) AS (
        VALUES ('token_seq'::name, 'p'::"char", NULL, NULL), ('dumped_token_seq', 'p', NULL, NULL),
               ('database_identity_seq', 'p', NULL, NULL), ('jump_token_seq', 'p', NULL, NULL),
               ('jump_count_seq', 'p', NULL, NULL), ('server_start_seq', 'u', NULL, NULL),
               ('lease', 'p', 'name, slot', 19),
               ('role_prefix', 'p', 'role, prefix', 3)),

    extension AS (
        SELECT * FROM pg_extension WHERE extname = 'pg_fence'),

    -- The objects of the extension.
    member AS (
        SELECT d.classid, d.objid, e.extnamespace FROM extension e JOIN pg_depend d ON d.refobjid = e.oid
         WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'),

    state AS (
        SELECT row_number() OVER (ORDER BY c.relname) AS n, c.oid, c.oid::regclass AS rel, c.relname, c.relkind,
               CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind, c.relpersistence, c.relowner,
               c.relacl, c.reltoastrelid, c.relrowsecurity OR c.relforcerowsecurity AS has_row_security,
               x.persistence, x.key, x.columns
          FROM member m
          JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid
          LEFT JOIN expected x ON x.relname = c.relname
         WHERE c.relkind IN ('r', 'S')),

    -- `step` is the position of a finding in the answer.
    altered (step, n, rel, severity, finding, remedy) AS (
        SELECT x.step, s.n, s.rel, x.severity, x.finding, x.remedy
          FROM state s
          LEFT JOIN LATERAL (
               SELECT concat_ws(', ',
                      CASE WHEN q.seqtypid <> 'int8'::regtype THEN 'AS ' || format_type(q.seqtypid, NULL) END,
                      CASE WHEN q.seqincrement <> 1 THEN 'INCREMENT ' || q.seqincrement END,
                      CASE WHEN q.seqmin <> 1 THEN 'MINVALUE ' || q.seqmin END,
                      CASE WHEN q.seqmax <> 9223372036854775807 THEN 'MAXVALUE ' || q.seqmax END,
                      CASE WHEN q.seqcache <> 1 THEN 'CACHE ' || q.seqcache END,
                      CASE WHEN q.seqcycle THEN 'CYCLE' END)
                 FROM pg_sequence q WHERE q.seqrelid = s.oid) AS sequence (changes) ON true
          LEFT JOIN LATERAL (
               SELECT c.relname::text, i.indisvalid AND i.indisready AND i.indislive
                 FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
                WHERE i.indrelid = s.oid AND i.indisprimary) AS k (name, is_valid) ON true
         CROSS JOIN LATERAL (VALUES (s.relname || '_pkey')) AS expected_key (name)
         CROSS JOIN LATERAL (VALUES
            (51, s.persistence = 'p' AND s.relpersistence <> 'p', 'hole',
             'this part of the state is unlogged: a crash empties it', format('ALTER %s %s SET LOGGED;', s.kind, s.rel)),
            (51, s.persistence = 'u' AND s.relpersistence <> 'u', 'hole',
             'this part of the state is logged: a crash does not empty it, and is not noticed',
             format('ALTER %s %s SET UNLOGGED;', s.kind, s.rel)),
            (52, sequence.changes <> '', 'notice',
             format('this sequence was altered (%s): pg_fence cannot work with it, or not for long', sequence.changes),
             format('ALTER SEQUENCE %s AS bigint INCREMENT 1 MINVALUE 1 MAXVALUE 9223372036854775807 CACHE 1 NO CYCLE;',
                 s.rel)),
            (53, s.relkind = 'r' AND k.name IS NULL, 'notice', 'its primary key is gone: pg_fence cannot work',
             format('ALTER TABLE %s ADD CONSTRAINT %I PRIMARY KEY (%s);', s.rel, expected_key.name, s.key)),
            (53, k.name <> expected_key.name, 'notice',
             format('its primary key has become "%s": pg_fence cannot work', k.name),
             format('ALTER TABLE %s RENAME CONSTRAINT "%s" TO %I;', s.rel, replace(k.name, '"', '""'),
                 expected_key.name)),
            (53, NOT k.is_valid, 'hole', 'its primary key is invalid: pg_fence may not find a row by it',
             format('REINDEX TABLE %s;', s.rel)),
            (55, s.has_row_security, 'notice',
             'row security is on: it keeps rows from dumps, and may keep them from fence.leases',
             format('ALTER TABLE %s DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY;', s.rel))
         ) AS x (step, applies, severity, finding, remedy)
         WHERE x.applies),

    -- The invalid indexes that a failed CREATE INDEX CONCURRENTLY or REINDEX CONCURRENTLY leaves.
    invalid_index AS (
        SELECT 54, row_number() OVER (ORDER BY s.n, i.indexrelid), s.rel, 'notice',
               format('index %s is invalid: nothing is found by it, but each write may have to maintain it',
                   i.indexrelid::regclass),
               format('DROP INDEX %s;', i.indexrelid::regclass)
          FROM state s JOIN pg_index i ON i.indrelid IN (s.oid, s.reltoastrelid)
         WHERE NOT i.indisvalid AND NOT i.indisprimary),

    -- A restore creates the extension without the added column, and COPY fails.
    added_column AS (
        SELECT 55, row_number() OVER (ORDER BY s.n, c.attnum), s.rel, 'notice',
               format('column "%s" was added: no row of this table is restored from a dump, unless it is added there before the data',
                   c.attname),
               format('ALTER TABLE %s DROP COLUMN %I;', s.rel, c.attname)
          FROM state s JOIN pg_attribute c ON c.attrelid = s.oid
         WHERE c.attnum > s.columns AND NOT c.attisdropped),

    -- pg_fence writes leases as PostgreSQL writes its catalogs, which supports none of these. While one exists,
    -- pg_fence refuses to write. (An addition of an added column is removed with the column.)
    addition AS (
        SELECT 56, row_number() OVER (ORDER BY s.n, x.what, x.name), s.rel, 'notice',
               format('%s "%s" %s: %s', x.what, x.name, x.how, CASE s.relname
                   WHEN 'lease' THEN 'until that is undone, pg_fence grants, renews and releases no lease'
                   ELSE 'it may change or refuse what is written here' END), x.remedy
          FROM state s
         CROSS JOIN LATERAL (
               SELECT 'trigger' AS what, t.tgname AS name, 'was added' AS how, format('DROP TRIGGER %I ON %s;', t.tgname, s.rel) AS remedy
                 FROM pg_trigger t
                WHERE t.tgrelid = s.oid AND NOT t.tgisinternal AND NOT EXISTS (
                      SELECT FROM member m WHERE m.classid = 'pg_proc'::regclass AND m.objid = t.tgfoid)
               UNION ALL
               SELECT 'rule', w.rulename, 'was added', format('DROP RULE %I ON %s;', w.rulename, s.rel)
                 FROM pg_rewrite w WHERE w.ev_class = s.oid
               UNION ALL
               SELECT 'constraint', k.conname, 'was added',
                      format('ALTER TABLE %s DROP CONSTRAINT %I;', k.conrelid::regclass, k.conname)
                 FROM pg_constraint k
                WHERE s.oid IN (k.conrelid, k.confrelid)
                  AND (k.contype IN ('c', 'f', 'x') OR k.contype IN ('p', 'u') AND k.condeferrable)
               UNION ALL
               SELECT 'index', c.relname, 'has an expression or a condition', format('DROP INDEX %s;', c.oid::regclass)
                 FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
                WHERE i.indrelid = s.oid AND i.indisvalid AND NOT i.indisexclusion
                  AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL)
               UNION ALL
               SELECT 'column', c.attname, 'was made NOT NULL or given a default',
                      format('ALTER TABLE %s ALTER %I DROP NOT NULL, ALTER %2$I DROP DEFAULT;', s.rel, c.attname)
                 FROM pg_attribute c
                WHERE c.attrelid = s.oid AND (c.attnotnull OR c.atthasdef)
                  AND c.attname IN ('holder', 'closing_token', 'ended_at', 'metadata', 'adopted_floor')
               ) AS x),

    -- Each session caches the prefixes until this trigger notifies it of a change.
    silent_trigger AS (
        SELECT 62, s.n, s.rel, 'notice',
               format('trigger "%s" %s: a prefix that is taken away may go on counting in sessions that are open',
                   x.name, CASE WHEN t.oid IS NULL THEN 'is gone' ELSE 'does not always fire' END),
               CASE WHEN t.oid IS NULL
                    THEN format('CREATE TRIGGER %I AFTER INSERT OR UPDATE OR DELETE ON %s '
                        'FOR EACH ROW EXECUTE FUNCTION %s(); ', x.name, s.rel, f.oid::regproc)
                    ELSE '' END
               || format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I;', s.rel, coalesce(t.tgname, x.name))
          FROM state s
         CROSS JOIN (VALUES ('changed'::name)) AS x (name)
          JOIN member m ON m.classid = 'pg_proc'::regclass
          JOIN pg_proc f ON f.oid = m.objid AND f.proname = 'role_prefix_changed'
          LEFT JOIN pg_trigger t ON t.tgrelid = s.oid AND t.tgfoid = f.oid
         WHERE s.relname = 'role_prefix' AND t.tgenabled IS DISTINCT FROM 'A'),

    -- Only the publisher can leave a table out, and the right publications are unknown here, so there is no remedy.
    subscribed AS (
        SELECT 48, row_number() OVER (ORDER BY s.n, u.subname), s.rel, 'hole',
               format('subscription "%s" writes %s (subscribe to a publication that names your tables: '
                   'ALTER SUBSCRIPTION %I SET PUBLICATION ...)', u.subname, CASE s.relname
                   WHEN 'lease' THEN 'the leases: a grant of the publisher''s replaces one of this server, '
                       'and two grants of one name stop the subscription'
                   WHEN 'role_prefix' THEN 'who may take which names: two records of one role stop the subscription'
                   ELSE 'this part of the state' END, u.subname), NULL
          FROM state s
          JOIN pg_subscription_rel r ON r.srrelid = s.oid
          JOIN pg_subscription u ON u.oid = r.srsubid),

    published AS (
        SELECT 49, row_number() OVER (ORDER BY p.pubname), (array_agg(s.rel ORDER BY s.n))[1], 'notice',
               format('publication "%s" publishes %s: they replace the grants of a subscriber that has pg_fence, '
                   'or stop its subscription%s', p.pubname,
                   CASE WHEN bool_or(s.relname = 'lease') THEN 'the leases of this server'
                        ELSE 'which names roles may take' END,
                   CASE WHEN p.puballtables THEN ' (publish your tables by name)' ELSE '' END),
               nullif(concat_ws(' ',
                   CASE WHEN bool_or(publishes.schema)
                        THEN format('ALTER PUBLICATION %I DROP TABLES IN SCHEMA %s;', p.pubname, min(c.relnamespace)::regnamespace) END,
                   format('ALTER PUBLICATION %I DROP TABLE ', p.pubname)
                       || string_agg(s.rel::text, ', ' ORDER BY s.n)
                          FILTER (WHERE publishes.by_name AND NOT p.puballtables) || ';'), '')
          FROM state s
          JOIN pg_class c ON c.oid = s.oid
         CROSS JOIN pg_publication p
         CROSS JOIN LATERAL (VALUES (
               EXISTS (SELECT FROM pg_publication_namespace x WHERE x.pnpubid = p.oid AND x.pnnspid = c.relnamespace),
               EXISTS (SELECT FROM pg_publication_rel x WHERE x.prpubid = p.oid AND x.prrelid = s.oid))
               ) AS publishes (schema, by_name)
         -- (Of a publication of all tables, those that are named are excluded.)
         WHERE s.relkind = 'r' AND (publishes.schema OR p.puballtables <> publishes.by_name)
         GROUP BY p.oid, p.pubname, p.puballtables),

    -- pglogical leaves nothing on a table, and not everybody may read its own tables. But everybody may read its
    -- origins, which are named after their subscription: pgl_, this database (16 bytes of its name, or 8 and a hash),
    -- the provider, the subscription.
    pglogical AS (
        SELECT 47, row_number() OVER (ORDER BY o.roname), NULL::regclass, 'notice',
               format('a subscription of pglogical ("%s") writes in this database, and triggers that are not enabled ALWAYS do not '
                   'fire for it', o.roname), NULL
          FROM pg_extension e
         CROSS JOIN pg_replication_origin o
         CROSS JOIN current_database() AS d (name)
         WHERE e.extname = 'pglogical'
           AND starts_with(o.roname, 'pgl_' || CASE WHEN d.name ~ '[^a-z0-9_]' THEN ''
                                                    WHEN length(d.name) > 16 THEN left(d.name, 8) ELSE d.name || '_' END)
           AND EXISTS (SELECT FROM pg_trigger t
                        WHERE t.tgfoid = (about->>'fenced_oid')::oid AND t.tgtype & 3 = 3 AND t.tgenabled = 'O')),

    clock_behind_tokens AS (
        SELECT 40, 1, s.rel, 'notice',
               format('the last token drawn is where the clock will be on %s: it once stood far ahead, '
                   'and the numbers up to there are spent; tokens go on from here, and none is handed out twice',
                   about->>'clock_catches_up'), NULL
          FROM state s
         WHERE s.relname = 'token_seq' AND about->>'clock_catches_up' IS NOT NULL),

    -- PUBLIC may call the trigger function, and the functions that take a table and have no rights but their caller's.
    object (kind, name, rel, is_public, owner, acl) AS (
        SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END,
               c.oid::regclass::text, c.oid::regclass, false, c.relowner, c.relacl
          FROM member m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid
         WHERE c.relkind IN ('r', 'S', 'v')
        UNION ALL
        SELECT 'FUNCTION', f.oid::regprocedure::text, NULL,
               f.pronamespace = m.extnamespace
               AND (f.oid = (about->>'fenced_oid')::oid OR f.proargtypes[0] = 'regclass'::regtype),
               f.proowner, coalesce(f.proacl, acldefault('f', f.proowner))
          FROM member m JOIN pg_proc f ON m.classid = 'pg_proc'::regclass AND f.oid = m.objid
        UNION ALL
        SELECT 'SCHEMA', quote_ident(h.nspname), NULL, false, h.nspowner, h.nspacl
          FROM member m JOIN pg_namespace h ON m.classid = 'pg_namespace'::regclass AND h.oid = m.objid),

    -- Only pg_fence's functions may write its tables, or draw a token without a lease.
    privilege (step, n, rel, severity, finding, remedy) AS (
        SELECT 58, row_number() OVER (ORDER BY x.rel IS NOT NULL, x.name, x.columns, a.n), x.rel,
               CASE WHEN a.privilege_type IN ('REFERENCES', 'CREATE') THEN 'notice' ELSE 'hole' END,
               format('%s has %s%s on %s, which is for pg_fence alone', g.quoted_name, a.privilege_type, x.columns,
                   x.name),
               format('REVOKE %s%s ON %s FROM %s CASCADE;', a.privilege_type, x.columns, x.name,
                   CASE WHEN a.grantor = x.owner THEN g.quoted_name ELSE quote_ident(pg_get_userbyid(a.grantor)) END)
          FROM (SELECT o.rel, o.kind || ' ' || o.name, '', o.owner, o.acl,
                       CASE WHEN o.kind = 'SCHEMA' THEN '{CREATE}'
                           WHEN o.kind = 'SEQUENCE' THEN '{USAGE,UPDATE}'
                           ELSE '{INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}' END::text[]
                  FROM object o WHERE o.kind IN ('TABLE', 'SEQUENCE', 'SCHEMA')
                UNION ALL
                SELECT o.rel, o.kind || ' ' || o.name, format(' (%I)', c.attname), o.owner, c.attacl,
                       '{INSERT,UPDATE,REFERENCES}'
                  FROM object o JOIN pg_attribute c ON c.attrelid = o.rel
                 WHERE o.kind = 'TABLE'
               ) AS x (rel, name, columns, owner, acl, reserved_privileges)
         CROSS JOIN aclexplode(x.acl) WITH ORDINALITY AS a (grantor, grantee, privilege_type, is_grantable, n)
          JOIN (SELECT 0::oid, 'PUBLIC'
                UNION ALL
                SELECT r.oid, quote_ident(r.rolname) FROM pg_roles r WHERE NOT r.rolsuper) AS g (oid, quoted_name)
            ON g.oid = a.grantee
         WHERE a.privilege_type = ANY (x.reserved_privileges) AND a.grantee <> x.owner),

    member_of_write_all_data AS (
        SELECT 59, row_number() OVER (ORDER BY g.rolname), c.oid::regclass, 'notice',
               format('%I is a member of pg_write_all_data, and may write the state of pg_fence', g.rolname),
               format('REVOKE pg_write_all_data FROM %I;', g.rolname)
          FROM extension e
         CROSS JOIN member m
          JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid AND c.relname = 'lease'
          JOIN pg_roles g ON g.oid IN (
               SELECT am.member FROM pg_auth_members am WHERE am.roleid = 'pg_write_all_data'::regrole)
         WHERE NOT g.rolsuper AND g.oid <> e.extowner AND EXISTS (
               SELECT FROM pg_roles login WHERE login.rolcanlogin AND pg_has_role(login.oid, g.oid, 'MEMBER'))),

    another_owner AS (
        SELECT 60, row_number() OVER (ORDER BY o.kind || ' ' || o.name), o.rel,
               CASE WHEN r.rolsuper THEN 'notice' ELSE 'hole' END,
               format('%s %s belongs to %I, not to the owner of pg_fence', o.kind, o.name, r.rolname),
               format('ALTER %s %s OWNER TO %I;', o.kind, o.name, pg_get_userbyid(e.extowner))
          FROM extension e
         CROSS JOIN object o
          JOIN pg_roles r ON r.oid = o.owner
         WHERE o.owner <> e.extowner),

    renamed_schema AS (
        SELECT 61, 1, NULL::regclass, 'notice',
               format('the schema "fence" is now named %s: a dump of this database does not load', o.name),
               format('ALTER SCHEMA %s RENAME TO fence;', o.name)
          FROM object o
         WHERE o.kind = 'SCHEMA' AND o.name <> quote_ident('fence')),

    -- (Writing is reported above.)
    public_privilege AS (
        SELECT 63, row_number() OVER (ORDER BY x.what, a.privilege_type), x.rel, 'notice',
               format('PUBLIC has %s on %s: leases are for the roles that fence_grant names', a.privilege_type, x.what),
               format('REVOKE %s ON %s FROM PUBLIC CASCADE;', a.privilege_type, x.what)
          FROM (SELECT o.rel, replace(o.kind, 'VIEW', 'TABLE') || ' ' || o.name, o.acl
                  FROM object o WHERE NOT o.is_public) AS x (rel, what, acl)
         CROSS JOIN aclexplode(x.acl) AS a
         WHERE a.grantee = 0 AND a.privilege_type IN ('SELECT', 'EXECUTE')),

    finding AS (
        SELECT * FROM altered
        UNION ALL SELECT * FROM invalid_index
        UNION ALL SELECT * FROM added_column
        UNION ALL SELECT * FROM addition
        UNION ALL SELECT * FROM silent_trigger
        UNION ALL SELECT * FROM subscribed
        UNION ALL SELECT * FROM published
        UNION ALL SELECT * FROM pglogical
        UNION ALL SELECT * FROM clock_behind_tokens
        UNION ALL SELECT * FROM privilege
        UNION ALL SELECT * FROM member_of_write_all_data
        UNION ALL SELECT * FROM another_owner
        UNION ALL SELECT * FROM renamed_schema
        UNION ALL SELECT * FROM public_privilege)
    SELECT jsonb_agg(to_jsonb(f) || jsonb_build_object('rel', f.rel::oid)) FROM finding f
$state_findings$;

COMMENT ON FUNCTION fence.state_findings(jsonb) IS
'findings on the tables and sequences of pg_fence, who owns them, and who may write them; called by fence_audit alone';


-- Its body has the view by oid, and it is called by oid.
--
-- The view needs some microseconds for the state of each lease that it shows. So leases without a finding are excluded
-- first, by conditions that the planner may push below the view's security barrier: these consist of operators, and of
-- arrays and values that are computed once.
CREATE FUNCTION fence.lease_findings() RETURNS jsonb LANGUAGE sql STABLE PARALLEL UNSAFE
BEGIN ATOMIC
    WITH found AS (
        SELECT DISTINCT x.finding, x.remedy
          FROM fence.leases l
          JOIN pg_catalog.pg_extension e ON e.extname OPERATOR(pg_catalog.=) 'pg_fence'
         CROSS JOIN LATERAL (VALUES
            (l.role OPERATOR(pg_catalog.<>) ALL (ARRAY(SELECT r.rolname FROM pg_catalog.pg_roles r)),
             pg_catalog.format('lease "%s" is held by role "%s", which is dropped or renamed: '
                 'its holder can neither renew nor release it', l.name, l.role),
             pg_catalog.format('SELECT %s.lease_revoke(%L);', e.extnamespace::pg_catalog.regnamespace, l.name)),
            -- The remaining time is the ttl, less the time since. (One second is allowed for clocks that are adjusted.)
            (l.renewed_at OPERATOR(pg_catalog.>)
                 (pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) interval '1 s'),
             pg_catalog.format('lease "%s" has more time left than its ttl: '
                 'the clock stood ahead when it was granted or renewed', l.name),
             pg_catalog.format('SELECT %s.lease_revoke(%L);', e.extnamespace::pg_catalog.regnamespace, l.name))
         ) AS x (applies, finding, remedy)
         WHERE (l.role OPERATOR(pg_catalog.<>) ALL (ARRAY(SELECT r.rolname FROM pg_catalog.pg_roles r))
                OR l.renewed_at OPERATOR(pg_catalog.>)
                   (SELECT pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) interval '1 s'))
           AND (l.state OPERATOR(pg_catalog.=) 'held' OR l.state OPERATOR(pg_catalog.=) 'uncommitted') AND x.applies),

    finding AS (
        SELECT 41 AS step, pg_catalog.row_number() OVER (ORDER BY f.finding) AS n,
               'fence.lease'::pg_catalog.regclass::pg_catalog.oid AS rel, 'notice' AS severity, f.finding, f.remedy
          FROM found f)
    SELECT pg_catalog.jsonb_agg(f) FROM finding f;
END;

COMMENT ON FUNCTION fence.lease_findings() IS
'findings on leases that are live; called by fence_audit alone';


-- Called if the caller may read fence.role_prefix. Its body has that table by oid, and it is called by oid.
CREATE FUNCTION fence.name_findings(triggers fence.trigger_arguments[], leases fence.lease_template[])
RETURNS jsonb LANGUAGE sql STABLE PARALLEL UNSAFE
BEGIN ATOMIC
    WITH RECURSIVE home (name) AS (
        SELECT e.extnamespace::pg_catalog.regnamespace FROM pg_catalog.pg_extension e
         WHERE e.extname OPERATOR(pg_catalog.=) 'pg_fence'),

    -- The roles that may take leases by a prefix.
    acquiring_role AS (
        SELECT p.role, p.prefix, p.level, r.oid
          FROM fence.role_prefix p JOIN pg_catalog.pg_roles r ON r.rolname OPERATOR(pg_catalog.=) p.role
         WHERE p.level OPERATOR(pg_catalog.<>) 'monitor' AND NOT r.rolsuper),

    -- The tables bound to leases, including partitions with the triggers of their root.
    bound AS (
        SELECT DISTINCT t.tgrelid AS oid, a.lease
          FROM pg_catalog.unnest(triggers) AS a
          JOIN pg_catalog.pg_trigger t ON t.oid OPERATOR(pg_catalog.=) a.trigger
         WHERE a.lease IS NOT NULL),

    -- The relations through which the rows of each can be written: the table, its parents, and views. (What is inserted
    -- into the parent of an inheritance child stays in the parent.)
    write_path (oid, lease, is_for_inserts) AS (
        SELECT b.oid, b.lease, true FROM bound b
        UNION
        SELECT x.oid, r.lease, r.is_for_inserts AND x.is_for_inserts
          FROM write_path r
         CROSS JOIN LATERAL (
               SELECT i.inhparent, c.relispartition
                 FROM pg_catalog.pg_inherits i
                 JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) i.inhrelid
                WHERE i.inhrelid OPERATOR(pg_catalog.=) r.oid
               UNION ALL
               SELECT v.oid, true
                 FROM pg_catalog.pg_depend d
                 JOIN pg_catalog.pg_rewrite w ON w.oid OPERATOR(pg_catalog.=) d.objid
                 JOIN pg_catalog.pg_class v ON v.oid OPERATOR(pg_catalog.=) w.ev_class
                WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_rewrite'::pg_catalog.regclass
                  AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass
                  AND d.refobjid OPERATOR(pg_catalog.=) r.oid AND v.relkind OPERATOR(pg_catalog.=) 'v'
               ) AS x (oid, is_for_inserts)),

    grant_of_lease AS (
        SELECT k.role, k.oid, k.prefix, k.level, l.lease
          FROM pg_catalog.unnest(leases) AS l
          JOIN acquiring_role k ON pg_catalog.starts_with(l.beginning, k.prefix)
            OR pg_catalog.cardinality(l.columns) OPERATOR(pg_catalog.>) 0
           AND pg_catalog.starts_with(k.prefix, l.beginning)),

    -- The prefixes by which a role may take the leases of the rows that it writes.
    needed AS MATERIALIZED (
        SELECT g.oid, g.prefix, g.lease FROM grant_of_lease g
         WHERE EXISTS (  -- (A member of the role takes leases by the role's grant, and may write by a right of its own.)
               SELECT FROM write_path r JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) r.oid
                 JOIN pg_catalog.pg_roles w ON NOT w.rolsuper AND pg_catalog.pg_has_role(w.oid, g.oid, 'USAGE')
                WHERE r.lease OPERATOR(pg_catalog.=) g.lease
                  AND (pg_catalog.pg_has_role(w.oid, c.relowner, 'USAGE')
                       OR pg_catalog.has_table_privilege(w.oid, c.oid, 'UPDATE, DELETE')
                       OR pg_catalog.has_any_column_privilege(w.oid, c.oid, 'UPDATE')
                       OR r.is_for_inserts AND pg_catalog.has_any_column_privilege(w.oid, c.oid, 'INSERT')))),

    finding (step, rel, finding, remedy) AS (
        -- A role that writes the table must be able to take its leases; other roles can only block its writers.
        -- Descendants of a table with the same lease are skipped, and a grant that the role needs for other tables is
        -- not revoked.
        SELECT 1, b.oid::pg_catalog.regclass,
               pg_catalog.format('role "%s" may take leases that this table is bound to ("%s"), and so keep out '
                   'those who write it; it does not write it itself', g.role, g.lease)
               OPERATOR(pg_catalog.||) CASE WHEN other.is_needed
                   THEN ' (but others by the same grant: grant it the names of those, then revoke this one)' ELSE '' END,
               CASE WHEN NOT other.is_needed THEN pg_catalog.format('SELECT %s.fence_revoke(%L, %L);',
                   h.name, pg_catalog.quote_ident(g.role), g.prefix) END
          FROM bound b
          JOIN grant_of_lease g ON g.lease OPERATOR(pg_catalog.=) b.lease
         CROSS JOIN LATERAL (
               SELECT EXISTS (SELECT FROM needed n WHERE n.oid OPERATOR(pg_catalog.=) g.oid
                                AND n.prefix OPERATOR(pg_catalog.=) g.prefix)) AS other (is_needed)
         CROSS JOIN home h
         WHERE g.level OPERATOR(pg_catalog.<>) 'admin'
           AND NOT EXISTS (
               SELECT FROM needed n
                WHERE n.oid OPERATOR(pg_catalog.=) g.oid AND n.lease OPERATOR(pg_catalog.=) g.lease)
           AND NOT EXISTS (
               SELECT FROM pg_catalog.pg_inherits i
                 JOIN bound p ON p.oid OPERATOR(pg_catalog.=) i.inhparent AND p.lease OPERATOR(pg_catalog.=) b.lease
                WHERE i.inhrelid OPERATOR(pg_catalog.=) b.oid)
        UNION
        SELECT 2, 'fence.role_prefix'::pg_catalog.regclass,
               pg_catalog.format('names that begin with "%s" are for role "%s", which is dropped or renamed: '
                   'a role that gets this name gets them', p.prefix, p.role),
               pg_catalog.format('DELETE FROM %s WHERE role = %L AND prefix = %L;',
                   'fence.role_prefix'::pg_catalog.regclass, p.role, p.prefix)
          FROM fence.role_prefix p
         WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname OPERATOR(pg_catalog.=) p.role)
        UNION
        SELECT 3, 'fence.role_prefix'::pg_catalog.regclass,
               pg_catalog.format('role "%s" monitors the server, and may take leases whose names begin with "%s"',
                   k.role, k.prefix),
               pg_catalog.format('SELECT %s.fence_revoke(%L), %s.fence_grant(%L, %L);',
                   h.name, pg_catalog.quote_ident(k.role), h.name, pg_catalog.quote_ident(k.role), 'monitor')
          FROM acquiring_role k CROSS JOIN home h
         WHERE pg_catalog.pg_has_role(k.oid, 'pg_monitor'::pg_catalog.name, 'USAGE')
           AND NOT EXISTS (SELECT FROM needed n WHERE n.oid OPERATOR(pg_catalog.=) k.oid))
    SELECT pg_catalog.jsonb_agg(f)
      FROM (SELECT 80 AS step, pg_catalog.row_number() OVER (ORDER BY o.step, o.rel::pg_catalog.text, o.finding) AS n,
                   o.rel::pg_catalog.oid, 'notice' AS severity, o.finding, o.remedy FROM finding o) AS f;
END;

COMMENT ON FUNCTION fence.name_findings(fence.trigger_arguments[], fence.lease_template[]) IS
'findings on who may take which names; called by fence_audit alone';
