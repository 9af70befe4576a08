-- The bypasses of the fences that the catalogs show, each with the statement that closes it.
--
-- The audit runs with the rights of its caller, so it shows what the caller may see. It reads the catalogs, which
-- everybody may read, and for one question the fenced tables themselves.
--
-- The library calls the parts of the audit one after the other (if SQL called them, PUBLIC would need EXECUTE). Each
-- part gets `about`, all that is known so far.
--
-- from the library:
--     relation            the table, if one was named
--     fenced_oid          fenced()
--     placeholder_types   the types of columns that may be in the name of a lease
--     column_comment, deadline_comment   by which fence and deadline columns are recognized
--     has_adopted_leases  true if leases are adopted in this database
-- from audit_tables:
--     home                the schema of the functions, for statements that are shown and not run
--     refill_body         the body of a DO, for the same
--     uses_leases, reads_leases   true if the caller may use leases, and may read fence.leases
--     own_triggers, other_triggers   the triggers of tables: those that call fenced(), and others
--     roots, members      the tables, and these with their descendants
--     fences              how the fence of each root should be
--     checked_members     the members to check
--     former_partitions   tables that may be detached partitions
--     placeholders, swapped   the columns in the names of leases, and those that have swapped their names
--     trigger_repairs     the statements that repair triggers
--     fence_columns       the columns whose highest fence is needed
-- from the library:
--     highest_fences      the highest fence of each of these
--     last_token          the last token; for callers that may use leases, and not on a standby
--     clock_catches_up    the date on which the clock reaches the last token, if that is not soon
--     new_epoch_token     the number to which a new epoch would advance the tokens
--
-- Parts pass tables to each other by oid: a table may be dropped meanwhile, and its name could not be resolved then,
-- nor in a schema for which the caller lacks USAGE. (Each part lists the columns that it reads, because a type in
-- schema fence would need USAGE.)
--
-- Each part returns an array of findings, with numbers to sort by: `root_n` and `member_n` are those of the tables,
-- `step` that of the kind of finding, `n` counts those of one kind. The last part, audit_answer, sorts them: by table,
-- each with its descendants; then the fence as a whole; finally what belongs to no single table.
--
-- 'hole': a role that is neither superuser nor owner can land a stale write. 'notice': only these can, or something
-- that an administrator has set up; or a limit to know of. The remedies of an answer can be run one after the other, in
-- the given order. They contain no comments, because a name with a newline would end the comment and be run. Advice is
-- part of the finding.

CREATE TYPE fence.audit_finding AS (relation regclass, severity text, finding text, remedy text);

COMMENT ON TYPE fence.audit_finding IS 'a row of fence_audit';
COMMENT ON COLUMN fence.audit_finding.relation IS 'the table; NULL where all fenced tables are meant';
COMMENT ON COLUMN fence.audit_finding.severity IS
'hole: somebody who is neither superuser nor owner can land a stale write; notice: only one of these can, or a limit to know of';
COMMENT ON COLUMN fence.audit_finding.finding IS 'what is wrong';
COMMENT ON COLUMN fence.audit_finding.remedy IS 'the statement that closes it, to be run as it stands; NULL where there is none';

CREATE FUNCTION fence_audit(relation regclass DEFAULT NULL) RETURNS SETOF fence.audit_finding
LANGUAGE c COST 100000 ROWS 10 AS 'MODULE_PATHNAME', 'fence_audit';

COMMENT ON FUNCTION fence_audit(regclass) IS
'the ways left around the fence of a table, or of all of the caller''s, that the catalogs show, each with its remedy';


-- The state of the tables: the tables to audit, with their descendants and triggers; how the fence of each should be; and
-- the statements that repair triggers.
CREATE FUNCTION fence.audit_tables(about jsonb, triggers fence.trigger_arguments[], leases fence.lease_template[])
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET jit = off  -- compiling the query would take far longer than running it
AS $audit_tables$
WITH RECURSIVE
requested AS (SELECT (about->>'relation')::oid AS relation),

event (n, name, bit) AS (
    VALUES (1, 'insert', 4), (2, 'update', 16), (3, 'delete', 8), (4, 'truncate', 32)),

-- The three triggers that fence_protect creates. In tgtype, bit 1 is FOR EACH ROW and bit 2 is BEFORE.
trigger_kind (bits, tgname) AS (
    VALUES (3, 'fenced'::name), (2, 'fenced_truncate'), (1, 'fenced_verify')),

-- The triggers that call fenced(), with their arguments.
own_trigger AS (
    SELECT t.oid, t.tgrelid, t.tgname, t.tgparentid, t.tgenabled, t.tgtype, t.tgtype & 3 AS bits, t.tgnargs,
           t.tgqual IS NOT NULL OR t.tgattr::text <> '' AS skips_writes,
           a.fence_column, a.mode, a.lease, a.deadline, a.has_unfenced_insert
      FROM pg_trigger t
      JOIN unnest(triggers) AS a ON a.trigger = t.oid),

other_trigger AS (
    SELECT t.oid, t.tgrelid, t.tgname, t.tgparentid, t.tgenabled, t.tgtype, t.tgfoid,
           k.bits AS replaces,  -- the kind of trigger whose name it has
           -- Postgres's own triggers change no row; neither does the one that keeps rows out of the root of a
           -- hypertable.
           p.pronamespace = 'pg_catalog'::regnamespace OR p.proname = 'insert_blocker' AND EXISTS (
               SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
                WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
                  AND d.refclassid = 'pg_extension'::regclass AND e.extname = 'timescaledb') AS changes_no_row
      FROM pg_trigger t
      JOIN pg_proc p ON p.oid = t.tgfoid
      LEFT JOIN trigger_kind k ON k.tgname = t.tgname
     WHERE t.tgfoid <> (about->>'fenced_oid')::oid AND NOT t.tgisinternal),

-- The events for which a table has a trigger of pg_fence before and after the write.
covered_events AS (
    SELECT x.oid, coalesce(array_agg(x.name ORDER BY x.n) FILTER (WHERE x.before), '{}') AS before,
           coalesce(array_agg(x.name ORDER BY x.n) FILTER (WHERE x.after), '{}') AS after
      FROM (SELECT t.tgrelid AS oid, e.n, e.name,
                   bool_or(t.bits = CASE e.name WHEN 'truncate' THEN 2 ELSE 3 END) AS before,
                   bool_or(t.bits = 1) AS after
              FROM own_trigger t JOIN event e ON t.tgtype & e.bit <> 0
             GROUP BY t.tgrelid, e.n, e.name) AS x
     GROUP BY x.oid),

-- The fenced tables on which another trigger has a name of the fence's. A role that may create triggers may replace
-- those of the fence and keep their names; if all are replaced, the fence column still shows that the table was fenced.
with_replaced_trigger AS (
    SELECT DISTINCT t.tgrelid AS oid
      FROM other_trigger t JOIN pg_attribute a ON a.attrelid = t.tgrelid
     WHERE t.replaces IS NOT NULL AND a.attnum > 0 AND a.atttypid = 'int8'::regtype
       AND (a.attname = 'fence' OR col_description(a.attrelid, a.attnum) = about->>'column_comment')),

-- The tables to audit, before it is known which of them are children of others.
audited_table AS (
    SELECT a.relation AS oid FROM requested a WHERE a.relation IS NOT NULL
    UNION
    SELECT t.tgrelid FROM own_trigger t WHERE about->>'relation' IS NULL
    UNION
    SELECT u.oid FROM with_replaced_trigger u WHERE about->>'relation' IS NULL
    UNION  -- known only by the comment on their column, as a restore without triggers leaves them
    SELECT d.objoid FROM pg_description d
     WHERE about->>'relation' IS NULL AND d.classoid = 'pg_class'::regclass AND d.objsubid > 0
       AND d.description = about->>'column_comment' AND NOT EXISTS (  -- its fenced children are reported instead
           SELECT FROM pg_inherits i JOIN own_trigger t ON t.tgrelid = i.inhrelid WHERE i.inhparent = d.objoid)),

-- The trigger whose options count: one that fence_protect has created with all arguments, or else one made by hand; if
-- the table has none, one of a parent or child.
chosen_trigger AS (
    SELECT DISTINCT ON (s.oid) s.oid, t.tgrelid = s.oid AS is_own, t.fence_column, t.mode, t.lease, t.deadline,
           t.has_unfenced_insert
      FROM audited_table s
     CROSS JOIN LATERAL (
           SELECT s.oid
           UNION SELECT i.inhparent FROM pg_inherits i WHERE i.inhrelid = s.oid
           UNION SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = s.oid) AS related (oid)
      JOIN own_trigger t ON t.tgrelid = related.oid
     ORDER BY s.oid, t.tgrelid = s.oid DESC, t.tgnargs > 1 AND t.tgname IN (SELECT k.tgname FROM trigger_kind k) DESC,
              t.bits DESC, t.tgnargs DESC, t.tgname),

-- The requested table, or each of the caller's tables that has no fenced parent.
root AS (
    SELECT row_number() OVER (ORDER BY c.oid::regclass::text) AS root_n, c.oid AS root,
           c.oid AS root_rel, c.relowner AS root_owner,
           c.relkind = 'p' OR c.relispartition AS moves_rows,
           coalesce(pg_partition_root(c.oid)::oid, c.oid) AS top,  -- the table that fence_protect takes
           coalesce(t.is_own, false) AS is_fenced,
           c.oid IN (SELECT u.oid FROM with_replaced_trigger u) AS root_has_replaced_trigger,
           coalesce(t.fence_column, (
                SELECT a.attname::text FROM pg_attribute a
                 WHERE a.attrelid = c.oid AND col_description(c.oid, a.attnum) = about->>'column_comment'
                 ORDER BY a.attnum DESC LIMIT 1), 'fence') AS fence_column,
           coalesce(t.mode, 'strict') AS mode, t.lease, t.deadline,
           coalesce(t.has_unfenced_insert, false) AS has_unfenced_insert
      FROM audited_table s
      JOIN pg_class c ON c.oid = s.oid
      LEFT JOIN chosen_trigger t ON t.oid = c.oid
     WHERE pg_has_role(c.relowner, 'USAGE') AND NOT EXISTS (
           SELECT FROM pg_inherits i JOIN audited_table p ON p.oid = i.inhparent WHERE i.inhrelid = c.oid)),

tree (root, oid) AS (
    SELECT r.root, r.root FROM root r
    UNION
    SELECT t.root, i.inhrelid FROM tree t JOIN pg_inherits i ON i.inhparent = t.oid),

-- The root and its descendants.
member AS (
    SELECT r.root, row_number() OVER (
               PARTITION BY r.root ORDER BY c.oid = r.root DESC, c.oid::regclass::text) AS member_n,
           c.oid, c.oid AS rel, c.oid = r.root AS is_root,
           c.oid IN (SELECT u.oid FROM with_replaced_trigger u) AS has_replaced_trigger, c.relkind, c.relpersistence,
           c.relispartition, c.relowner,
           i.inhparent AS parent, i.inhparent IS NOT NULL AND NOT c.relispartition AS is_child,
           a.attnum, a.atttypid, format_type(a.atttypid, a.atttypmod) AS type,
           CASE WHEN a.attgenerated <> '' THEN 'EXPRESSION' WHEN a.attidentity <> '' THEN 'IDENTITY'
                WHEN a.atthasdef THEN 'DEFAULT' END AS default_kind,  -- what fills its fence column if a statement does not
           coalesce(v.before, '{}') AS before, coalesce(v.after, '{}') AS after
      FROM root r
      JOIN tree t ON t.root = r.root
      JOIN pg_class c ON c.oid = t.oid
      LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhseqno = 1
      -- (A virtual column, from PostgreSQL 18 on, holds no tokens.)
      LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = r.fence_column AND a.attgenerated <> 'v'
      LEFT JOIN covered_events v ON v.oid = c.oid),

home (name) AS (
    SELECT e.extnamespace::regnamespace::text FROM pg_extension e WHERE e.extname = 'pg_fence'),

-- Fences that another trigger follows. (Or followed: verify was attached, until another trigger replaced it.)
with_later_trigger AS (
    SELECT DISTINCT m.root
      FROM member m JOIN other_trigger t ON t.tgrelid = m.oid
     WHERE CASE WHEN t.replaces IS NOT NULL THEN t.replaces = 1
           ELSE NOT t.changes_no_row AND t.tgname > 'fenced' AND t.tgtype & 3 = 3 AND t.tgtype & 20 <> 0
            AND t.tgenabled <> 'D' END),

-- Fences of tables that an apply worker writes.
subscribed AS (
    SELECT m.root FROM member m JOIN pg_subscription_rel s ON s.srrelid = m.oid
    UNION
    SELECT r.root FROM root r JOIN pg_subscription_rel s ON s.srrelid = r.top),

-- Fences of tables that other replication writes: on a subscriber of Slony and Londiste, a trigger keeps other writers
-- out. (Bucardo shows only on a table that is also a source, by the trigger that collects its changes; pglogical leaves
-- nothing on a table.)
replicated AS (
    SELECT m.root, max(w.replicated_by) AS replicated_by
      FROM member m
      JOIN pg_trigger t ON t.tgrelid = m.oid
      JOIN pg_proc p ON p.oid = t.tgfoid
      JOIN pg_namespace h ON h.oid = p.pronamespace
     CROSS JOIN LATERAL (VALUES (CASE
           WHEN p.proname = 'denyaccess' AND t.tgname = h.nspname || '_denyaccess' AND t.tgenabled <> 'D' THEN 'Slony'
           WHEN h.nspname = 'pgq' AND starts_with(t.tgname, '_londiste_')
            AND position(decode('0064656e7900', 'hex') IN t.tgargs) > 0 THEN 'Londiste'
           WHEN h.nspname = 'bucardo' AND t.tgname = 'bucardo_delta' THEN 'Bucardo' END)) AS w (replicated_by)
     WHERE w.replicated_by IS NOT NULL
     GROUP BY m.root),

-- The columns in the name of the lease.
placeholder AS (
    SELECT DISTINCT r.root_n, r.root, r.root_rel, column_name AS name
      FROM root r
      JOIN unnest(leases) AS template ON template.lease = r.lease
     CROSS JOIN unnest(template.columns) AS column_name
     WHERE r.is_fenced),

-- Tables in which a row can be created without its lease although its key may be that of a deleted row, because the
-- client chooses the key. (A row inserted through the root takes its key from there.)
client_chosen_key AS (
    SELECT m.root, m.oid
      FROM root r JOIN member m USING (root)
     WHERE r.has_unfenced_insert AND r.lease IS NOT NULL AND m.relkind IN ('r', 'p')
       AND NOT EXISTS (
           SELECT FROM placeholder p JOIN pg_attribute a ON a.attname = p.name
            WHERE p.root = m.root AND a.attrelid = m.oid AND a.attidentity = 'a')
       AND (m.is_root AND NOT m.relispartition OR EXISTS (
           SELECT FROM (SELECT coalesce(k.relacl, acldefault('r', k.relowner)) FROM pg_class k WHERE k.oid = m.oid
                  UNION ALL SELECT c.attacl FROM pg_attribute c WHERE c.attrelid = m.oid
                  ) AS x (acl) CROSS JOIN aclexplode(x.acl) AS a
            WHERE a.privilege_type = 'INSERT' AND a.grantee <> m.relowner))),

-- fence_protect records on the trigger, by number, which columns the lease names. If a recorded column now has another
-- name, and another column has the recorded name, then the rows have other leases than before. (A dropped column is
-- ignored: the column that replaced it may well have its values.)
swapped AS (
    SELECT p.root_n, p.root, p.root_rel, p.name, k.attname AS present_name
      FROM placeholder p
      JOIN own_trigger t ON t.tgrelid = p.root AND t.tgname = 'fenced'
      JOIN pg_attribute a ON a.attrelid = p.root AND a.attname = p.name AND a.attnum > 0
      JOIN pg_attribute k ON k.attrelid = p.root AND k.attnum > 0 AND k.attname <> p.name AND NOT k.attisdropped
     CROSS JOIN LATERAL (VALUES (obj_description(t.oid, 'pg_trigger') || ' ')) AS trigger_comment (text)
     WHERE strpos(trigger_comment.text, format(' {%s}=%s ', p.name, k.attnum)) > 0
       AND strpos(trigger_comment.text, (
           SELECT format('(pg_fence, of table %s): ',
                      left(md5(format('%s/%s/%s', s.system_identifier, d.oid, p.root)), 16))
             FROM pg_control_system() AS s, pg_database d WHERE d.datname = current_database())) > 0),

-- Fences that no call of fence_protect can repair. Columns of the lease have swapped their names, and a call would use
-- their present names. Or the fence column existed before, for another purpose. Or the lease names a column that is
-- gone, and its present name is unknown.
beyond_repair AS (
    SELECT w.root FROM swapped w
    UNION
    SELECT r.root
      FROM root r
      JOIN pg_attribute n ON n.attrelid = r.root AND n.attname = r.fence_column AND n.attnum > 0
      JOIN pg_attribute o ON o.attrelid = r.root AND o.attnum > 0
     WHERE r.is_fenced AND col_description(r.root, o.attnum) = about->>'column_comment'
       AND col_description(r.root, n.attnum) IS DISTINCT FROM about->>'column_comment'
       AND (n.attnum < o.attnum
            OR EXISTS (SELECT FROM pg_index i WHERE i.indrelid = r.root AND n.attnum = ANY (i.indkey)))
    UNION
    SELECT p.root
      FROM placeholder p
     WHERE NOT EXISTS (
           SELECT FROM pg_attribute a WHERE a.attrelid = p.root AND a.attname = p.name AND a.attnum > 0)
     GROUP BY p.root
    HAVING count(*) > 1 OR 1 <> (
           SELECT count(*)
             FROM pg_index i JOIN pg_attribute k ON k.attrelid = i.indrelid AND k.attnum = ANY (i.indkey[:i.indnkeyatts - 1])
            WHERE i.indrelid = p.root AND i.indisprimary
              AND k.attname NOT IN (SELECT o.name FROM placeholder o WHERE o.root = p.root))),

-- The fenced tables with partitions.
partitioned AS (
    SELECT DISTINCT ON (c.oid) c.oid, t.fence_column, t.mode, t.lease, t.deadline
      FROM own_trigger t JOIN pg_class c ON c.oid = t.tgrelid
     WHERE c.relkind = 'p' AND NOT c.relispartition
     ORDER BY c.oid, t.tgnargs > 1 AND t.tgname IN (SELECT k.tgname FROM trigger_kind k) DESC,
              t.bits DESC, t.tgnargs DESC, t.tgname),

-- What DETACH removed with the row triggers, and what the arguments of the remaining TRUNCATE trigger do not state:
-- whether the fence had verify, and whether it checked INSERT. It is taken from the partitioned table with the fence
-- that this trigger states and, if that names no lease, with the same columns.
before_detach AS (
    SELECT r.root, bool_or(t.bits = 1) AS verifies, bool_or(t.bits = 3 AND t.tgtype & 4 <> 0) AS checks_insert
      FROM root r
      JOIN partitioned p ON (p.fence_column, p.mode) = (r.fence_column, r.mode)
           AND (p.lease, p.deadline) IS NOT DISTINCT FROM (r.lease, r.deadline)
      JOIN own_trigger t ON t.tgrelid = p.oid
     WHERE r.is_fenced AND NOT EXISTS (SELECT FROM own_trigger o WHERE o.tgrelid = r.root AND o.bits = 3)
       AND (r.lease IS NOT NULL OR NOT EXISTS (
           SELECT FROM pg_attribute c
            WHERE c.attrelid IN (p.oid, r.root) AND c.attnum > 0 AND NOT c.attisdropped
            GROUP BY c.attname, c.atttypid, c.atttypmod HAVING count(*) = 1))
     GROUP BY r.root),

-- `protect` is the statement that repairs all that another call of fence_protect can repair. All remedies use it, so
-- that they agree.
fence AS (
    SELECT r.*, m.is_child AS root_is_child, m.before AS root_events, m.default_kind IS NOT NULL AS root_has_default,
           x.is_always, x.is_subscribed, b.replicated_by, x.must_fire_always, x.keeps_unfenced_insert, e.events,
           o.options,
           CASE WHEN r.root NOT IN (SELECT a.root FROM beyond_repair a) THEN
               format('SELECT %s.fence_protect(', (SELECT h.name FROM home h)) || quote_literal(r.top::regclass) || o.options END AS protect,
           format('EXECUTE FUNCTION %s(%s', (about->>'fenced_oid')::oid::regproc, o.arguments) AS call
      FROM root r
      JOIN member m ON m.root = r.root AND m.is_root
      LEFT JOIN before_detach d ON d.root = r.root
      LEFT JOIN replicated b ON b.root = r.root
     CROSS JOIN LATERAL (
           SELECT f.*, f.is_always OR f.is_subscribed AS must_fire_always
             FROM (SELECT r.root IN (SELECT b.root FROM with_later_trigger b) AS has_later_trigger,
                          r.root IN (SELECT s.root FROM subscribed s) AS is_subscribed,
                          -- (The remedy for a partition that was audited alone repairs the whole table.)
                          EXISTS (SELECT FROM own_trigger t
                                   WHERE t.tgrelid IN (r.root, r.top) AND t.tgenabled IN ('A', 'R')) AS is_always,
                          CASE WHEN r.lease IS NULL AND r.deadline IS NULL AND r.mode = 'monotonic' THEN 'strict' ELSE r.mode END
                              AS repaired_mode,
                          r.has_unfenced_insert AND r.lease IS NOT NULL AND NOT EXISTS (
                              SELECT FROM client_chosen_key k JOIN member w USING (root, oid)
                               WHERE k.root = r.root AND (w.is_root OR NOT w.is_child)) AS keeps_unfenced_insert
                  ) AS f) AS x
     CROSS JOIN LATERAL (
           SELECT array_agg(e.name ORDER BY e.n) FROM event e
            WHERE e.name <> 'insert' OR r.lease IS NOT NULL OR r.deadline IS NOT NULL OR r.mode = 'managed'
               OR 'insert' = ANY (m.before) OR d.checks_insert
               OR x.has_later_trigger AND r.moves_rows  -- a row that moves is inserted at its new place
           ) AS e (events)
     CROSS JOIN LATERAL (VALUES (
           concat_ws(', ', '', 'fence_column => ' || quote_literal(nullif(r.fence_column, 'fence')),
               'mode => ' || quote_literal(x.repaired_mode),
               'lease => ' || coalesce(quote_literal(r.lease), CASE WHEN EXISTS (  -- or it would be kept
                   SELECT FROM own_trigger t JOIN trigger_kind k USING (tgname)
                    WHERE t.tgrelid = r.top AND t.lease IS NOT NULL) THEN '''''' END),
               'events => ' || quote_literal(array_to_string(
                   CASE WHEN x.keeps_unfenced_insert THEN array_remove(e.events, 'insert')
                        ELSE e.events END, ',')),
               CASE WHEN r.deadline IS NULL AND (x.has_later_trigger OR m.after <> '{}' OR d.verifies)
                    THEN 'verify => true' END,
               CASE WHEN x.must_fire_always THEN 'always => true' END,
               'deadline => ' || coalesce(quote_literal(r.deadline), CASE WHEN EXISTS (
                   SELECT FROM own_trigger t JOIN trigger_kind k USING (tgname)
                    WHERE t.tgrelid = r.top AND t.deadline IS NOT NULL) THEN '''''' END)) || ');',
           concat_ws(', ', quote_literal(r.fence_column), quote_literal(x.repaired_mode), quote_literal(r.lease))
           )) AS o (options, arguments)),

-- The members to check. A root with the fence column, but without a trigger of pg_fence, is checked alone. A partition
-- has the row triggers of its root, so their faults are reported for the root.
checked_member AS (
    SELECT *, ARRAY (
               SELECT e FROM unnest(CASE WHEN m.is_root OR m.is_child THEN f.events ELSE f.root_events END) AS e
                WHERE e <> ALL (m.before) AND m.relkind <> 'f') AS missing,
           f.is_fenced OR f.root_is_child AS has_fence, k.oid IS NOT NULL AS has_client_chosen_key
      FROM fence f JOIN member m USING (root) LEFT JOIN client_chosen_key k USING (root, oid)
     WHERE f.is_fenced OR f.root_is_child OR f.root_has_replaced_trigger AND m.is_root),

-- Tables without a parent that have a column of that name but check no rows. (Templates of pg_partman are never
-- written.)
detach_candidate AS MATERIALIZED (
    SELECT d.oid, a.attname, a.atthasdef OR a.attidentity <> '' AS has_default, a.attidentity <> '' AS is_identity,
           EXISTS (SELECT FROM own_trigger t WHERE t.tgrelid = d.oid) AS is_certain
      FROM pg_attribute a JOIN pg_class d ON d.oid = a.attrelid
     WHERE a.attname IN (SELECT p.fence_column FROM partitioned p) AND a.attnum > 0 AND a.attgenerated = ''
       AND d.relkind IN ('r', 'p') AND d.relpersistence = 'p'
       AND NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = d.oid)
       AND NOT EXISTS (SELECT FROM own_trigger t WHERE t.tgrelid = d.oid AND t.bits = 3)
       AND (NOT starts_with(d.relname, 'template_') OR d.relnamespace NOT IN (
                SELECT e.extnamespace FROM pg_extension e WHERE e.extname = 'pg_partman')
            OR EXISTS (SELECT FROM own_trigger t WHERE t.tgrelid = d.oid))),

-- DETACH leaves no link. A former partition is recognized by having the columns of its root, and certainly by the
-- TRUNCATE trigger that fence_protect gave it, which names the lease. If it may have had several roots, its lease is
-- unknown; otherwise this statement fences it, and its other findings have no remedy.
former_partition AS (
    SELECT d.oid, d.is_certain, d.roots, f.root_n,
           CASE WHEN d.root_count = 1 AND f.protect IS NOT NULL
                THEN coalesce((SELECT string_agg(format('DROP TRIGGER %I ON %s; ', t.tgname, d.oid::regclass), '' ORDER BY t.oid)
                                 FROM other_trigger t
                                WHERE t.tgrelid = d.oid AND t.replaces IS NOT NULL AND t.tgparentid = 0), '')
                     || CASE WHEN d.has_default THEN format('ALTER TABLE %s ALTER COLUMN %I DROP %s; ', d.oid::regclass,
                            f.fence_column, CASE WHEN d.is_identity THEN 'IDENTITY' ELSE 'DEFAULT' END) ELSE '' END
                     || coalesce((
                        SELECT format('ALTER TABLE %s %s; ', d.oid::regclass, string_agg(concat_ws(', ',
                                   CASE WHEN x.has_default THEN format('ALTER COLUMN %I DROP DEFAULT', a.attname) END,
                                   CASE WHEN a.attnotnull THEN format('ALTER COLUMN %I DROP NOT NULL', a.attname) END), ', '))
                          FROM pg_attribute a
                         CROSS JOIN LATERAL (VALUES (a.attname = f.deadline AND a.atthasdef)) AS x (has_default)
                         WHERE f.deadline IS NOT NULL AND a.attrelid = d.oid AND a.attname IN (f.fence_column, f.deadline)
                           AND (x.has_default OR a.attnotnull)
                        HAVING count(*) > 0), '')
                     || coalesce((
                        SELECT format('ALTER TABLE %s %s; ', d.oid::regclass, string_agg(concat_ws(', ',
                                   CASE WHEN a.attgenerated <> '' THEN format('ALTER COLUMN %I DROP EXPRESSION', a.attname)
                                        WHEN NOT x.is_usable
                                        THEN format('ALTER COLUMN %I TYPE text USING %1$I::text', a.attname)
                                   END,
                                   CASE WHEN NOT a.attnotnull THEN format('ALTER COLUMN %I SET NOT NULL', a.attname) END), ', '))
                          FROM placeholder h JOIN pg_attribute a ON a.attrelid = d.oid AND a.attname = h.name AND a.attnum > 0
                         CROSS JOIN LATERAL (VALUES (a.attgenerated = '' AND a.atttypid IN (
                               SELECT t::oid FROM jsonb_array_elements_text(about->'placeholder_types') AS t))
                               ) AS x (is_usable)
                         WHERE h.root = f.root AND NOT (x.is_usable AND a.attnotnull)
                        HAVING count(*) > 0), '')
                     || format('SELECT %s.fence_protect(', (SELECT h.name FROM home h)) || quote_literal(d.oid::regclass) || f.options
                END AS protect
      FROM (SELECT l.oid, l.is_certain, l.has_default, l.is_identity, count(*) AS root_count,
                   string_agg(p.oid::regclass::text, ' or ' ORDER BY p.oid::regclass::text) AS roots,
                   array_agg(p.oid) AS root
              FROM detach_candidate l
              JOIN partitioned p ON p.fence_column = l.attname AND p.oid <> l.oid
             WHERE NOT EXISTS (
                   SELECT FROM own_trigger t
                    WHERE t.tgrelid = l.oid AND (t.fence_column, t.mode, t.lease, t.deadline)
                           IS DISTINCT FROM (p.fence_column, p.mode, p.lease, p.deadline))
               AND NOT EXISTS (
                   SELECT FROM pg_attribute c
                    WHERE c.attrelid IN (p.oid, l.oid) AND c.attnum > 0 AND NOT c.attisdropped
                    GROUP BY c.attname, c.atttypid, c.atttypmod HAVING count(*) = 1)
             GROUP BY l.oid, l.is_certain, l.has_default, l.is_identity) AS d
      LEFT JOIN LATERAL (
           SELECT f.* FROM fence f WHERE f.root = ANY (d.root) AND f.is_fenced ORDER BY f.root_n LIMIT 1) AS f ON true),

-- The statement that repairs each kind of trigger: a call of fence_protect, or if no call can repair it, a statement with
-- %1$I for the trigger's name.
trigger_repair AS (
    SELECT s.root, s.oid, k.bits, d.definition,
           CASE WHEN s.is_child OR k.bits = 2 AND NOT s.is_root
                THEN 'CREATE OR REPLACE TRIGGER %1$I ' || d.definition
                ELSE replace(s.protect, '%', '%%') END AS remedy
      FROM checked_member s
     CROSS JOIN trigger_kind k
     CROSS JOIN LATERAL (VALUES (s.keeps_unfenced_insert AND NOT s.has_client_chosen_key)) AS f (keeps_unfenced_insert)
     CROSS JOIN LATERAL (VALUES (
           replace(format('%s ON %s FOR EACH %s %s);',
               CASE k.bits
                   WHEN 3 THEN 'BEFORE ' || array_to_string(array_remove(s.events, 'truncate'), ' OR ')
                   WHEN 2 THEN 'BEFORE TRUNCATE'
                   ELSE CASE WHEN 'insert' = ANY (s.events) THEN 'AFTER insert OR update'
                        ELSE 'AFTER update' END END,
               s.rel::regclass, CASE k.bits WHEN 2 THEN 'STATEMENT' ELSE 'ROW' END,
               concat_ws(', ', s.call,
                   CASE WHEN s.lease IS NULL AND (k.bits = 1 OR s.deadline IS NOT NULL) THEN '''''' END,
                   coalesce(quote_literal(s.deadline), CASE WHEN k.bits = 1 OR f.keeps_unfenced_insert THEN '''''' END),
                   CASE WHEN k.bits = 1 THEN '''verify''' WHEN f.keeps_unfenced_insert THEN '''''' END,
                   CASE WHEN f.keeps_unfenced_insert THEN quote_literal(array_to_string(
                       array_remove(s.events, 'insert'), ',')) END)), '%', '%%')
           || CASE WHEN s.must_fire_always
              THEN format(' ALTER TABLE %s ENABLE ALWAYS TRIGGER %%1$I;', replace(s.rel::regclass::text, '%', '%%'))
              ELSE '' END)) AS d (definition))

SELECT about || jsonb_strip_nulls(jsonb_build_object(
    'home', (SELECT h.name FROM home h),
    'uses_leases', (
        SELECT bool_and(CASE WHEN p.oid IS NULL THEN has_schema_privilege(d.objid, 'USAGE')
                             ELSE has_function_privilege(p.oid, 'EXECUTE') END)
          FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid
          LEFT JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
         WHERE e.extname = 'pg_fence' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
           AND (d.classid = 'pg_namespace'::regclass OR p.proname = 'fence_status')),
    -- A view of another owner could run that owner's code.
    'reads_leases', EXISTS (
        SELECT FROM pg_proc f JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = f.oid AND d.deptype = 'e'
          JOIN pg_depend o ON (o.refclassid, o.refobjid, o.deptype) = (d.refclassid, d.refobjid, d.deptype)
          JOIN pg_class v ON o.classid = 'pg_class'::regclass AND v.oid = o.objid AND v.relowner = f.proowner
         WHERE f.oid = (about->>'fenced_oid')::oid AND v.relname IN ('leases', 'lease')
        HAVING count(*) = 2 AND bool_or(v.relname = 'leases' AND has_table_privilege(v.oid, 'SELECT'))),
    -- The body of a DO that changes the fences of rows of a fenced table.
    'refill_body', 'BEGIN PERFORM pg_catalog.set_config(''row_security'', ''off'', true), %1$s.fence_unprotect(%2$L); '
        'UPDATE %3$s%2$s AS r SET %4$I = %5$s FROM %1$s.fence_status() AS s WHERE r.%4$I %6$s; '
        'IF EXISTS (SELECT FROM %3$s%2$s AS r, %1$s.fence_status() AS s WHERE r.%4$I %6$s) THEN '
        'RAISE EXCEPTION ''a trigger or a rule keeps rows from being changed''; END IF; PERFORM %7$s END',
    'own_triggers', (SELECT jsonb_agg(t) FROM own_trigger t),
    'other_triggers', (SELECT jsonb_agg(t) FROM other_trigger t
                        WHERE t.replaces IS NOT NULL OR t.tgrelid IN (SELECT m.oid FROM member m)),
    'roots', (SELECT jsonb_agg(r) FROM root r),
    'members', (SELECT jsonb_agg(m) FROM member m),
    'trigger_repairs', (SELECT jsonb_agg(u) FROM trigger_repair u),
    'former_partitions', (SELECT jsonb_agg(d) FROM former_partition d),
    'swapped', (SELECT jsonb_agg(w) FROM swapped w),
    'placeholders', (SELECT jsonb_agg(p) FROM placeholder p),
    'fences', (SELECT jsonb_agg(f) FROM fence f),
    'checked_members', (SELECT jsonb_agg(s) FROM checked_member s),
    -- Rows may have fences above every token drawn, if the extension was created again or an older backup was restored.
    -- If leases are adopted, a bound table that is not strict is skipped: its rows may have adopted numbers, and any
    -- token that speaks may write them.
    'fence_columns', (
        SELECT coalesce(jsonb_agg(jsonb_build_array(s.oid::bigint, s.attnum)), '[]') FROM checked_member s
         WHERE s.is_fenced AND s.relkind = 'r' AND s.atttypid = 'int8'::regtype
           AND NOT ((about->>'has_adopted_leases')::boolean AND s.lease IS NOT NULL AND s.mode <> 'strict'))))
$audit_tables$;

COMMENT ON FUNCTION fence.audit_tables(jsonb, fence.trigger_arguments[], fence.lease_template[]) IS
'what is known by then, with how each fence is and should be; called by fence_audit alone';


-- The findings, with their remedies: one query for each kind of finding.
CREATE FUNCTION fence.audit_findings(about jsonb) RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $audit_findings$
WITH RECURSIVE
event (n, name, bit) AS (
    VALUES (1, 'insert', 4), (2, 'update', 16), (3, 'delete', 8), (4, 'truncate', 32)),

trigger_kind (bits, tgname) AS (
    VALUES (3, 'fenced'::name), (2, 'fenced_truncate'), (1, 'fenced_verify')),

own_trigger AS (
    SELECT * FROM jsonb_to_recordset(about->'own_triggers') AS x (
        oid oid, tgrelid oid, tgname name, tgparentid oid, tgenabled "char", tgtype integer, bits integer,
        tgnargs integer, skips_writes boolean, fence_column text, mode text, lease text, deadline text,
        has_unfenced_insert boolean)),

other_trigger AS (
    SELECT * FROM jsonb_to_recordset(about->'other_triggers') AS x (
        oid oid, tgrelid oid, tgname name, tgparentid oid, tgenabled "char", tgtype integer, tgfoid oid,
        replaces integer, changes_no_row boolean)),

trigger_repair AS (
    SELECT * FROM jsonb_to_recordset(about->'trigger_repairs') AS x (
        root oid, oid oid, bits integer, definition text, remedy text)),

root AS (
    SELECT * FROM jsonb_to_recordset(about->'roots') AS x (
        root oid, top regclass)),

member AS (
    SELECT * FROM jsonb_to_recordset(about->'members') AS x (
        root oid, oid oid, is_child boolean)),

fence AS (
    SELECT * FROM jsonb_to_recordset(about->'fences') AS x (
        root_n bigint, root oid, root_rel regclass, root_owner oid, moves_rows boolean, top regclass,
        is_fenced boolean, root_has_replaced_trigger boolean, root_is_child boolean, fence_column text, mode text,
        lease text, deadline text, options text, protect text)),

checked_member AS (
    SELECT * FROM jsonb_to_recordset(about->'checked_members') AS x (
        root_n bigint, member_n bigint, root oid, root_rel regclass, oid oid, rel regclass, parent regclass,
        root_owner oid, relowner oid, relkind "char", relpersistence "char", relispartition boolean, is_root boolean,
        is_child boolean, is_fenced boolean, is_subscribed boolean, replicated_by text, fence_column text,
        deadline text, attnum integer, atttypid oid, type text, default_kind text, root_has_default boolean,
        protect text, has_replaced_trigger boolean, has_fence boolean, mode text, lease text,
        has_unfenced_insert boolean, is_always boolean,
        must_fire_always boolean, has_client_chosen_key boolean, moves_rows boolean, events text[], after text[],
        missing text[], before text[])),

placeholder AS (
    SELECT * FROM jsonb_to_recordset(about->'placeholders') AS x (
        root_n bigint, root oid, root_rel regclass, name text)),

former_partition AS (
    SELECT * FROM jsonb_to_recordset(about->'former_partitions') AS x (
        oid oid, is_certain boolean, roots text, root_n bigint, protect text)),

allowed_types (oids) AS (
    SELECT array_agg(t::oid) FROM jsonb_array_elements_text(about->'placeholder_types') AS t),

-- Faults of a table, its fence column or its rows. ------

-- What can be cast to the type of a fence or deadline column. (Whether each text can be read, its rows tell.)
convertible (type, target) AS (
    SELECT t.oid, x.target
      FROM pg_type t CROSS JOIN (VALUES ('int8'::regtype), ('timestamptz'::regtype)) AS x (target)
     WHERE t.typcategory = 'S' OR t.typbasetype = x.target
        OR EXISTS (SELECT FROM pg_cast k
                    WHERE k.castsource = coalesce(nullif(t.typbasetype, 0), t.oid) AND k.casttarget = x.target)),

-- Columns whose type cannot be changed in the root, because they are in the partition key of a member, or in an
-- expression of it: they depend on their table.
fixed_type (root, name) AS (
    SELECT m.root, a.attname
      FROM member m
      JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = m.oid AND d.refclassid = 'pg_class'::regclass
           AND d.refobjid = m.oid AND d.refobjsubid = 0 AND d.deptype = 'i'
      JOIN pg_attribute a ON a.attrelid = d.objid AND a.attnum = d.objsubid),

-- Columns whose NOT NULL cannot be dropped in the root.
never_null (root, name) AS (
    SELECT m.root, a.attname
      FROM member m
      JOIN pg_index i ON i.indrelid = m.oid AND (i.indisprimary OR i.indisreplident)
      JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[:i.indnkeyatts - 1])),

-- What would keep fence_protect from repairing the rest comes first, as if it belonged to a member 0.
table_fault (step, root_n, member_n, n, rel, severity, finding, remedy) AS (
    SELECT x.step, s.root_n, 0, s.member_n, s.rel, x.severity, x.finding, x.remedy
      FROM checked_member s
     CROSS JOIN LATERAL (VALUES
        (2, s.relkind = 'f', 'hole', 'this table is foreign: nothing fences it on its own server',
         CASE WHEN s.relispartition THEN format('ALTER TABLE %s DETACH PARTITION %s;', s.parent, s.rel)
              WHEN s.is_child THEN format('ALTER FOREIGN TABLE %s NO INHERIT %s;', s.rel, s.parent)
              ELSE format('SELECT %s.fence_unprotect(%L);', about->>'home', s.rel) END),
        (3, s.relpersistence = 'u', 'hole', 'this table is unlogged: a crash empties it, fences and all',
         format('ALTER TABLE %s SET LOGGED;', s.rel)),
        (4, s.relowner <> s.root_owner, 'notice',
         format('its owner %I is not that of %s, and may take its triggers off',
             pg_get_userbyid(s.relowner), s.root_rel),
         format('ALTER TABLE %s OWNER TO %I;', s.rel, pg_get_userbyid(s.root_owner)))
     ) AS x (step, applies, severity, finding, remedy)
     WHERE x.applies),

-- A renamed column still has all tokens that the rows have seen. If the column was dropped, they are lost: no write can
-- pass, and an empty new column would accept every old token once more. So the remedy fills it with the last token. A
-- column that was dropped and made again lacks the comment of fence_protect, and no other column has it. If a column
-- was renamed and another one made in its place, the renamed one has the comment: each row gets the greater token of
-- both, because both may have been written.
fence_column_fault AS (
    SELECT x.step, s.root_n, CASE WHEN x.step = 8 THEN s.member_n ELSE 0 END, s.member_n, s.rel, x.severity, x.finding, x.remedy
      FROM checked_member s
      LEFT JOIN LATERAL (
           SELECT a.attname, concat_ws(', ',
                      CASE WHEN a.atttypid <> 'int8'::regtype
                            AND a.atttypid IN (SELECT v.type FROM convertible v WHERE v.target = 'int8'::regtype)
                           THEN format('ALTER COLUMN %I TYPE bigint USING %1$I::bigint', s.fence_column) END,
                      CASE WHEN a.attidentity <> '' THEN format('ALTER COLUMN %I DROP IDENTITY', s.fence_column)
                           WHEN a.atthasdef AND a.attgenerated = ''
                           THEN format('ALTER COLUMN %I DROP DEFAULT', s.fence_column) END)
             FROM pg_attribute a
            WHERE s.attnum IS NULL AND a.attrelid = s.oid AND a.attnum > 0
              AND col_description(s.oid, a.attnum) = about->>'column_comment'
            ORDER BY a.attnum DESC LIMIT 1) AS renamed (name, changes) ON true
      LEFT JOIN LATERAL (
           SELECT a.attname FROM pg_attribute a
            WHERE s.is_root AND s.is_fenced AND NOT s.is_child AND s.attnum IS NOT NULL
              AND a.attrelid = s.oid AND a.attnum > 0 AND a.atttypid = 'int8'::regtype AND a.attgenerated = ''
              AND col_description(s.oid, a.attnum) = about->>'column_comment'
              AND col_description(s.oid, s.attnum) IS DISTINCT FROM about->>'column_comment'
            ORDER BY a.attnum DESC LIMIT 1) AS previous (name) ON true
      LEFT JOIN LATERAL (  -- inheritance children have triggers of their own, which stand aside meanwhile
           SELECT string_agg(format('ALTER TABLE %s DISABLE TRIGGER %I; ', t.tgrelid::regclass, t.tgname), ''
                      ORDER BY t.oid),
                  string_agg(format('ALTER TABLE %s ENABLE %sTRIGGER %I; ', t.tgrelid::regclass,
                      CASE t.tgenabled WHEN 'A' THEN 'ALWAYS ' WHEN 'R' THEN 'REPLICA ' ELSE '' END, t.tgname), ''
                      ORDER BY t.oid)
             FROM member m
             JOIN own_trigger t ON t.tgrelid = m.oid
            WHERE previous.name IS NOT NULL AND m.root = s.root AND m.is_child AND t.tgparentid = 0
              AND t.tgenabled <> 'D'
           ) AS children (disable, enable) ON true
      LEFT JOIN LATERAL (  -- no ALTER TABLE makes a virtual column a plain one
           SELECT format('ALTER TABLE %s DROP COLUMN %I; ', s.rel, a.attname)
             FROM pg_attribute a
            WHERE a.attrelid = s.oid AND a.attname = s.fence_column AND a.attgenerated = 'v'
           ) AS virtual (drop_statement) ON true
     CROSS JOIN LATERAL (VALUES (
           format('the fence column "%s"', s.fence_column),
           format('the fence column "%s" is %s: no write can pass', s.fence_column,
               CASE WHEN virtual.drop_statement IS NULL THEN 'missing' ELSE 'virtual' END),
           format('ALTER TABLE %s ALTER COLUMN %I ', s.rel, s.fence_column),
           format(' COMMENT ON COLUMN %s.%I IS %L;', s.rel, s.fence_column, about->>'column_comment'))
           ) AS phrase (title, absence, alter_column, comment_on_column)
     CROSS JOIN LATERAL (VALUES
        (5, s.is_root AND s.attnum IS NULL AND renamed.name IS NULL, 'hole',
         phrase.absence || ', and once it is back, but empty, any old token can',
         coalesce(virtual.drop_statement, '') || format('ALTER TABLE %s ADD COLUMN %I bigint', s.rel, s.fence_column)
             || coalesce(' DEFAULT ' || (about->>'last_token')::bigint || '; ' || phrase.alter_column
                         || 'DROP DEFAULT', '') || ';'
             || phrase.comment_on_column),
        (5, s.is_root AND renamed.name IS NOT NULL, 'notice', phrase.absence,
         CASE WHEN renamed.name IS NOT NULL
              THEN coalesce(virtual.drop_statement, '')
                  || format('ALTER TABLE %s RENAME COLUMN %I TO %I;', s.rel, renamed.name, s.fence_column)
                  || coalesce(format(' ALTER TABLE %s ', s.rel) || nullif(renamed.changes, '') || ';', '') END),
        (6, s.is_root AND s.type <> 'bigint', 'notice',
         format('%s is %s, not bigint: no write can pass', phrase.title, s.type),
         -- (A column of another purpose keeps its type.)
         CASE WHEN (previous.name IS NULL OR s.protect IS NOT NULL)
               AND s.atttypid IN (SELECT v.type FROM convertible v WHERE v.target = 'int8'::regtype)
               AND (s.root, s.fence_column) NOT IN (SELECT x.root, x.name FROM fixed_type x)
              THEN phrase.alter_column || format('TYPE bigint USING %I::bigint;', s.fence_column) END),
        (7, s.default_kind IS NOT NULL AND (s.is_root OR NOT s.root_has_default), 'hole',
         phrase.title || ' has a default, which passes for a token',
         concat(phrase.alter_column, 'DROP ', s.default_kind, ';',
             CASE s.default_kind WHEN 'EXPRESSION' THEN phrase.comment_on_column END)),
        (8, previous.name IS NOT NULL, 'hole',
         format('%s is another one than before: the tokens seen so far are in "%s", and any old token can write',
             phrase.title, previous.name),
         CASE WHEN s.protect IS NOT NULL THEN format('DO %L;', format(
                 'BEGIN PERFORM pg_catalog.set_config(''row_security'', ''off'', true), %1$s.fence_unprotect(%2$L); %3$sUPDATE %2$s AS r '
                 'SET %4$I = greatest(r.%4$I, r.%5$I) WHERE r.%4$I IS DISTINCT FROM greatest(r.%4$I, r.%5$I); '
                 'IF EXISTS (SELECT FROM %2$s AS r WHERE r.%4$I IS DISTINCT FROM greatest(r.%4$I, r.%5$I)) THEN '
                 'RAISE EXCEPTION ''a trigger or a rule keeps rows from being changed''; END IF; '
                 '%6$sCOMMENT ON COLUMN %2$s.%5$I IS NULL; PERFORM %7$s END',
             about->>'home', s.rel, children.disable, s.fence_column, coalesce(previous.name, ''), children.enable,
             substr(s.protect, length('SELECT ') + 1))) END),
        (8, previous.name IS NULL AND s.is_root AND s.is_fenced AND NOT s.is_child AND s.attnum IS NOT NULL
            AND s.default_kind IS DISTINCT FROM 'EXPRESSION'
            AND col_description(s.oid, s.attnum) IS NULL
            AND EXISTS (SELECT FROM own_trigger t
                         WHERE t.tgrelid = s.oid AND t.tgname = 'fenced' AND t.tgnargs > 1)
            AND EXISTS (SELECT FROM pg_attribute d
                         WHERE d.attrelid = s.oid AND d.attisdropped AND d.attlen = 8 AND d.attnum < s.attnum),
         'hole', phrase.title || ' was dropped and made again: where it is empty, any old token can write',
         CASE WHEN (about->>'last_token')::bigint IS NULL OR s.protect IS NULL THEN s.protect
              ELSE format('DO %L;', format(about->>'refill_body', about->>'home', s.rel,
                  CASE s.relkind WHEN 'p' THEN '' ELSE 'ONLY ' END, s.fence_column, 's.last_token', 'IS NULL',
                  substr(s.protect, length('SELECT ') + 1))) END)
     ) AS x (step, applies, severity, finding, remedy)
     WHERE x.applies),

-- The deadline column of row leases. Stale writes are recognized by the token, whatever the deadlines are; but without
-- the column, or with another type, nobody can write.
deadline_fault AS (
    SELECT 7, s.root_n, 0, s.member_n, s.rel, 'notice', x.finding, x.remedy
      FROM checked_member s
      LEFT JOIN pg_attribute a ON a.attrelid = s.oid AND a.attname = s.deadline AND a.attnum > 0
      LEFT JOIN pg_attribute r ON s.is_root AND r.attrelid = s.oid AND r.attnum > 0 AND r.attname <> s.deadline
           AND col_description(s.oid, r.attnum) = about->>'deadline_comment'
      LEFT JOIN pg_attribute f ON f.attrelid = s.oid AND f.attname = s.fence_column AND f.attnum > 0
     CROSS JOIN LATERAL (VALUES (
           format('the deadline column "%s"', s.deadline),
           format('ALTER TABLE %s ALTER COLUMN %I ', s.rel, coalesce(s.deadline, '')))) AS phrase (title, alter_column)
     CROSS JOIN LATERAL (VALUES
        (s.is_root AND a.attnum IS NULL AND r.attnum IS NULL,
         phrase.title || ' is missing: no write can pass; once it is back, nobody holds a row',
         format('ALTER TABLE %s ADD COLUMN %I timestamptz; COMMENT ON COLUMN %1$s.%2$I IS %L;', s.rel,
             coalesce(s.deadline, ''), about->>'deadline_comment')),
        (a.attnum IS NULL AND r.attnum IS NOT NULL, phrase.title || ' is missing: no write can pass',
         format('ALTER TABLE %s RENAME COLUMN %I TO %I;', s.rel, coalesce(r.attname, ''), coalesce(s.deadline, ''))),
        (a.attnum IS NOT NULL AND r.attnum IS NOT NULL,
         format('%s is another one than before, that is "%s" now (rename them back; or, if that is meant, call '
             'fence_protect once more)', phrase.title, r.attname), NULL),
        (s.is_root AND (a.atttypid <> 'timestamptz'::regtype OR a.atttypmod <> -1),
         format('%s is %s, not timestamptz: no write can pass, or deadlines are rounded', phrase.title,
             format_type(a.atttypid, a.atttypmod)),
         CASE WHEN a.attgenerated = ''
               AND a.atttypid IN (SELECT v.type FROM convertible v WHERE v.target = 'timestamptz'::regtype)
               AND (s.root, s.deadline) NOT IN (SELECT x.root, x.name FROM fixed_type x)
              THEN phrase.alter_column || format('TYPE timestamptz USING %I::timestamptz;', s.deadline) END),
        (a.attgenerated <> '' AND s.is_root, phrase.title || ' is generated: no write can pass',
         CASE a.attgenerated WHEN 'v' THEN  -- no ALTER TABLE makes it a plain one
             format('ALTER TABLE %s DROP COLUMN %I; ALTER TABLE %1$s ADD COLUMN %2$I timestamptz; COMMENT ON COLUMN %1$s.%2$I IS %L;',
                 s.rel, coalesce(s.deadline, ''), about->>'deadline_comment')
         ELSE phrase.alter_column || 'DROP EXPRESSION;' END),
        (a.atthasdef AND a.attgenerated = '',
         phrase.title || ' has a default: a new row is held by somebody who does not know it',
         phrase.alter_column || 'DROP DEFAULT;'),
        (a.attnotnull, phrase.title || ' is NOT NULL: nobody can give a row up',
         CASE WHEN (s.root, s.deadline) NOT IN (SELECT x.root, x.name FROM never_null x)
              THEN phrase.alter_column || 'DROP NOT NULL;' END),
        (f.attnotnull, format('the fence column "%s" is NOT NULL: a row that nobody holds cannot be inserted', s.fence_column),
         CASE WHEN (s.root, s.fence_column) NOT IN (SELECT x.root, x.name FROM never_null x)
              THEN format('ALTER TABLE %s ALTER COLUMN %I DROP NOT NULL;', s.rel, s.fence_column) END)
     ) AS x (applies, finding, remedy)
     WHERE s.deadline IS NOT NULL AND s.is_fenced AND x.applies),

-- Rows with fences above every token drawn: the extension was created again, or an older backup was restored. The
-- remedy is for fences that no new epoch can reach: it lowers them to where no token drawn so far can write. If
-- replication brings the rows, their fences are the publisher's, and nothing is wrong.
fence_ahead AS (
    SELECT 21, s.root_n, NULL::bigint, 1, s.root_rel, CASE WHEN source.is_replication THEN 'notice' ELSE 'hole' END,
           format('rows hold fences up to %s, above the last token drawn here, %s%s', highest.fence,
               about->>'last_token', CASE WHEN source.is_replication
                   THEN ' (the publisher''s: all is well, until this server takes over; '
                   'then call fence_new_epoch())' END),
           CASE WHEN source.is_replication OR s.protect IS NULL THEN NULL
                WHEN highest.fence <= (about->>'new_epoch_token')::bigint
                THEN format('SELECT %s.fence_new_epoch();', about->>'home')
                ELSE format('DO %L;', format(about->>'refill_body', about->>'home', s.root_rel, '', s.fence_column,
                    'coalesce(s.last_token, 0)', '> coalesce(s.last_token, 0)',
                    substr(s.protect, length('SELECT ') + 1))) END
      FROM checked_member s
     CROSS JOIN LATERAL (VALUES (s.is_subscribed OR coalesce(s.replicated_by <> 'Bucardo', false))
           ) AS source (is_replication)
     CROSS JOIN LATERAL (
           SELECT max(h.value::bigint)
             FROM member m
             JOIN jsonb_each_text(about->'highest_fences') AS h ON h.key = m.oid::text
            WHERE m.root = s.root) AS highest (fence)
     WHERE s.is_root AND highest.fence > (about->>'last_token')::bigint),

-- Faults of a table's triggers. ------

-- fence_protect fails if another trigger has one of its names, so the first remedy drops them all.
conflicting_trigger AS (
    WITH RECURSIVE whole (root, oid) AS (
        SELECT r.root, r.top::oid FROM root r
         WHERE EXISTS (SELECT FROM other_trigger t WHERE t.replaces IS NOT NULL)
        UNION
        SELECT t.root, i.inhrelid FROM whole t JOIN pg_inherits i ON i.inhparent = t.oid)
    SELECT tree.root, string_agg(format('DROP TRIGGER %I ON %s; ', t.tgname, t.tgrelid::regclass), ''
               ORDER BY t.oid) AS drops
      FROM whole AS tree
      JOIN root r ON r.root = tree.root
      JOIN pg_class c ON c.oid = tree.oid
      JOIN other_trigger t ON t.tgrelid = c.oid
     WHERE t.replaces IS NOT NULL AND t.tgparentid = 0 AND (c.oid = r.top OR c.relispartition)
     GROUP BY tree.root),

replaced_trigger AS (
    SELECT 9, s.root_n, CASE WHEN s.is_child THEN s.member_n ELSE 0 END,
           row_number() OVER (PARTITION BY s.root, s.is_child ORDER BY s.member_n, t.tgname), s.rel,
           'hole',
           format('trigger "%s" bears a name of the fence''s, but calls %s', t.tgname, t.tgfoid::regprocedure),
           CASE WHEN s.is_child
                THEN format('DROP TRIGGER %I ON %s; CREATE TRIGGER %1$I ', t.tgname, s.rel)
                    || format(u.definition, t.tgname)
                ELSE CASE WHEN row_number() OVER (
                              PARTITION BY s.root, s.is_child ORDER BY s.member_n, t.tgname) = 1
                          THEN w.drops ELSE '' END
                    || s.protect END
      FROM checked_member s
      JOIN other_trigger t ON t.tgrelid = s.oid
      JOIN trigger_repair u ON u.root = s.root AND u.oid = s.oid AND u.bits = t.replaces
      LEFT JOIN conflicting_trigger w ON w.root = s.root
     WHERE (s.is_root OR t.tgparentid = 0)
       AND (s.is_fenced OR s.is_child OR s.has_replaced_trigger AND NOT EXISTS (
               SELECT FROM former_partition d
                WHERE d.oid = s.oid AND (d.root_n IS NOT NULL OR about->>'relation' IS NOT NULL)))),

-- (A partition has copies of its root's triggers, so only differences are findings.)
trigger_fault AS (
    SELECT x.step, s.root_n, s.member_n, row_number() OVER (PARTITION BY s.root, s.oid ORDER BY t.tgname, x.n),
           s.rel, x.severity, x.finding, x.remedy
      FROM checked_member s
      JOIN own_trigger t ON t.tgrelid = s.oid
      LEFT JOIN own_trigger original ON original.oid = t.tgparentid
      JOIN trigger_repair u ON u.root = s.root AND u.oid = s.oid
           AND u.bits = CASE t.bits WHEN 0 THEN 1 ELSE t.bits END
     CROSS JOIN LATERAL (VALUES (
           format(u.remedy, t.tgname), format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I;', s.rel, t.tgname))
           ) AS repair (recreate, enable_always)
     CROSS JOIN LATERAL (VALUES
        (10, 1, t.tgenabled = 'D', 'hole', format('trigger "%s" is disabled', t.tgname),
         CASE WHEN s.must_fire_always THEN repair.enable_always
         ELSE format('ALTER TABLE %s ENABLE TRIGGER %I;', s.rel, t.tgname) END),
        (10, 2, t.tgenabled = 'R', 'hole', format('trigger "%s" fires for apply workers only', t.tgname),
         repair.enable_always),
        -- (For rows written by an apply worker, `fenced` checks the order, and the other two triggers nothing. They are
        -- reported all the same: the fence is not the requested one, and the next call of fence_protect would change
        -- it.)
        (10, 3, t.tgenabled = 'O' AND s.is_subscribed AND t.bits = 3, 'notice',
         format('a subscription writes here, and trigger "%s" does not fire for it', t.tgname), repair.enable_always),
        -- (An administrator has to decide which of the two is to write here.)
        (10, 8, t.tgenabled = 'O' AND s.replicated_by <> 'Bucardo' AND t.bits = 3, 'notice',
         format('%s writes here, and trigger "%s" does not fire for it', s.replicated_by, t.tgname), NULL),
        (10, 8, s.replicated_by = 'Bucardo' AND t.bits = 3, 'notice',
         format('Bucardo replicates this table: where it writes here, it deletes and copies rows, and trigger "%s" checks none '
             'of it, not even when enabled ALWAYS', t.tgname), NULL),
        (10, 4, t.tgenabled = 'O' AND s.is_always AND NOT s.is_subscribed, 'notice',
         format('trigger "%s" does not fire for apply workers, as %s', t.tgname,
             CASE WHEN s.is_root THEN 'others of this fence do' ELSE format('that of %s does', s.root_rel) END),
         repair.enable_always),
        (10, 5, t.skips_writes, 'hole',
         format('trigger "%s" has a WHEN clause or a list of columns, and skips some writes', t.tgname),
         repair.recreate),
        (10, 6, (t.fence_column, t.mode, t.lease, t.deadline)
                IS DISTINCT FROM (s.fence_column, s.mode, s.lease, s.deadline)
             OR t.has_unfenced_insert AND NOT s.has_unfenced_insert, 'hole',
         format('trigger "%s" checks by other arguments than the fence of %s', t.tgname, s.root_rel),
         repair.recreate),
        (13, 7, t.bits = 3 AND t.has_unfenced_insert AND s.is_fenced AND s.has_client_chosen_key, 'hole',
         'rows are created without their lease, by keys that clients choose: '
             'a late INSERT can bring a deleted row back',
         repair.recreate)
     ) AS x (step, n, applies, severity, finding, remedy)
     WHERE x.applies AND s.has_fence
       AND (s.is_root OR t.tgparentid = 0 OR t.tgenabled <> original.tgenabled OR x.step = 13)),

missing_event AS (
    SELECT 11, s.root_n, s.member_n, u.bits * -1, s.rel, CASE u.bits WHEN 3 THEN 'hole' ELSE 'notice' END,
           CASE u.bits WHEN 3 THEN upper(array_to_string(array_remove(s.missing, 'truncate'), ', '))
                       ELSE 'TRUNCATE' END || ' not fenced',
           format(u.remedy, k.tgname)
      FROM checked_member s
      JOIN trigger_repair u ON u.root = s.root AND u.oid = s.oid
      JOIN trigger_kind k ON k.bits = u.bits
     WHERE s.has_fence AND CASE u.bits WHEN 3 THEN s.missing && '{insert,update,delete}'
                                       WHEN 2 THEN 'truncate' = ANY (s.missing) END),

-- A later trigger may change what the fence has checked, unless the table has verify. (An UPDATE that moves a row
-- between partitions ends in an INSERT.) A table with a deadline cannot have verify: the trigger gets a name by which it
-- runs before the fence, and in the same order as before among the renamed ones. There is no remedy if that name is too
-- long or taken, or if the fence's trigger has a name that sorts before it.
later_trigger AS (
    SELECT 12, s.root_n, s.member_n, row_number() OVER (PARTITION BY s.root, s.oid ORDER BY t.tgname), s.rel,
           'hole',
           format('trigger "%s" runs after the fence and may change what it has checked', t.tgname),
           CASE WHEN s.deadline IS NULL THEN format(u.remedy, 'fenced_verify')
                WHEN octet_length(earlier.name) < 64 AND NOT EXISTS (
                     WITH RECURSIVE renamed (oid) AS (
                         SELECT origin.oid
                         UNION ALL
                         SELECT i.inhrelid
                           FROM renamed r JOIN pg_inherits i ON i.inhparent = r.oid JOIN pg_class c ON c.oid = i.inhrelid
                          WHERE c.relispartition)
                     SELECT FROM renamed r JOIN pg_trigger o ON o.tgrelid = r.oid
                      WHERE o.tgname = earlier.name
                         OR o.tgfoid = (about->>'fenced_oid')::oid AND o.tgname < earlier.name
                        AND o.tgtype & 3 = 3 AND o.tgtype & t.tgtype & 20 <> 0)
                THEN format('ALTER TRIGGER %I ON %s RENAME TO %I;', t.tgname, origin.oid::regclass, earlier.name) END
      FROM checked_member s
      JOIN other_trigger t ON t.tgrelid = s.oid
      JOIN trigger_repair u ON u.root = s.root AND u.oid = s.oid AND u.bits = 1
     CROSS JOIN LATERAL (VALUES ('fence_' || t.tgname)) AS earlier (name)
     CROSS JOIN LATERAL (  -- a partition's copy is renamed with the original
           SELECT coalesce((SELECT p.tgrelid
                              FROM pg_partition_ancestors(s.oid) AS a JOIN pg_trigger p ON p.tgrelid = a.relid
                             WHERE p.tgname = t.tgname AND p.tgparentid = 0), s.oid)) AS origin (oid)
     WHERE s.has_fence AND (s.is_root OR t.tgparentid = 0) AND t.tgtype & 3 = 3 AND t.tgenabled <> 'D'
       AND NOT t.changes_no_row AND t.replaces IS NULL
       AND EXISTS (
           SELECT FROM event e
            WHERE e.name IN ('insert', 'update') AND t.tgtype & e.bit <> 0 AND e.name = ANY (s.events)
              AND (e.name <> ALL (s.after) OR s.moves_rows AND 'insert' <> ALL (s.after))
              AND t.tgname > coalesce((
                  SELECT o.tgname FROM own_trigger o
                   WHERE o.tgrelid = s.oid AND o.bits = 3 AND o.tgtype & e.bit <> 0
                   ORDER BY o.tgname LIMIT 1), 'fenced'))),

-- Roles that can bypass a fence: by a privilege, a foreign key that writes, membership in the owner, or a setting. ------

-- The roles for which a privilege makes a difference.
grantee (oid, quoted_name) AS (
    SELECT 0::oid, 'PUBLIC'
    UNION ALL
    SELECT r.oid, quote_ident(r.rolname) FROM pg_roles r WHERE NOT r.rolsuper),

privilege AS (
    SELECT 14, s.root_n, s.member_n, a.n, s.rel, x.severity, x.finding,
           format('REVOKE %s ON %s FROM %s CASCADE;', a.privilege_type, s.rel,
               CASE WHEN a.grantor = s.relowner THEN g.quoted_name ELSE quote_ident(pg_get_userbyid(a.grantor)) END)
      FROM checked_member s
      JOIN pg_class c ON c.oid = s.oid
     CROSS JOIN aclexplode(coalesce(c.relacl, acldefault('r', c.relowner)))
           WITH ORDINALITY AS a (grantor, grantee, privilege_type, is_grantable, n)
      JOIN grantee g ON g.oid = a.grantee
     CROSS JOIN LATERAL (VALUES
        ('TRUNCATE', CASE WHEN 'truncate' = ANY (s.before) THEN 'notice' ELSE 'hole' END,
         format('%s may TRUNCATE; %s', g.quoted_name, CASE WHEN 'truncate' = ANY (s.before)
             THEN 'only the trigger stands in the way' ELSE 'nothing stands in the way' END)),
        ('TRIGGER', 'hole', format('%s may create triggers, and replace those of the fence', g.quoted_name))
     ) AS x (privilege, severity, finding)
     WHERE s.has_fence AND a.privilege_type = x.privilege AND a.grantee <> s.relowner),

-- (Sorted before the remedy that renames one of its columns back. A key that is NOT ENFORCED has no triggers.)
foreign_key AS (
    SELECT 1, s.root_n, 0, row_number() OVER (PARTITION BY s.root ORDER BY s.member_n, k.conname), s.rel,
           CASE WHEN writes.events <@ s.before THEN 'notice' ELSE 'hole' END,
           format('foreign key "%s" writes here when a row of %s changes', k.conname, k.confrelid::regclass),
           -- (A quoted name is left unchanged, whatever words it contains.)
           format('ALTER TABLE %s DROP CONSTRAINT %I, ADD CONSTRAINT %2$I %s;', s.rel, k.conname,
               regexp_replace(pg_get_constraintdef(k.oid),
                   E'("[^"]*")| ON (UPDATE|DELETE) (CASCADE|SET NULL|SET DEFAULT)( [(]([^")]|"[^"]*")*[)])?',
                   E'\\1', 'g'))
      FROM checked_member s
      JOIN pg_constraint k ON k.conrelid = s.oid
     CROSS JOIN LATERAL (VALUES (array_remove(ARRAY [
           CASE WHEN k.confdeltype = 'c' THEN 'delete' END,
           CASE WHEN k.confdeltype IN ('n', 'd') OR k.confupdtype IN ('c', 'n', 'd') THEN 'update' END],
           NULL))) AS writes (events)
     WHERE s.has_fence AND k.contype = 'f' AND k.conparentid = 0 AND writes.events <> '{}'
       AND EXISTS (SELECT FROM pg_trigger t WHERE t.tgconstraint = k.oid)),

member_of_owner AS (
    SELECT 19, f.root_n, NULL::bigint, row_number() OVER (PARTITION BY f.root ORDER BY g.rolname), f.root_rel,
           'notice', format('%I is a member of the owner, and may take the fence off', g.rolname),
           grants.revoke_statement
      FROM fence f
     CROSS JOIN LATERAL (  -- PostgreSQL 16 and newer have a membership for each role that has granted it
           SELECT am.member, string_agg(format('REVOKE %I FROM %I%s CASCADE;', pg_get_userbyid(am.roleid),
                      pg_get_userbyid(am.member), CASE WHEN current_setting('server_version_num')::integer >= 160000
                          THEN format(' GRANTED BY %I', pg_get_userbyid(am.grantor)) END), ' ' ORDER BY am.grantor)
             FROM pg_auth_members am WHERE am.roleid = f.root_owner
            GROUP BY am.member) AS grants (member, revoke_statement)
      JOIN pg_roles g ON g.oid = grants.member
     WHERE f.is_fenced AND NOT g.rolsuper AND EXISTS (
           SELECT FROM pg_roles login WHERE login.rolcanlogin AND pg_has_role(login.oid, g.oid, 'MEMBER'))),

-- An apply worker writes with the rights of the subscription's owner, under which the fence checks little or nothing. Its
-- owner decides where the rows come from. (Without run_as_owner, PostgreSQL 16 and newer ask whether the owner of the
-- subscription may act as that of the table; he may change that.)
subscribing (role) AS MATERIALIZED (
    SELECT g.oid FROM pg_roles g
     WHERE NOT g.rolsuper AND (g.oid IN (SELECT u.subowner FROM pg_subscription u) OR EXISTS (
           -- (There is no such role before PostgreSQL 16.)
           SELECT FROM pg_roles p
            WHERE p.rolname = 'pg_create_subscription' AND pg_has_role(g.oid, p.oid, 'MEMBER')))),

may_write AS (
    SELECT f.root_n, f.root, f.root_rel, g.role
      FROM fence f CROSS JOIN subscribing g
     WHERE f.is_fenced AND NOT pg_has_role(g.role, f.root_owner, 'MEMBER')
       AND has_table_privilege(g.role, f.root, 'INSERT, UPDATE, DELETE')),

subscriber AS (
    SELECT 19, w.root_n, NULL::bigint, 1000000 + row_number() OVER (PARTITION BY w.root ORDER BY u.subname), w.root_rel,
           'hole', format('subscription "%s" belongs to %I, who %s here, past the fence (drop it)', u.subname,
               pg_get_userbyid(u.subowner),
               CASE WHEN subscription.writes THEN 'decides what it writes' ELSE 'may have it write' END), NULL
      FROM may_write w JOIN pg_subscription u ON u.subowner = w.role
     CROSS JOIN LATERAL (
           SELECT EXISTS (SELECT FROM member m JOIN pg_subscription_rel r ON r.srrelid = m.oid
                           WHERE m.root = w.root AND r.srsubid = u.oid)) AS subscription (writes)
     WHERE u.subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
       AND (subscription.writes OR EXISTS (SELECT FROM pg_roles login WHERE login.rolcanlogin AND NOT login.rolsuper
                                 AND pg_has_role(login.oid, w.role, 'MEMBER')))),

may_subscribe AS (
    SELECT 19, w.root_n, NULL::bigint, 2000000 + row_number() OVER (PARTITION BY w.root ORDER BY g.rolname), w.root_rel,
           'hole', format('%I may create subscriptions, which write past the fence', g.rolname), grants.revoke_statement
      FROM (SELECT am.member, string_agg(format('REVOKE pg_create_subscription FROM %I GRANTED BY %I CASCADE;',
                       pg_get_userbyid(am.member), pg_get_userbyid(am.grantor)), ' ' ORDER BY am.grantor)
              FROM pg_auth_members am JOIN pg_roles p ON p.oid = am.roleid AND p.rolname = 'pg_create_subscription'
             GROUP BY am.member) AS grants (member, revoke_statement)
      JOIN pg_roles g ON g.oid = grants.member
      JOIN (SELECT DISTINCT root_n, root, root_rel FROM may_write) AS w ON EXISTS (
           SELECT FROM may_write m JOIN pg_roles login ON login.oid = m.role
            WHERE m.root = w.root AND login.rolcanlogin AND pg_has_role(login.oid, g.oid, 'MEMBER')
              AND has_database_privilege(login.oid, current_database(), 'CREATE'))),

-- A setting of the database overrides the server's configuration.
effective_setting (name, value, set_for) AS (
    SELECT lower(split_part(item, '=', 1)), split_part(item, '=', 2), CASE
           WHEN setrole = 0 AND setdatabase = 0 THEN 'ROLE ALL'
           WHEN setrole = 0 THEN format('DATABASE %I', current_database())
           WHEN setdatabase = 0 THEN format('ROLE %I', pg_get_userbyid(setrole))
           ELSE format('ROLE %I IN DATABASE %I', pg_get_userbyid(setrole), current_database()) END
      FROM pg_db_role_setting CROSS JOIN unnest(setconfig) AS item
     WHERE setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
    UNION ALL
    SELECT lower(split_part(item, '=', 1)), split_part(item, '=', 2),
           CASE p.prokind WHEN 'p' THEN 'PROCEDURE ' ELSE 'FUNCTION ' END || p.oid::regprocedure
      FROM pg_proc p CROSS JOIN unnest(p.proconfig) AS item
    UNION ALL
    SELECT lower(g.name), g.setting, 'the whole server' FROM pg_settings g
     WHERE g.source IN ('configuration file', 'command line', 'environment variable') AND NOT EXISTS (
           SELECT FROM pg_db_role_setting o JOIN pg_database d ON d.oid = o.setdatabase
            WHERE d.datname = current_database() AND o.setrole = 0
              AND lower(g.name) IN (SELECT lower(split_part(item, '=', 1)) FROM unnest(o.setconfig) AS item))),

setting AS (
    SELECT 23, NULL::bigint, NULL::bigint, row_number() OVER (), (about->>'relation')::oid::regclass, 'hole',
           format(x.finding, s.set_for),
           CASE WHEN s.set_for = 'the whole server'
                THEN format('ALTER DATABASE %I SET %s = %L;', current_database(), s.name, x.harmless_value)
                ELSE format('ALTER %s RESET %s;', s.set_for, s.name) END
      FROM effective_setting s
      JOIN (VALUES ('pg_fence.token', NULL, '',
                    'pg_fence.token is set for %s: who has no token presents that one'),
                   ('session_replication_role', 'replica', 'origin',
                    'session_replication_role is set for %s: triggers that are not ENABLE ALWAYS do not fire')
           ) AS x (name, value, harmless_value, finding)
        ON x.name = s.name AND (x.value IS NULL OR lower(s.value) = x.value)
     WHERE s.value <> '' AND EXISTS (SELECT FROM fence f WHERE f.is_fenced)),

parameter_privilege AS (
    SELECT 24, NULL::bigint, NULL::bigint, row_number() OVER (), (about->>'relation')::oid::regclass, 'hole',
           format('%s may set session_replication_role, under which fences check little or nothing', g.quoted_name),
           format('REVOKE %s ON PARAMETER session_replication_role FROM %s CASCADE;', a.privilege_type, g.quoted_name)
      FROM pg_parameter_acl p CROSS JOIN aclexplode(p.paracl) AS a
      JOIN grantee g ON g.oid = a.grantee
     WHERE p.parname = 'session_replication_role' AND EXISTS (SELECT FROM fence f WHERE f.is_fenced)),

-- Faults of a fence as a whole. ------

-- The remedy binds a table by the columns that identify its rows; if these do not fit, all rows share one lease.
fence_fault AS (
    SELECT x.step, f.root_n, NULL::bigint, 1, f.root_rel, x.severity, x.finding, x.remedy
      FROM fence f
      JOIN pg_class c ON c.oid = f.root
      JOIN pg_namespace n ON n.oid = c.relnamespace
     CROSS JOIN allowed_types
      LEFT JOIN LATERAL (
           SELECT string_agg(format(':{%s}', a.attname), '' ORDER BY a.attnum)
             FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[:i.indnkeyatts - 1])
            WHERE i.indrelid = f.root AND i.indisprimary
           HAVING bool_and(a.atttypid = ANY (allowed_types.oids) AND a.attgenerated = ''
                  AND a.attname <> f.fence_column AND a.attname !~ '[{}]')) AS key (placeholders) ON true
     CROSS JOIN LATERAL (  -- a schema a tenant, made from one template
           SELECT string_agg(DISTINCT o.oid::regclass::text, ', ')
             FROM own_trigger t JOIN pg_class o ON o.oid = t.tgrelid
            WHERE f.is_fenced AND f.top = f.root_rel AND t.tgparentid = 0 AND t.lease = f.lease
              AND o.oid <> c.oid AND o.relname = c.relname) AS sharing (tables)
      LEFT JOIN former_partition d ON d.oid = f.root
     CROSS JOIN LATERAL (VALUES
        (1, NOT f.is_fenced AND NOT f.root_is_child AND NOT f.root_has_replaced_trigger
             AND about->>'relation' IS NOT NULL AND d.oid IS NULL, 'hole',
         'no trigger of pg_fence is on this table', f.protect),
        (1, NOT f.is_fenced AND about->>'relation' IS NOT NULL AND d.oid IS NOT NULL, 'hole',
         format('no trigger of pg_fence is on this table, with the very columns of %s: a detached partition? '
             '(fence it by the lease of that one: fence_protect has to be told)', d.roots), NULL),
        -- The fence may have been removed, or not restored by a restore.
        (1, NOT f.is_fenced AND NOT f.root_is_child AND NOT f.root_has_replaced_trigger AND about->>'relation' IS NULL
             AND d.root_n IS NULL, 'notice',
         'no trigger of pg_fence is on this table, which was fenced (if it was bound to a lease, bind it again)',
         f.protect),
        (16, f.is_fenced AND f.mode = 'monotonic' AND f.lease IS NULL AND f.deadline IS NULL, 'hole',
         'monotonic without a lease: a client that writes every column back passes with the token it read',
         f.protect),
        (17, f.is_fenced AND f.top <> f.root_rel AND f.top NOT IN (SELECT t.tgrelid FROM own_trigger t), 'hole',
         format('only this partition of %s is fenced: rows can move around its fence', f.top), f.protect),
        (22, sharing.tables IS NOT NULL, 'notice',
         format('its leases have the same names as those of %s: the holder of one holds all', sharing.tables),
         CASE WHEN f.protect IS NOT NULL THEN
             format('SELECT %s.fence_protect(%L, lease => %L, verify => NULL, always => NULL);', about->>'home', f.root_rel,
             replace(replace(n.nspname, '{', '{{'), '}', '}}') || ':' || f.lease) END),
        -- Comes last for its table, because the other remedies restore the fence as it is.
        (22, f.is_fenced AND f.lease IS NULL AND f.deadline IS NULL AND f.top = f.root_rel AND NOT f.root_is_child
             AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't', 'notice',
         'this table is bound to no lease: the holder of any lease can write it',
         format('SELECT %s.fence_protect(%L%s, mode => %L, lease => %L, verify => NULL, always => NULL);',
             about->>'home', f.root_rel,
             ', fence_column => ' || quote_literal(nullif(f.fence_column, 'fence')),
             CASE f.mode WHEN 'managed' THEN 'managed' ELSE 'monotonic' END,
             replace(replace(c.relname, '{', '{{'), '}', '}}') || coalesce(key.placeholders, ''))),
        -- Clients would have to present their tokens in another way, so there is no remedy to run.
        (23, f.is_fenced AND f.mode = 'monotonic' AND (f.lease IS NOT NULL OR f.deadline IS NOT NULL) AND f.top = f.root_rel
             AND NOT f.root_is_child AND c.relkind IN ('r', 'p'), 'notice',
         format('monotonic: a statement that copies the fence column (SET %1$I = %1$I, CASE ... ELSE %1$I END, as some ORMs '
             'write) speaks for the present holder, whoever runs it; in managed mode it presents nothing', f.fence_column),
         NULL)
     ) AS x (step, applies, severity, finding, remedy)
     WHERE x.applies),

lease_column_fault AS (
    SELECT 8, p.root_n, 0, row_number() OVER (PARTITION BY p.root ORDER BY p.name), p.root_rel,
           'notice',
           format('the lease names {%s}, which %s', p.name, CASE WHEN is_usable
               THEN 'may be NULL: nobody can write such a row' ELSE 'is no fit column: no write can pass' END)
               || CASE WHEN a.attnum IS NULL AND renamed.name IS NULL OR a.attgenerated = 'v'
                  THEN ' (bring it back, or call fence_protect with a lease that fits the columns)' ELSE '' END,
           CASE WHEN a.attgenerated = 'v' THEN NULL  -- no ALTER TABLE makes it a plain one
                WHEN a.attnum IS NOT NULL AND (is_usable OR a.attgenerated <> '' OR (p.root, p.name) NOT IN (
                     SELECT x.root, x.name FROM fixed_type x))
                THEN format('ALTER TABLE %s %s;', p.root_rel, concat_ws(', ',
                    CASE WHEN a.attgenerated <> '' THEN format('ALTER COLUMN %I DROP EXPRESSION', p.name)
                         WHEN NOT is_usable THEN format('ALTER COLUMN %I TYPE text USING %1$I::text', p.name) END,
                    CASE WHEN NOT is_not_null THEN format('ALTER COLUMN %I SET NOT NULL', p.name) END))
                WHEN renamed.name IS NOT NULL
                THEN format('ALTER TABLE %s RENAME COLUMN %I TO %I;', p.root_rel, renamed.name, p.name)
                     || CASE WHEN renamed.attgenerated <> ''
                        THEN format(' ALTER TABLE %s ALTER COLUMN %I DROP EXPRESSION;', p.root_rel, p.name)
                        WHEN renamed.atttypid <> ALL (allowed_types.oids)
                        THEN format(' ALTER TABLE %s ALTER COLUMN %I TYPE text USING %2$I::text;', p.root_rel, p.name)
                        ELSE '' END
                END
      FROM placeholder p
     CROSS JOIN allowed_types
      LEFT JOIN pg_attribute a ON a.attrelid = p.root AND a.attname = p.name AND a.attnum > 0
      LEFT JOIN LATERAL (  -- from what it was renamed, where only one column of the key can be meant
           SELECT min(k.attname::text), min(k.atttypid), min(k.attgenerated::text)
             FROM pg_index i JOIN pg_attribute k ON k.attrelid = i.indrelid AND k.attnum = ANY (i.indkey[:i.indnkeyatts - 1])
            WHERE i.indrelid = p.root AND i.indisprimary
              AND k.attname NOT IN (SELECT o.name FROM placeholder o WHERE o.root = p.root)
           HAVING count(*) = 1 AND 1 = (
                  SELECT count(*) FROM placeholder o
                   WHERE o.root = p.root AND NOT EXISTS (
                         SELECT FROM pg_attribute k WHERE k.attrelid = o.root AND k.attname = o.name AND k.attnum > 0))
           ) AS renamed (name, atttypid, attgenerated) ON true
     -- (In PostgreSQL 18 and newer, NOT NULL NOT VALID marks the column, and leaves existing rows alone.)
     CROSS JOIN LATERAL (VALUES (
           coalesce(a.attgenerated = '' AND a.atttypid = ANY (allowed_types.oids), false),
           a.attnotnull AND NOT EXISTS (
               SELECT FROM pg_constraint k
                WHERE k.conrelid = p.root AND k.contype = 'n' AND k.conkey = ARRAY [a.attnum] AND NOT k.convalidated))
           ) AS x (is_usable, is_not_null)
     WHERE NOT (is_usable AND is_not_null)),

swapped_column AS (
    SELECT 18, w.root_n, NULL::bigint, 1000000 + row_number() OVER (PARTITION BY w.root_n ORDER BY w.name), w.root_rel,
           'notice',
           format('the lease names {%s}, which is another column than when the table was fenced: that is "%s" now '
               '(rename them back; or, if that is meant, call fence_protect once more)', w.name, w.present_name), NULL
      FROM jsonb_to_recordset(about->'swapped') AS w (root_n bigint, root_rel regclass, name text, present_name text)),

-- (If it has its TRUNCATE trigger, it is a root of its own in an audit of all tables.)
detached_partition AS (
    SELECT 20, d.root_n, NULL::bigint, row_number() OVER (PARTITION BY d.root_n ORDER BY d.oid), d.oid::regclass,
           CASE WHEN d.is_certain THEN 'hole' ELSE 'notice' END,
           format('not fenced, with the very columns of %s: a detached partition?', d.roots)
               || CASE WHEN d.protect IS NULL THEN ' (then fence it by the lease of that one)' ELSE '' END, d.protect
      FROM former_partition d
     WHERE d.root_n IS NOT NULL AND NOT (d.is_certain AND about->>'relation' IS NULL)),

finding (step, root_n, member_n, n, rel, severity, finding, remedy) AS (
    SELECT * FROM table_fault
    UNION ALL SELECT * FROM fence_column_fault
    UNION ALL SELECT * FROM deadline_fault
    UNION ALL SELECT * FROM fence_ahead
    UNION ALL SELECT * FROM replaced_trigger
    UNION ALL SELECT * FROM trigger_fault
    UNION ALL SELECT * FROM missing_event
    UNION ALL SELECT * FROM later_trigger
    UNION ALL SELECT * FROM privilege
    UNION ALL SELECT * FROM foreign_key
    UNION ALL SELECT * FROM member_of_owner
    UNION ALL SELECT * FROM subscriber
    UNION ALL SELECT * FROM may_subscribe
    UNION ALL SELECT * FROM setting
    UNION ALL SELECT * FROM parameter_privilege
    UNION ALL SELECT * FROM fence_fault
    UNION ALL SELECT * FROM lease_column_fault
    UNION ALL SELECT * FROM swapped_column
    UNION ALL SELECT * FROM detached_partition)
SELECT jsonb_agg(to_jsonb(f) || jsonb_build_object('rel', f.rel::oid)) FROM finding f
$audit_findings$;

COMMENT ON FUNCTION fence.audit_findings(jsonb) IS
'findings on tables, triggers, rights and fences; called by fence_audit alone';


-- All findings in their order. (Steps from 40 on belong to no table.)
CREATE FUNCTION fence.audit_answer(about jsonb, findings jsonb) RETURNS SETOF fence.audit_finding
LANGUAGE plpgsql ROWS 10
SET search_path = pg_catalog, pg_temp
SET jit = off  -- compiling the query would take far longer than running it
AS $audit_answer$
DECLARE
    distributed regclass[];  -- the tables that Citus has distributed over nodes
    is_coordinator boolean;
BEGIN
    -- (A table with a finding may have been dropped meanwhile.)
    RETURN QUERY
    SELECT c.oid::regclass, f.severity, f.finding, f.remedy
      FROM jsonb_to_recordset(findings) AS f (step integer, root_n bigint, member_n bigint, n bigint, rel oid,
                                              severity text, finding text, remedy text)
      LEFT JOIN pg_class c ON c.oid = f.rel
     WHERE f.step < 40 AND (f.rel IS NULL OR c.oid IS NOT NULL)
     ORDER BY f.root_n NULLS LAST, f.member_n NULLS LAST, f.step, f.n;

    -- Rows that Citus has distributed are checked on its nodes, so each shard is audited there. Findings of several
    -- shards become one, for the first of them, where the audit has the remedy; a finding that the table has already is
    -- not repeated. (The catalog and functions of Citus are in pg_catalog, where nobody else can create any. On a node
    -- the schema of our functions is checked before one is called by name.)
    IF to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL THEN
        EXECUTE 'SELECT array_agg(p.logicalrelid ORDER BY p.logicalrelid::text),
                        (SELECT l.groupid = 0 FROM pg_catalog.pg_dist_local_group AS l)
                   FROM pg_catalog.pg_dist_partition AS p JOIN pg_class AS c ON c.oid = p.logicalrelid
                  WHERE p.logicalrelid = ANY ($1) AND pg_has_role(c.relowner, ''USAGE'')'
           INTO distributed, is_coordinator
          USING CASE WHEN about->>'relation' IS NULL THEN ARRAY(
                    SELECT t.tgrelid FROM jsonb_to_recordset(about->'own_triggers') AS t (tgrelid oid))
                ELSE ARRAY[(about->>'relation')::oid] END;
        IF distributed IS NOT NULL AND NOT is_coordinator THEN
            RAISE NOTICE USING MESSAGE = format('not looked at: the shards of %s', array_to_string(distributed, ', ')),
                HINT = 'Ask the coordinator of Citus.';
        ELSIF distributed IS NOT NULL THEN
            RETURN QUERY EXECUTE $shards$
                WITH shard AS (
                    SELECT s.logicalrelid AS rel, '_' || s.shardid AS suffix, p.nodename::text, p.nodeport::integer,
                           CASE c.relnamespace::regnamespace::text WHEN 'public' THEN 'public.' ELSE '' END
                           || shard_name(s.logicalrelid, s.shardid) AS name
                      FROM pg_catalog.pg_dist_shard AS s JOIN pg_catalog.pg_dist_shard_placement AS p USING (shardid)
                      JOIN pg_class AS c ON c.oid = s.logicalrelid
                     WHERE s.logicalrelid = ANY ($1)),
                requested AS (
                    SELECT s.nodename, s.nodeport, array_agg(s.name) AS names FROM shard s GROUP BY 1, 2),
                node_answer AS (
                    SELECT r.* FROM (SELECT array_agg(a.nodename) AS names, array_agg(a.nodeport) AS ports,
                                            array_agg(format($2, a.names)) AS commands FROM requested a) AS a
                     CROSS JOIN LATERAL pg_catalog.master_run_on_worker(a.names, a.ports, a.commands, false) AS r),
                finding AS (
                    SELECT s.rel, s.name, s.nodename, s.nodeport, f.severity, replace(f.finding, s.suffix, '') AS finding
                      FROM node_answer t
                     CROSS JOIN LATERAL json_to_recordset(CASE WHEN t.success THEN t.result::json END)
                           AS f (name text, severity text, finding text)
                      JOIN shard s ON (s.nodename, s.nodeport, s.name) = (t.node_name, t.node_port, f.name)
                    UNION ALL
                    SELECT s.rel, s.name, s.nodename, s.nodeport, 'notice',
                           'not looked at: ' || coalesce(t.result, 'pg_fence is not there')
                      FROM node_answer t
                      JOIN shard s ON (s.nodename, s.nodeport) = (t.node_name, t.node_port)
                     WHERE t.success IS NOT TRUE OR t.result IS NULL)
                SELECT f.rel, f.severity,
                       format('on %s of %s shards: %s (first of them: %s)', count(*),
                           (SELECT count(*) FROM shard s WHERE s.rel = f.rel), f.finding,
                           min(format('%s on %s:%s', f.name, f.nodename, f.nodeport))), NULL::text
                  FROM finding f
                 WHERE f.finding = ANY ($3) IS NOT TRUE
                 -- Citus puts no such trigger on shards; a role with only rights on the table is refused on every node.
                   AND (f.severity, f.finding) <> ('notice', 'TRUNCATE not fenced')
                 GROUP BY f.rel, f.severity, f.finding
                 ORDER BY f.rel::text, f.severity, f.finding
            $shards$
            USING distributed, format(
                'SELECT CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_extension AS e '
                    'WHERE e.extname OPERATOR(pg_catalog.=) ''pg_fence'' '
                    'AND e.extnamespace::pg_catalog.regnamespace::pg_catalog.text OPERATOR(pg_catalog.=) %1$L) '
                'THEN (SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(''name'', s.name, '
                        '''severity'', f.severity, ''finding'', f.finding)), ''[]'')::pg_catalog.text '
                    'FROM pg_catalog.unnest(%%1$L::pg_catalog.text[]) AS s (name) CROSS JOIN LATERAL '
                         '%1$s.fence_audit(coalesce(pg_catalog.to_regclass(s.name), ''-'')) AS f) END',
                replace(about->>'home', '%', '%%')),
            ARRAY(SELECT f.finding FROM jsonb_to_recordset(findings) AS f (finding text));
        END IF;
    END IF;

    RETURN QUERY
    SELECT f.rel, f.severity, f.finding, f.remedy
      FROM jsonb_to_recordset(findings) AS f (step integer, n bigint, rel regclass, severity text, finding text, remedy text)
     WHERE f.step >= 40
     ORDER BY f.step, f.n;

    IF about->>'last_token' IS NULL AND about->'fence_columns' <> '[]' THEN
        RAISE NOTICE USING
            MESSAGE = 'not looked at: whether rows hold fences above the last token drawn',
            HINT = CASE WHEN (about->>'uses_leases')::boolean THEN 'Ask the primary: a standby does not know it.'
                ELSE format('That is for those who may see leases: SELECT %s.fence_grant(%L, %L);',
                    about->>'home', current_user, 'monitor') END;
    END IF;
END
$audit_answer$;

COMMENT ON FUNCTION fence.audit_answer(jsonb, jsonb) IS
'the answer of fence_audit; called by fence_audit alone';
