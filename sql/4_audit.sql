-- The ways left around the fences that the catalogs show, on the tables as they are, each with the statement
-- that closes it.
--
-- One function, with the rights of its caller: it shows what the caller may see and nothing more.
-- (Helpers would need EXECUTE for PUBLIC, or the rights of the extension's owner.) It reads the
-- catalogs, which are open to all, and for its last question the fenced table itself.
--
-- 'hole': a stale write can land by somebody who is neither superuser nor owner. 'notice': only by
-- one of these, or by what an administrator has set up; or a limit to know of.
-- The remedies of one answer can be run one after the other, in the order given.

CREATE TYPE fence.finding AS (relation regclass, severity text, finding text, remedy text);

COMMENT ON TYPE fence.finding IS 'a row of fence_audit';
COMMENT ON COLUMN fence.finding.relation IS 'the table; NULL where all fenced tables are meant';
COMMENT ON COLUMN fence.finding.severity IS
'hole: somebody who is neither superuser nor owner can land a stale write; notice: only one of these can, or a limit to know of';
COMMENT ON COLUMN fence.finding.finding IS 'what is wrong';
COMMENT ON COLUMN fence.finding.remedy IS 'the statement that closes it, or advice where there is none';


CREATE FUNCTION fence_audit(relation regclass DEFAULT NULL) RETURNS SETOF fence.finding
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $fence_audit$
DECLARE
    ours CONSTANT oid := '@extschema@.fenced()'::regprocedure;
    names CONSTANT name[] := '{fenced,fenced_truncate,fenced_verify}';  -- as fence_protect calls its triggers
    mark CONSTANT text := 'fencing token of the latest write (pg_fence)';
    usurped oid[];       -- tables that look fenced, but where another trigger bears one of the names
    drops text;          -- the statements that take such triggers off the table asked for and its partitions
    refusal record;
    r record;            -- the root: a fenced table
    m record;            -- a member: that table, or one that hangs below it
    members oid[];
    root_events text[];  -- what the root's triggers cover
    full_events text[];  -- what they should cover
    missing text[];
    root_filled boolean; -- whether the root's fence column fills itself
    later boolean;       -- whether some trigger runs after the fence
    subscribed boolean;  -- whether an apply worker writes here
    call text;           -- what a trigger of ours executes, up to the last argument
    verify_call text;    -- the same for one that verifies
    row_trigger text;    -- a row trigger as it should be: a format for the table and the call
    truncate_trigger CONSTANT text := 'BEFORE TRUNCATE ON %s FOR EACH STATEMENT %s';
    verify_trigger text;
    always_too text;     -- a format for the statement that makes a new trigger fire for apply workers, or nothing
    options text;        -- what fence_protect is to be called with, after the table
    protect text;        -- the statement that attaches the root's triggers as they should be
    any_fence boolean := false;
    last_token bigint;
    highest bigint;
BEGIN
    SELECT x.* INTO refusal
      FROM (VALUES (1)) AS once
      LEFT JOIN pg_class c ON c.oid = relation
     CROSS JOIN LATERAL (VALUES
        (c.oid IS NULL, '42P01', 'there is no such table', 'Name a table that exists.'),
        (NOT pg_has_role(c.relowner, 'USAGE'), '42501', 'only its owner may',
         format('Ask %I to do it.', pg_get_userbyid(c.relowner))),
        (c.relkind NOT IN ('r', 'p'), '42809', 'it is not a table of this server', 'Name a table.')
     ) AS x (applies, code, fault, hint)
     WHERE relation IS NOT NULL AND x.applies
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = refusal.code, HINT = refusal.hint,
            MESSAGE = format('cannot audit %s: %s', relation, refusal.fault),
            DETAIL = jsonb_build_object('relation', relation::text);
    END IF;

    -- The last token is for those who may use leases; whoever may not is told what was left out.
    IF has_function_privilege('@extschema@.fence_status()', 'EXECUTE')
        AND has_schema_privilege('fence', 'USAGE') THEN
        last_token := (SELECT s.last_token FROM @extschema@.fence_status() AS s);  -- NULL on a standby
    END IF;

    -- Who may create triggers may replace those of the fence, and leave their names: with all of them gone,
    -- the fence column is what tells.
    usurped := ARRAY (
        SELECT DISTINCT t.tgrelid
          FROM pg_trigger t JOIN pg_attribute a ON a.attrelid = t.tgrelid
         WHERE t.tgname = ANY (names) AND t.tgfoid <> ours AND a.attnum > 0 AND a.atttypid = 'int8'::regtype
           AND (a.attname = 'fence' OR col_description(a.attrelid, a.attnum) = mark));

    -- The table asked for, or each fenced one that does not hang below another.
    FOR r IN
        SELECT c.oid::regclass AS rel, c.relowner, c.relkind = 'p' OR c.relispartition AS moves_rows,
               coalesce(t.tgrelid = c.oid, false) AS fenced,
               coalesce(pg_partition_root(c.oid), c.oid::regclass) AS top,
               coalesce(nullif(a.args[1], ''), CASE WHEN t.oid IS NULL THEN (
                    SELECT f.attname::text FROM pg_attribute f
                     WHERE f.attrelid = c.oid AND col_description(c.oid, f.attnum) = mark
                     ORDER BY f.attnum DESC LIMIT 1) END, 'fence') AS fence_column,
               coalesce(nullif(a.args[2], ''), 'strict') AS mode,
               nullif(a.args[3], '') AS lease,
               EXISTS (SELECT FROM pg_trigger x
                        WHERE x.tgrelid = c.oid AND x.tgfoid = ours AND x.tgenabled = 'A') AS always
          FROM pg_class c
          LEFT JOIN LATERAL (  -- the trigger whose options count; where it has none, a parent's or a child's
               SELECT t.* FROM pg_trigger t
                WHERE t.tgfoid = ours AND t.tgrelid IN (
                      SELECT c.oid
                      UNION SELECT i.inhparent FROM pg_inherits i WHERE i.inhrelid = c.oid
                      UNION SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = c.oid)
                ORDER BY t.tgrelid = c.oid DESC, t.tgtype & 3 DESC, t.tgnargs DESC, t.tgname LIMIT 1) AS t ON true
         CROSS JOIN LATERAL (  -- what it is called with: each argument ends in a zero byte
               SELECT array_agg(convert_from(decode(arg[1], 'hex'), getdatabaseencoding()) ORDER BY n)
                 FROM regexp_matches(encode(t.tgargs, 'hex'), '((?:(?!00)..)*)00', 'g')
                      WITH ORDINALITY AS x (arg, n)) AS a (args)
         WHERE CASE WHEN relation IS NOT NULL THEN c.oid = relation
                    ELSE (t.tgrelid = c.oid OR c.oid = ANY (usurped)) AND pg_has_role(c.relowner, 'USAGE')
                     AND NOT EXISTS (
                         SELECT FROM pg_inherits i JOIN pg_trigger p ON p.tgrelid = i.inhparent
                          WHERE i.inhrelid = c.oid AND (p.tgfoid = ours OR p.tgrelid = ANY (usurped)))
               END
         ORDER BY c.oid::regclass::text
    LOOP
        members := ARRAY (
            WITH RECURSIVE tree AS (
                SELECT r.rel::oid AS oid
                UNION
                SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid)
            SELECT oid FROM tree);
        subscribed := EXISTS (SELECT FROM pg_subscription_rel s WHERE s.srrelid = ANY (members || r.top::oid));
        later := EXISTS (
            SELECT FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
             WHERE t.tgrelid = ANY (members) AND p.oid <> ours AND CASE WHEN t.tgname = ANY (names)
                   THEN t.tgname = 'fenced_verify'  -- and what stood there before did look again
                   ELSE p.pronamespace <> 'pg_catalog'::regnamespace
                    AND t.tgname > 'fenced' AND t.tgtype & 3 = 3 AND t.tgtype & 20 <> 0 AND t.tgenabled <> 'D' END);
        drops := (
            WITH RECURSIVE tree AS (
                SELECT r.top::oid AS oid
                UNION
                SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid)
            SELECT string_agg(format('DROP TRIGGER %I ON %s; ', t.tgname, t.tgrelid::regclass), '' ORDER BY t.oid)
              FROM tree JOIN pg_class c ON c.oid = tree.oid JOIN pg_trigger t ON t.tgrelid = c.oid
             WHERE t.tgname = ANY (names) AND t.tgfoid <> ours AND t.tgparentid = 0
               AND (c.oid = r.top OR c.relispartition));
        call := format('EXECUTE FUNCTION %s(', ours::regproc) || concat_ws(', ', quote_literal(r.fence_column),
            quote_literal(CASE WHEN r.lease IS NULL THEN 'strict' ELSE r.mode END), quote_literal(r.lease));
        always_too := CASE WHEN r.always OR subscribed THEN ' ALTER TABLE %s ENABLE ALWAYS TRIGGER %I;' ELSE '' END;
        verify_call := concat_ws(', ', call, CASE WHEN r.lease IS NULL THEN '''''' END, '''verify''');

        FOR m IN
            SELECT c.oid::regclass AS rel, c.oid = r.rel AS is_root, c.relkind, c.relpersistence, c.relispartition,
                   c.relowner, coalesce(c.relacl, acldefault('r', c.relowner)) AS acl,
                   i.inhparent::regclass AS parent, i.inhparent IS NOT NULL AND NOT c.relispartition AS is_child,
                   f.attnum, format_type(f.atttypid, f.atttypmod) AS type, f.filled, covered.before, covered.after
              FROM unnest(members) AS member (oid)
              JOIN pg_class c ON c.oid = member.oid
              LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhseqno = 1
              LEFT JOIN LATERAL (
                   SELECT a.*, CASE WHEN a.attgenerated <> '' THEN 'EXPRESSION' WHEN a.attidentity <> ''
                               THEN 'IDENTITY' WHEN a.atthasdef THEN 'DEFAULT' END AS filled
                     FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = r.fence_column) AS f ON true
             CROSS JOIN LATERAL (  -- the events for which it has a trigger of ours
                   SELECT coalesce(array_agg(e.name ORDER BY e.n) FILTER (WHERE at.before), '{}'),
                          coalesce(array_agg(e.name ORDER BY e.n) FILTER (WHERE at.after), '{}')
                     FROM (VALUES (1, 'insert', 4), (2, 'update', 16), (3, 'delete', 8), (4, 'truncate', 32))
                          AS e (n, name, bit)
                    CROSS JOIN LATERAL (
                          SELECT bool_or(t.tgtype & 3 = CASE e.name WHEN 'truncate' THEN 2 ELSE 3 END),
                                 bool_or(t.tgtype & 3 = 1)
                            FROM pg_trigger t
                           WHERE t.tgrelid = c.oid AND t.tgfoid = ours AND t.tgtype & e.bit <> 0
                          ) AS at (before, after)
                   ) AS covered (before, after)
             ORDER BY is_root DESC, c.oid::regclass::text
        LOOP
            IF m.is_root THEN
                root_events := m.before;
                root_filled := m.filled IS NOT NULL;
                full_events := ARRAY (
                    SELECT e FROM unnest('{insert,update,delete,truncate}'::text[]) AS e
                     WHERE e <> 'insert' OR r.lease IS NOT NULL OR e = ANY (root_events)
                        OR later AND r.moves_rows);  -- a row that moves is inserted at its new place
                row_trigger := 'BEFORE ' || array_to_string(array_remove(full_events, 'truncate'), ' OR ')
                    || ' ON %s FOR EACH ROW %s';
                verify_trigger := CASE WHEN 'insert' = ANY (full_events) THEN 'AFTER insert OR update'
                    ELSE 'AFTER update' END || ' ON %s FOR EACH ROW %s';
                -- One statement repairs all that attaching anew can repair, so that remedies agree.
                options := concat_ws(', ', '', 'fence_column => ' || quote_literal(nullif(r.fence_column, 'fence')),
                    'mode => ' || quote_literal(CASE WHEN r.lease IS NULL THEN 'strict' ELSE r.mode END),
                    'lease => ' || quote_literal(r.lease),
                    'events => ' || quote_literal(array_to_string(full_events, ',')),
                    CASE WHEN later OR m.after <> '{}' THEN 'verify => true' END,
                    CASE WHEN r.always OR subscribed THEN 'always => true' END) || ');';
                protect := 'SELECT @extschema@.fence_protect(' || quote_literal(r.top) || options;
                IF NOT r.fenced AND NOT m.is_child AND m.rel::oid <> ALL (usurped) THEN
                    RETURN QUERY VALUES (r.rel, 'hole', 'no trigger of pg_fence is on this table', protect);
                    EXIT;
                END IF;
            END IF;
            -- A partition has the row triggers of its root; what those lack is said of the root.
            missing := ARRAY (
                SELECT e FROM unnest(CASE WHEN m.is_root OR m.is_child THEN full_events ELSE root_events END) AS e
                 WHERE e <> ALL (m.before) AND m.relkind <> 'f');

            -- The table and its fence column: first, because fence_protect refuses what is wrong here.
            RETURN QUERY SELECT m.rel, x.severity, x.finding, x.remedy FROM (VALUES
                (m.relkind = 'f', 'hole', 'this table is foreign: nothing fences it on its own server',
                 CASE WHEN m.relispartition THEN format('ALTER TABLE %s DETACH PARTITION %s;', m.parent, m.rel)
                 WHEN m.is_child THEN format('ALTER FOREIGN TABLE %s NO INHERIT %s;', m.rel, m.parent)
                 ELSE format('SELECT @extschema@.fence_unprotect(%L);', m.rel) END),
                (m.relpersistence = 'u', 'hole', 'this table is unlogged: a crash empties it, fences and all',
                 format('ALTER TABLE %s SET LOGGED;', m.rel)),
                (m.relowner <> r.relowner, 'notice',
                 format('its owner %I is not that of %s, and may take its triggers off',
                     pg_get_userbyid(m.relowner), r.rel),
                 format('ALTER TABLE %s OWNER TO %I;', m.rel, pg_get_userbyid(r.relowner))),
                (m.is_root AND m.attnum IS NULL, 'notice',
                 format('the fence column "%s" is missing: no write can pass', r.fence_column),
                 coalesce((SELECT format('ALTER TABLE %s RENAME COLUMN %I TO %I;', m.rel, a.attname, r.fence_column)
                             FROM pg_description d
                             JOIN pg_attribute a ON a.attrelid = d.objoid AND a.attnum = d.objsubid
                            WHERE d.classoid = 'pg_class'::regclass AND d.objoid = m.rel
                              AND d.description = mark
                            ORDER BY a.attnum DESC LIMIT 1),
                          -- What the rows knew is lost: then no token drawn so far may write them.
                          format('ALTER TABLE %s ADD COLUMN %I bigint', m.rel, r.fence_column)
                              || ' DEFAULT ' || last_token
                              || format('; ALTER TABLE %s ALTER COLUMN %I DROP DEFAULT;', m.rel, r.fence_column),
                          format('ALTER TABLE %s ADD COLUMN %I bigint;', m.rel, r.fence_column))),
                (m.is_root AND m.type <> 'bigint', 'notice',
                 format('the fence column "%s" is %s, not bigint: no write can pass', r.fence_column, m.type),
                 format('ALTER TABLE %s ALTER COLUMN %I TYPE bigint USING %2$I::bigint;', m.rel, r.fence_column)),
                (m.filled IS NOT NULL AND (m.is_root OR NOT root_filled), 'hole',
                 format('the fence column "%s" has a default, which passes for a token', r.fence_column),
                 format('ALTER TABLE %s ALTER COLUMN %I DROP %s;', m.rel, r.fence_column, m.filled))
            ) AS x (applies, severity, finding, remedy) WHERE x.applies;

            -- Triggers in the place of ours. fence_protect refuses while one is there: so all go first.
            RETURN QUERY SELECT m.rel, 'hole',
                   format('trigger "%s" bears a name of the fence''s, but calls %s', t.tgname, t.tgfoid::regprocedure),
                   CASE WHEN m.is_child
                   THEN format('DROP TRIGGER %I ON %s; CREATE TRIGGER %1$I %3$s);', t.tgname, m.rel, CASE t.tgname
                            WHEN 'fenced' THEN format(row_trigger, m.rel, call)
                            WHEN 'fenced_truncate' THEN format(truncate_trigger, m.rel, call)
                            ELSE format(verify_trigger, m.rel, verify_call) END)
                        || format(always_too, m.rel, t.tgname)
                   ELSE CASE WHEN row_number() OVER (ORDER BY t.tgname) = 1 THEN drops ELSE '' END || protect
                        || CASE WHEN r.fenced THEN '' ELSE ' -- and its lease, where it was bound to one' END END
              FROM pg_trigger t
             WHERE t.tgrelid = m.rel AND t.tgname = ANY (names) AND t.tgfoid <> ours
               AND (m.is_root OR t.tgparentid = 0)
               AND (r.fenced OR m.is_child OR m.rel::oid = ANY (usurped))
             ORDER BY t.tgname;
            IF FOUND AND NOT m.is_child THEN
                drops := '';
            END IF;
            EXIT WHEN m.is_root AND NOT r.fenced AND NOT m.is_child;

            -- The triggers of ours that are there. (Partitions copy theirs; what differs is told.)
            RETURN QUERY SELECT m.rel, x.severity, x.finding, x.remedy
              FROM pg_trigger t
              LEFT JOIN pg_trigger original ON original.oid = t.tgparentid
             CROSS JOIN LATERAL (  -- as above: each argument ends in a zero byte
                   SELECT array_agg(convert_from(decode(arg[1], 'hex'), getdatabaseencoding()) ORDER BY n)
                     FROM regexp_matches(encode(t.tgargs, 'hex'), '((?:(?!00)..)*)00', 'g')
                          WITH ORDINALITY AS x (arg, n)) AS a (args)
             CROSS JOIN LATERAL (  -- how a trigger of its kind should be, where no call of fence_protect reaches it
                   SELECT CASE WHEN NOT m.is_child THEN protect
                          ELSE format('CREATE OR REPLACE TRIGGER %I %s);', t.tgname, CASE t.tgtype & 3
                              WHEN 3 THEN format(row_trigger, m.rel, call)
                              WHEN 2 THEN format(truncate_trigger, m.rel, call)
                              ELSE format(verify_trigger, m.rel, verify_call) END)
                              || format(always_too, m.rel, t.tgname) END) AS mended (as_it_should_be)
             CROSS JOIN LATERAL (VALUES
                (t.tgenabled = 'D', 'hole', format('trigger "%s" is disabled', t.tgname),
                 format('ALTER TABLE %s ENABLE %sTRIGGER %I;', m.rel,
                     CASE WHEN r.always OR subscribed THEN 'ALWAYS ' ELSE '' END, t.tgname)),
                (t.tgenabled = 'R', 'hole', format('trigger "%s" fires for apply workers only', t.tgname),
                 format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I;', m.rel, t.tgname)),
                (t.tgenabled = 'O' AND subscribed AND t.tgtype & 3 = 3, 'notice',
                 format('a subscription writes here, and trigger "%s" does not fire for it', t.tgname),
                 format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I;', m.rel, t.tgname)),
                (t.tgenabled = 'O' AND r.always AND NOT subscribed AND NOT m.is_root AND t.tgtype & 3 = 3, 'notice',
                 format('trigger "%s" does not fire for apply workers, as that of %s does', t.tgname, r.rel),
                 format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I;', m.rel, t.tgname)),
                (t.tgqual IS NOT NULL OR t.tgattr::text <> '', 'hole',
                 format('trigger "%s" has a WHEN clause or a list of columns, and skips some writes', t.tgname),
                 as_it_should_be),
                ((coalesce(nullif(a.args[1], ''), 'fence'), coalesce(nullif(a.args[2], ''), 'strict'),
                  coalesce(a.args[3], '')) <> (r.fence_column, r.mode, coalesce(r.lease, '')), 'hole',
                 format('trigger "%s" judges by other arguments than the fence of %s', t.tgname, r.rel),
                 as_it_should_be)
             ) AS x (applies, severity, finding, remedy)
             WHERE t.tgrelid = m.rel AND t.tgfoid = ours AND x.applies
               AND (m.is_root OR t.tgparentid = 0 OR t.tgenabled <> original.tgenabled)
             ORDER BY t.tgname;

            -- The triggers of ours that are not.
            RETURN QUERY SELECT m.rel, x.severity, x.finding,
                   CASE WHEN m.is_root AND NOT m.is_child THEN protect ELSE x.remedy END
              FROM (VALUES
                (missing && '{insert,update,delete}', 'hole',
                 format('%s not fenced', upper(array_to_string(array_remove(missing, 'truncate'), ', '))),
                 format('CREATE OR REPLACE TRIGGER fenced %s);', format(row_trigger, m.rel, call))
                     || format(always_too, m.rel, 'fenced')),
                ('truncate' = ANY (missing), 'notice', 'TRUNCATE not fenced',
                 format('CREATE OR REPLACE TRIGGER fenced_truncate %s);', format(truncate_trigger, m.rel, call))
                     || format(always_too, m.rel, 'fenced_truncate'))
              ) AS x (applies, severity, finding, remedy) WHERE x.applies;

            -- A later trigger may change what the fence has judged, unless it looks again at the end. (An
            -- UPDATE that moves a row between partitions ends in an INSERT.)
            RETURN QUERY SELECT m.rel, 'hole',
                   format('trigger "%s" runs after the fence and may change what it has judged', t.tgname),
                   CASE WHEN NOT m.is_child THEN protect
                   ELSE format('CREATE OR REPLACE TRIGGER fenced_verify %s);',
                           format(verify_trigger, m.rel, verify_call))
                       || format(always_too, m.rel, 'fenced_verify') END
              FROM pg_trigger t
              JOIN pg_proc p ON p.oid = t.tgfoid
             WHERE t.tgrelid = m.rel AND (m.is_root OR t.tgparentid = 0) AND t.tgtype & 3 = 3 AND t.tgenabled <> 'D'
               AND p.oid <> ours AND p.pronamespace <> 'pg_catalog'::regnamespace AND t.tgname <> ALL (names)
               AND EXISTS (
                   SELECT FROM (VALUES ('insert', 4), ('update', 16)) AS e (name, bit)
                    WHERE t.tgtype & e.bit <> 0 AND e.name = ANY (full_events)
                      AND (e.name <> ALL (m.after) OR r.moves_rows AND 'insert' <> ALL (m.after))
                      AND t.tgname > coalesce((
                          SELECT o.tgname FROM pg_trigger o
                           WHERE o.tgrelid = m.rel AND o.tgfoid = ours
                             AND o.tgtype & 3 = 3 AND o.tgtype & e.bit <> 0
                           ORDER BY o.tgname LIMIT 1), 'fenced'));

            -- Who has been let near it.
            RETURN QUERY SELECT m.rel, x.severity, x.finding,
                   format('REVOKE %s ON %s FROM %s CASCADE;', a.privilege_type, m.rel,
                       CASE WHEN a.grantor = m.relowner THEN g.who ELSE quote_ident(pg_get_userbyid(a.grantor)) END)
              FROM aclexplode(m.acl) AS a
             CROSS JOIN LATERAL (VALUES (
                   CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END)) AS g (who)
              LEFT JOIN pg_roles role ON role.oid = a.grantee
             CROSS JOIN LATERAL (VALUES
                ('TRUNCATE', CASE WHEN 'truncate' = ANY (m.before) THEN 'notice' ELSE 'hole' END,
                 format('%s may TRUNCATE; %s', g.who, CASE WHEN 'truncate' = ANY (m.before)
                     THEN 'only the trigger stands in the way' ELSE 'nothing stands in the way' END)),
                ('TRIGGER', 'hole', format('%s may create triggers, and replace those of the fence', g.who))
             ) AS x (privilege, severity, finding)
             WHERE a.privilege_type = x.privilege AND a.grantee <> m.relowner AND role.rolsuper IS NOT TRUE;

            -- Foreign keys that write here on their own.
            RETURN QUERY SELECT m.rel, CASE WHEN writes.events <@ m.before THEN 'notice' ELSE 'hole' END,
                   format('foreign key "%s" writes here when a row of %s changes', k.conname,
                       k.confrelid::regclass),
                   format('ALTER TABLE %s DROP CONSTRAINT %I, ADD CONSTRAINT %2$I %s;', m.rel, k.conname,
                       regexp_replace(pg_get_constraintdef(k.oid),
                           ' ON (UPDATE|DELETE) (CASCADE|SET NULL|SET DEFAULT)( \([^)]*\))?', '', 'g'))
              FROM pg_constraint k
             CROSS JOIN LATERAL (VALUES (array_remove(ARRAY [
                   CASE WHEN k.confdeltype = 'c' THEN 'delete' END,
                   CASE WHEN k.confdeltype IN ('n', 'd') OR k.confupdtype IN ('c', 'n', 'd') THEN 'update' END],
                   NULL))) AS writes (events)
             WHERE k.conrelid = m.rel AND k.contype = 'f' AND k.conparentid = 0 AND writes.events <> '{}';
        END LOOP;
        CONTINUE WHEN NOT r.fenced;

        any_fence := true;

        -- The fence as a whole.
        RETURN QUERY SELECT r.rel, x.severity, x.finding, x.remedy FROM (VALUES
            (r.mode = 'monotonic' AND r.lease IS NULL, 'hole',
             'monotonic without a lease: a client that writes every column back passes with the token it read',
             protect),
            (r.top <> r.rel AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = r.top AND t.tgfoid = ours),
             'hole', format('only this partition of %s is fenced: rows can move around its fence', r.top), protect)
        ) AS x (applies, severity, finding, remedy) WHERE x.applies;

        RETURN QUERY
            WITH named AS (
                SELECT DISTINCT piece[1] AS name
                  FROM regexp_matches(r.lease, '\{\{|\}\}|\{([^{}]+)\}', 'g') AS piece
                 WHERE piece[1] IS NOT NULL),
            renamed AS (  -- from what, where only one column of the key can be meant
                SELECT min(a.attname::text) AS name
                  FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
                 WHERE i.indrelid = r.rel AND i.indisprimary AND a.attname NOT IN (SELECT n.name FROM named n)
                HAVING count(*) = 1)
            SELECT r.rel, 'notice', format('the lease names {%s}, which is no fit column: no write can pass', n.name),
                   CASE WHEN a.attgenerated <> ''
                        THEN format('ALTER TABLE %s ALTER COLUMN %I DROP EXPRESSION;', r.rel, n.name)
                        WHEN a.attnum IS NOT NULL
                        THEN format('ALTER TABLE %s ALTER COLUMN %I TYPE text USING %2$I::text;', r.rel, n.name)
                        ELSE coalesce(
                            (SELECT format('ALTER TABLE %s RENAME COLUMN %I TO %I;', r.rel, o.name, n.name)
                               FROM renamed o),
                            '-- bring the column back, or call fence_protect with a lease that fits the columns') END
              FROM named n
              LEFT JOIN pg_attribute a ON a.attrelid = r.rel AND a.attname = n.name AND a.attnum > 0
             WHERE a.attnum IS NULL OR a.attgenerated <> ''
                OR a.atttypid <> ALL ('{int2,int4,int8,text,varchar,uuid,bool}'::regtype[]);

        RETURN QUERY SELECT r.rel, 'notice',
               format('%I is a member of the owner, and may take the fence off', member.rolname),
               format('REVOKE %I FROM %I;', pg_get_userbyid(r.relowner), member.rolname)
          FROM pg_auth_members am
          JOIN pg_roles member ON member.oid = am.member
         WHERE am.roleid = r.relowner AND NOT member.rolsuper AND EXISTS (
               SELECT FROM pg_roles who WHERE who.rolcanlogin AND pg_has_role(who.oid, member.oid, 'MEMBER'));

        -- DETACH leaves no link. What tells a former partition is its columns, and for certain the
        -- TRUNCATE trigger that fence_protect gave it.
        RETURN QUERY SELECT d.oid::regclass, CASE WHEN former.certain THEN 'hole' ELSE 'notice' END,
               format('not fenced, with the very columns of %s: a detached partition?', r.rel),
               'SELECT @extschema@.fence_protect(' || quote_literal(d.oid::regclass) || options
          FROM pg_class d
         CROSS JOIN LATERAL (
               SELECT coalesce(bool_or(true), false), coalesce(bool_or(t.tgtype & 3 = 3), false)
                 FROM pg_trigger t WHERE t.tgrelid = d.oid AND t.tgfoid = ours) AS former (certain, fenced)
         WHERE r.moves_rows AND r.top = r.rel AND NOT former.fenced AND NOT (former.certain AND relation IS NULL)
           AND d.relkind IN ('r', 'p') AND d.relpersistence = 'p' AND d.oid <> ALL (members)
           AND NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = d.oid)
           AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = d.oid AND a.attname = r.fence_column)
           AND NOT EXISTS (
               SELECT FROM pg_attribute a
                WHERE a.attrelid IN (r.rel, d.oid) AND a.attnum > 0 AND NOT a.attisdropped
                GROUP BY a.attname, a.atttypid, a.atttypmod HAVING count(*) = 1);

        -- A fence above every token drawn: the extension was created anew, or an older backup restored.
        -- Both sides of the comparison are read with the caller's rights, and only where he has them; no plan
        -- is made for a table that may have functions of its owner's in an index.
        CONTINUE WHEN last_token IS NULL;
        highest := NULL;
        FOR m IN
            SELECT c.oid::regclass AS rel, a.attnum
              FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = r.fence_column
             WHERE c.oid = ANY (members) AND c.relkind = 'r' AND a.atttypid = 'int8'::regtype
               AND has_column_privilege(c.oid, a.attnum, 'SELECT')
        LOOP
            highest := greatest(highest, fence.greatest(m.rel, m.attnum));
        END LOOP;
        CONTINUE WHEN highest IS NULL OR highest <= last_token;
        -- What was drawn and written since the audit began is not ahead.
        last_token := (SELECT coalesce(s.last_token, 0) FROM @extschema@.fence_status() AS s);
        RETURN QUERY SELECT r.rel, 'hole',
               format('rows hold fences up to %s, but the last token drawn is %s', highest, last_token),
               CASE WHEN highest < last_token + 1048576
                      OR highest < extract(epoch FROM now() - '2026-01-01 00:00+00') * 1048576
                    THEN 'SELECT @extschema@.fence_new_epoch();'
                    ELSE format('DO %L;', format('BEGIN PERFORM %s.fence_unprotect(%L); '
                        'UPDATE %s SET %I = %s WHERE %4$I > %5$s; PERFORM %s END', '@extschema@', r.rel,
                        r.rel, r.fence_column, last_token, substr(protect, length('SELECT ') + 1))) END
         WHERE highest > last_token;
    END LOOP;

    IF any_fence AND last_token IS NULL AND NOT pg_is_in_recovery() THEN
        RAISE NOTICE USING
            MESSAGE = 'not looked at: whether rows hold fences above the last token drawn',
            HINT = format('That is for those who may use leases: SELECT @extschema@.fence_grant(%L);', current_user);
    END IF;

    -- Settings that reach every fenced table of this database. What stands in the server's configuration is
    -- outdone by the database's own.
    RETURN QUERY SELECT relation, 'hole', format(x.finding, s.whose),
           CASE WHEN s.whose = 'the whole server'
                THEN format('ALTER DATABASE %I SET %s = %L;', current_database(), s.name, x.harmless)
                ELSE format('ALTER %s RESET %s;', s.whose, s.name) END
      FROM (SELECT lower(split_part(item, '=', 1)), split_part(item, '=', 2), CASE
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
                      AND lower(g.name) IN (SELECT lower(split_part(item, '=', 1)) FROM unnest(o.setconfig) AS item))
           ) AS s (name, value, whose)
      JOIN (VALUES ('pg_fence.token', NULL, '', 'pg_fence.token is set for %s: who has no token presents that one'),
                   ('session_replication_role', 'replica', 'origin',
                    'session_replication_role is set for %s: triggers that are not ENABLE ALWAYS do not fire')
           ) AS x (name, value, harmless, finding) ON x.name = s.name AND s.value = coalesce(x.value, s.value)
     WHERE any_fence AND s.value <> '';

    RETURN QUERY SELECT relation, 'hole',
           format('%s may set session_replication_role, under which fences judge little or nothing', g.who),
           format('REVOKE %s ON PARAMETER session_replication_role FROM %s CASCADE;', a.privilege_type, g.who)
      FROM pg_parameter_acl p CROSS JOIN aclexplode(p.paracl) AS a
     CROSS JOIN LATERAL (
           SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END) AS g (who)
      LEFT JOIN pg_roles role ON role.oid = a.grantee
     WHERE any_fence AND p.parname = 'session_replication_role' AND role.rolsuper IS NOT TRUE;
END
$fence_audit$;

COMMENT ON FUNCTION fence_audit(regclass) IS
'the ways left around the fence of a table, or of all of the caller''s, that the catalogs show, each with its remedy';
