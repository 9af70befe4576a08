-- The fence of a table: the trigger function, and the functions that attach and remove it.
--
-- fence_protect and fence_unprotect run with the rights of their caller, so Postgres itself enforces every check made
-- here. Their search_path contains Postgres's own objects only: an unqualified name below is one of those, whatever the
-- caller has created.
--
-- fence_protect, fence_unprotect and fence_audit, which everybody may call, are C functions. Each calls a function of
-- the schema fence that does the work and that nobody else may call. It passes what only the library knows: the oid of
-- fenced(), the parsed arguments of triggers, the parsed templates of leases, and the types that placeholders may have.
--
-- No body here calls a function of the extension, or reads a relation of it, by name. After ALTER SCHEMA ... RENAME any
-- role with CREATE can reuse the old name, and its functions would run with the caller's rights. So each object is
-- passed by the library, or is found by its dependency on the extension, whose name cannot be reused. A name in a
-- statement to be executed is made from the oid right before, and the result is checked afterwards.

CREATE FUNCTION fenced() RETURNS trigger
LANGUAGE c AS 'MODULE_PATHNAME', 'fenced';

COMMENT ON FUNCTION fenced() IS
'trigger function (fence column; mode strict, monotonic or managed; lease; deadline column; verify; events): refuses a write whose token is stale, missing or never issued, or whose row another one holds';


CREATE FUNCTION fence_protect(
    relation     regclass,
    fence_column name    DEFAULT 'fence',
    mode         text    DEFAULT NULL,
    lease        text    DEFAULT NULL,
    events       text    DEFAULT NULL,
    verify       boolean DEFAULT false,
    always       boolean DEFAULT false,
    deadline     name    DEFAULT NULL
) RETURNS void
LANGUAGE c AS 'MODULE_PATHNAME', 'fence_protect';

COMMENT ON FUNCTION fence_protect(regclass, name, text, text, text, boolean, boolean, name) IS
'fences a table: adds the fence column where it is missing and attaches the triggers; called again, it puts '
'back what was dropped; mode, lease, events and deadline that are left out or NULL stay as they are on a fenced table; '
'lease => '''' unbinds it; a deadline column makes each row a lease of its own, deadline => '''' ends that; '
'in managed mode, events without insert let a row be created without its lease';


CREATE TYPE fence.trigger_arguments AS (
    trigger oid, fence_column text, mode text, lease text, events text, has_unfenced_insert boolean, deadline text);

COMMENT ON TYPE fence.trigger_arguments IS 'what the arguments of a trigger that calls fenced() say';
COMMENT ON COLUMN fence.trigger_arguments.trigger IS 'the trigger';
COMMENT ON COLUMN fence.trigger_arguments.fence_column IS 'the fence column';
COMMENT ON COLUMN fence.trigger_arguments.mode IS 'strict, monotonic or managed';
COMMENT ON COLUMN fence.trigger_arguments.lease IS 'the lease that guards a row, with placeholders; NULL for none';
COMMENT ON COLUMN fence.trigger_arguments.events IS
'the events chosen for the fence, with commas between them; NULL for all that its kind checks';
COMMENT ON COLUMN fence.trigger_arguments.has_unfenced_insert IS 'a managed row may be created without its lease';
COMMENT ON COLUMN fence.trigger_arguments.deadline IS
'the deadline column of a table whose rows are leases of their own; NULL for any other';

CREATE TYPE fence.lease_template AS (
    lease text, columns text[], is_malformed boolean, is_too_long boolean, beginning text);

COMMENT ON TYPE fence.lease_template IS 'the lease that guards a row, taken apart';
COMMENT ON COLUMN fence.lease_template.lease IS 'as it was written';
COMMENT ON COLUMN fence.lease_template.columns IS 'the columns that its placeholders name';
COMMENT ON COLUMN fence.lease_template.is_malformed IS 'its braces do not pair, or have nothing between them';
COMMENT ON COLUMN fence.lease_template.is_too_long IS 'what stands between its placeholders is longer than a name may be';
COMMENT ON COLUMN fence.lease_template.beginning IS 'what stands before its first placeholder';


CREATE TYPE fence.table_rule AS (
    fence_column name, mode text, lease text, events text[], chosen_events text, has_unfenced_insert boolean,
    verify boolean, always boolean, replaced name[], weakened boolean, deadline name);

COMMENT ON TYPE fence.table_rule IS 'the rule by which a table is to be fenced';
COMMENT ON COLUMN fence.table_rule.fence_column IS 'the fence column, which may not be there yet';
COMMENT ON COLUMN fence.table_rule.mode IS 'strict, monotonic or managed; or another word that was asked for';
COMMENT ON COLUMN fence.table_rule.lease IS 'the lease that guards a row, with placeholders; NULL for none';
COMMENT ON COLUMN fence.table_rule.events IS 'the events that are checked';
COMMENT ON COLUMN fence.table_rule.chosen_events IS 'the same, where they are not all that such a fence checks';
COMMENT ON COLUMN fence.table_rule.has_unfenced_insert IS 'a managed row may be created without its lease';
COMMENT ON COLUMN fence.table_rule.verify IS 'a trigger after all others looks again at what is written';
COMMENT ON COLUMN fence.table_rule.always IS 'the triggers fire in replication, too';
COMMENT ON COLUMN fence.table_rule.replaced IS
'the triggers that are replaced where they are, so that readers need not have finished';
COMMENT ON COLUMN fence.table_rule.weakened IS 'the table was fenced with verify or always, and no longer will be';
COMMENT ON COLUMN fence.table_rule.deadline IS
'the deadline column of a table whose rows are leases of their own, which may not be there yet; NULL for any other';


-- fence_protect first calls rule_for, which refuses an impossible rule and locks the table. It calls rule_for again
-- under the lock, because the table may have changed during the wait. Then attach_fence creates the triggers and
-- reports what else needs attention.
CREATE FUNCTION fence.rule_for(
    relation regclass, fence_column name, mode text, lease text, events text, verify boolean, always boolean, deadline name,
    fenced_oid        oid,                        -- fenced()
    triggers          fence.trigger_arguments[],  -- those of the table, or of all
    leases            fence.lease_template[],     -- the one that is asked for among them
    placeholder_types regtype[],                  -- of columns that may be in the name of a lease
    is_locked         boolean
) RETURNS fence.table_rule
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $rule_for$
DECLARE
    table_name CONSTANT text := relation::text;
    tree CONSTANT regclass := CASE WHEN is_locked THEN relation END;  -- pg_partition_tree takes locks, too
    rule record;
    refusal record;
BEGIN
    WITH
    -- The present fence of the table, from the triggers with the names below that state their whole rule; triggers made
    -- by hand mostly do not.
    present AS (
        SELECT count(*) > 0 AS was_fenced, (array_agg(a.fence_column ORDER BY t.tgname))[1] AS had_column,
               (array_agg(a.mode ORDER BY t.tgname))[1] AS had_mode,
               (array_agg(a.lease ORDER BY t.tgname))[1] AS had_lease,
               (array_agg(a.events ORDER BY t.tgname))[1] AS had_events,
               (array_agg(a.deadline ORDER BY t.tgname))[1] AS had_deadline,
               bool_or(t.tgname = 'fenced' AND t.tgtype & 4 <> 0) AS had_insert,
               bool_or(t.tgname = 'fenced_verify') AS had_verify, bool_or(t.tgenabled = 'A') AS had_always
          FROM unnest(triggers) AS a
          JOIN pg_trigger t ON t.oid = a.trigger
         WHERE t.tgrelid = relation AND t.tgfoid = fenced_oid AND t.tgnargs >= 2
           AND t.tgname IN ('fenced', 'fenced_truncate', 'fenced_verify')),

    -- Arguments that are left out keep the table's present values.
    requested AS (
        SELECT p.*, coalesce(fence_column, had_column, 'fence')::name AS fence_name,
               CASE WHEN lease = '' AND was_fenced THEN NULL ELSE coalesce(lease, had_lease) END AS bound_to,
               CASE WHEN deadline = '' AND was_fenced THEN NULL ELSE coalesce(deadline, had_deadline) END::name AS held_until,
               coalesce(verify, had_verify, false) AS verifies,
               coalesce(always, had_always, false) AS fires_always,
               -- A row that moves to another partition is inserted there, so verify must fire on INSERT.
               EXISTS (SELECT FROM pg_class c WHERE c.oid = relation AND c.relkind = 'p') AS moves
          FROM present p),

    -- A row with a lease may be written often under one token; without a lease only `strict` is safe. So binding or
    -- unbinding the table changes the default mode. (A row may also be its own lease.)
    checked AS (
        SELECT a.*, l.is_leased,
               l.is_leased OR had_lease IS NOT NULL OR had_mode = 'managed' OR had_insert AND had_deadline IS NULL AS checks_insert,
               CASE WHEN NOT l.is_leased OR had_lease IS NOT NULL THEN had_events END AS kept_events,
               lower(coalesce(mode,
                   CASE WHEN had_mode = 'managed' OR l.is_leased = l.was_leased THEN had_mode END,
                   CASE WHEN l.is_leased THEN 'monotonic' ELSE 'strict' END)) AS final_mode
          FROM requested a CROSS JOIN LATERAL (
               SELECT bound_to IS NOT NULL OR held_until IS NOT NULL, had_lease IS NOT NULL OR had_deadline IS NOT NULL
          ) AS l (is_leased, was_leased)),

    -- The events that are checked. They are not guessed from the existing triggers, some of which may have been
    -- dropped: unless a trigger states that events were chosen, they are all that a fence of this kind checks.
    with_events AS (
        SELECT c.*, regexp_split_to_array(lower(btrim(coalesce(events, kept_events, 'update,delete,truncate'))),
                   '[[:space:]]*,[[:space:]]*')
               || CASE WHEN events IS NULL AND (kept_events IS NULL AND checks_insert OR verifies AND moves)
                         OR final_mode = 'managed' AND bound_to IS NULL THEN '{insert}'::text[] END AS on_events
          FROM checked c),

    -- An INSERT must not fill a managed column either. So the trigger fires on INSERT even if the events lack it, but
    -- then the row needs no lease.
    with_chosen_events AS (
        SELECT f.*, final_mode = 'managed' AND 'insert' <> ALL (on_events) AS unfenced_insert,
               CASE WHEN NOT (on_events @> '{update,delete,truncate}' AND ('insert' = ANY (on_events)) =
                              (is_leased OR final_mode = 'managed'))
                    THEN (SELECT string_agg(DISTINCT e, ',') FROM unnest(on_events) AS e) END AS chosen_events
          FROM with_events f)

    SELECT fence_name AS fence_column, final_mode AS mode, bound_to AS lease, on_events AS events, chosen_events,
           unfenced_insert AS has_unfenced_insert, verifies AS verify, fires_always AS always,
           -- (Citus recreates each trigger on its nodes.)
           ARRAY(SELECT x.name FROM (VALUES ('fenced'::name, unfenced_insert OR on_events && '{insert,update,delete}'),
                                            ('fenced_verify', verifies),
                                            ('fenced_truncate', 'truncate' = ANY (on_events))) AS x (name, is_wanted)
                  WHERE x.is_wanted AND to_regclass('pg_catalog.pg_dist_partition') IS NULL) AS replaced,
           coalesce(had_verify AND NOT verifies OR had_always AND NOT fires_always, false) AS weakened,
           held_until AS deadline
      INTO rule
      FROM with_chosen_events;

    SELECT r.*, n.nspname, c.relname INTO refusal
      FROM (VALUES (1)) AS once
      LEFT JOIN unnest(leases) AS template ON template.lease = rule.lease
      LEFT JOIN pg_class c ON c.oid = relation
      LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
     CROSS JOIN LATERAL (VALUES  -- the two columns of the fence
           ('fence column', rule.fence_column, 'bigint'), ('deadline', rule.deadline, 'timestamptz')) AS own (role, name, type)
      LEFT JOIN pg_attribute f ON f.attrelid = c.oid AND f.attname = own.name
      LEFT JOIN LATERAL (  -- the first placeholder that is not fit
           SELECT p.name, a.attnum, a.attgenerated
             FROM unnest(template.columns) AS p (name)
             LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = p.name
                  AND a.attnum > 0 AND NOT a.attisdropped
            WHERE a.attnum IS NULL OR a.attgenerated <> ''
               OR a.atttypid <> ALL (placeholder_types)
            LIMIT 1) AS unfit ON true
     CROSS JOIN LATERAL (VALUES  -- the reasons why the table cannot be fenced so
            -- the arguments
            (rule.fence_column = '', '22023', 'the fence column needs a name',
             'Leave fence_column out for a column "fence".', NULL),
            (rule.mode NOT IN ('strict', 'monotonic', 'managed'), '22023',
             format('there is no mode "%s"', rule.mode), 'The modes are strict, monotonic and managed.', NULL),
            (NOT rule.events <@ '{insert,update,delete,truncate}', '22023',
             format('events "%s" are not known', events),
             'Give one or more of insert, update, delete, truncate, with commas between them.', NULL),
            (rule.verify AND NOT rule.has_unfenced_insert AND NOT rule.events && '{insert,update}', '22023',
             'verify needs insert or update among the events', 'Only these have a new row to verify.', NULL),
            (rule.has_unfenced_insert AND c.relkind = 'p' AND rule.events @> '{update}'
             AND NOT rule.events @> '{delete}', '22023', 'a managed partitioned table needs delete among the events',
             'A row that moves to another partition is a DELETE here and an INSERT there.', NULL),
            (rule.verify AND c.relkind = 'p' AND 'update' = ANY (rule.events)
             AND NOT rule.events @> '{insert,delete}', '22023',
             'verify on a partitioned table needs insert and delete among the events',
             'A row that moves to another partition is a DELETE here and an INSERT there.', NULL),
            (rule.lease = '', '22023', 'the name of a lease must not be empty',
             'Leave lease out to compare tokens row by row only; to unbind, give it for a fenced table.', NULL),
            (template.is_malformed, '22023', format('the braces of lease "%s" do not pair', rule.lease),
             'Write {column} for the value of a column, {{ and }} for braces.', NULL),
            (template.is_too_long, '22023', 'the name of a lease must not exceed 512 bytes',
             'Shorten the text around the placeholders.', NULL),
            (rule.fence_column = ANY (template.columns), '22023',
             'the lease of a row cannot depend on its fence column', 'Use the columns that identify the row.',
             rule.fence_column),
            (rule.deadline = '', '22023', 'the deadline column needs a name',
             'Leave deadline out for a table whose rows are no leases; to end that, give it for a fenced table.', NULL),
            (rule.deadline = rule.fence_column, '22023', 'the deadline needs a column of its own',
             'Name a timestamptz column.', rule.deadline),
            (rule.deadline IS NOT NULL AND rule.lease IS NOT NULL, '22023',
             'a row that is its own lease is bound to no other', 'Give lease => '''' with the deadline to unbind it, or leave '
             'the deadline out.', NULL),
            (rule.deadline IS NOT NULL AND rule.mode = 'strict', '22023', 'who holds a row writes it more than once',
             'With a deadline the modes are monotonic and managed.', NULL),
            (rule.deadline IS NOT NULL AND rule.verify, '22023', 'verify does not go with a deadline',
             'Give verify => false with the deadline.', NULL),
            (rule.deadline IS NOT NULL AND rule.chosen_events IS NOT NULL, '22023', 'with a deadline every event is checked',
             'Give events => ''insert,update,delete,truncate'', or leave them out.', NULL),
            -- the kind of table
            (c.oid IS NULL, '42P01', 'it was dropped meanwhile', 'Name a table that exists.', NULL),
            (c.oid < 16384 OR c.relnamespace IN (
                 SELECT d.objid FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid
                  WHERE e.extname = 'pg_fence' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
                    AND d.classid = 'pg_namespace'::regclass), '42809',
             'it belongs to Postgres or to pg_fence itself', 'Fence tables of your own.', NULL),
            (c.relkind NOT IN ('r', 'p'), '42809', 'it is not a table of this server',
             'Fence the table that stores the rows.', NULL),
            (c.relpersistence = 't', '42809', 'it is temporary', 'Fence a permanent table: one session alone can write this one.', NULL),
            (c.relpersistence = 'u', '42809', 'it is unlogged: a crash would empty it, fences and all',
             format('ALTER TABLE %s SET LOGGED;', table_name), NULL),
            (c.relispartition, '42809', 'it is a partition: rows could move around a fence on it alone',
             format('Protect %s, which covers its partitions.', pg_partition_root(c.oid)), NULL),
            (EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid), '42809', 'it is an inheritance child',
             'Protect the parent; fence_audit of the parent has the statements for its children.', NULL),
            (EXISTS (SELECT FROM pg_partition_tree(tree) p JOIN pg_class pc ON pc.oid = p.relid
                      WHERE pc.relkind = 'f' OR pc.relpersistence <> 'p'), '42809',
             'a partition of it is foreign, temporary or unlogged', 'Detach that partition first.', NULL),
            (EXISTS (SELECT FROM pg_trigger t WHERE t.tgfoid <> fenced_oid
                        AND t.tgname IN ('fenced', 'fenced_truncate', 'fenced_verify')
                        AND t.tgrelid IN (SELECT c.oid UNION SELECT relid FROM pg_partition_tree(tree))),
             '42710', 'another trigger bears the name fenced, fenced_truncate or fenced_verify',
             'Rename that trigger.', NULL),
            -- the columns (fence_audit reports later changes of the fence column: fence_column_fault)
            (own.name IS NOT NULL AND f.attnum IS NULL AND c.reloftype <> 0, '42809',
             format('its type has no attribute "%s"', own.name),
             format('ALTER TYPE %s ADD ATTRIBUTE %s %s CASCADE;', c.reloftype::regtype, quote_ident(own.name), own.type), own.name),
            (f.attnum < 0, '42701', format('"%s" is a column of Postgres itself', own.name),
             format('Give the %s another name.', own.role), own.name),
            (f.atttypid <> own.type::regtype OR own.role = 'deadline' AND f.atttypmod <> -1, '42804',
             format('column "%s" is of type %s, not %s', own.name, format_type(f.atttypid, f.atttypmod), own.type),
             -- (In which zone a time without one was written, only the owner knows.)
             CASE WHEN own.role = 'deadline' AND f.atttypid = 'timestamp'::regtype
                  THEN format('If its times are of UTC (else name their time zone): '
                      'ALTER TABLE %s ALTER COLUMN %I TYPE timestamptz USING %2$I AT TIME ZONE ''UTC'';', table_name, own.name)
                  ELSE format('Make it %s, or name another %s.', own.type, own.role) END, own.name),
            (f.attgenerated <> '', '42611', format('column "%s" is generated', own.name),
             format('Name a plain %s column as the %s.', own.type, own.role), own.name),
            (f.atthasdef OR f.attidentity <> '', '42611', format('column "%s" has a default, %s', own.name,
             CASE own.role WHEN 'deadline' THEN 'so a new row would be born held' ELSE 'which would pass for a token' END),
             format('ALTER TABLE %s ALTER COLUMN %s DROP %s;', table_name, quote_ident(own.name),
             CASE f.attidentity WHEN '' THEN 'DEFAULT' ELSE 'IDENTITY' END), own.name),
            (f.attnotnull AND rule.deadline IS NOT NULL, '42611', format('column "%s" is NOT NULL, and a row that nobody %s',
             own.name, CASE own.role WHEN 'deadline' THEN 'holds has no deadline' ELSE 'has claimed yet has no token' END),
             format('ALTER TABLE %s ALTER COLUMN %s DROP NOT NULL;', table_name, quote_ident(own.name)), own.name),
            (unfit.name IS NOT NULL AND unfit.attnum IS NULL, '42703',
             format('the lease names {%s}, no column of it', unfit.name),
             'Write a column exactly as it is stored, capitals included.', unfit.name),
            (unfit.attgenerated <> '', '42611', format('the lease names {%s}, a generated column', unfit.name),
             'Its value comes too late for a trigger: name the columns it is made from.', unfit.name),
            (unfit.name IS NOT NULL, '42804', format('the lease names {%s}, whose type is not fit', unfit.name),
             format('Fit are %s: no setting changes their text.', array_to_string(placeholder_types, ', ')),
             unfit.name)
         ) AS r (applies, code, fault, hint, about)
     WHERE r.applies
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = refusal.code, HINT = refusal.hint,
            MESSAGE = format('cannot fence %s: %s', table_name, refusal.fault),
            DETAIL = jsonb_strip_nulls(jsonb_build_object('relation', table_name, 'column', refusal.about)),
            SCHEMA = coalesce(refusal.nspname, ''), TABLE = coalesce(refusal.relname, ''),
            COLUMN = coalesce(refusal.about, '');
    END IF;

    -- Takes the strongest lock that will be needed at once: raising a lock later invites deadlocks.
    IF NOT is_locked THEN
        EXECUTE format('LOCK TABLE %s IN %s MODE', table_name, CASE
            WHEN EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = rule.fence_column)
             AND (rule.deadline IS NULL
                  OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = rule.deadline))
             AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = relation AND t.tgfoid = fenced_oid
                                AND (t.tgname <> ALL (rule.replaced) OR t.tgconstraint <> 0))
            THEN 'SHARE ROW EXCLUSIVE' ELSE 'ACCESS EXCLUSIVE' END);
        IF table_name <> relation::text THEN
            RAISE EXCEPTION USING ERRCODE = '40001', HINT = 'Call fence_protect again.',
                MESSAGE = format('cannot fence %s: it was renamed meanwhile', table_name);
        END IF;
    END IF;
    RETURN rule;
END
$rule_for$;

COMMENT ON FUNCTION fence.rule_for(
    regclass, name, text, text, text, boolean, boolean, name, oid, fence.trigger_arguments[], fence.lease_template[],
    regtype[], boolean) IS
'the rule that fence_protect is asked for, with what the table has where the call does not say otherwise; refuses one by '
'which the table cannot be fenced, and locks the table; called by fence_protect alone';


CREATE FUNCTION fence.attach_fence(
    relation       regclass,
    rule           fence.table_rule,
    fenced_oid     oid,                        -- fenced()
    triggers       fence.trigger_arguments[],  -- those of all tables
    leases         fence.lease_template[],     -- the one of the rule among them
    column_comment text,                       -- by which a fence column is known again
    deadline_comment text                      -- by which a deadline column is known again
) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $attach_fence$
DECLARE
    has_column CONSTANT boolean := EXISTS (
        SELECT FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = rule.fence_column);
    row_events CONSTANT text[] := rule.events || CASE WHEN rule.has_unfenced_insert THEN '{insert}'::text[] END;
    has_deadline CONSTANT boolean := rule.deadline IS NULL OR EXISTS (
        SELECT FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = rule.deadline);
    empty_argument CONSTANT text := CASE WHEN rule.chosen_events IS NOT NULL THEN '' END;
    -- Trigger arguments are positional, so an empty one is passed before verify and the events.
    lease_argument CONSTANT text := coalesce(
        rule.lease, CASE WHEN rule.deadline IS NOT NULL THEN '' END, empty_argument);
    -- A trigger names the columns of its lease by name. The trigger's comment also records their numbers, valid for
    -- this table of this database only: a copy by dump has other numbers.
    comment_start CONSTANT text := (
        SELECT format('columns of the lease, by number (pg_fence, of table %s):',
                   left(md5(format('%s/%s/%s', s.system_identifier, d.oid, relation::oid)), 16))
          FROM pg_control_system() AS s, pg_database d WHERE d.datname = current_database());
    present_comment CONSTANT text := (
        SELECT obj_description(t.oid, 'pg_trigger') FROM pg_trigger t
         WHERE t.tgrelid = relation AND t.tgname = 'fenced' AND t.tgfoid = fenced_oid);
    item record;
    added text;
    sharing_tables text;
BEGIN
    IF NOT has_column THEN
        EXECUTE format('ALTER TABLE %s ADD COLUMN %I bigint', relation, rule.fence_column);
    END IF;
    IF NOT has_deadline THEN
        EXECUTE format('ALTER TABLE %s ADD COLUMN %I timestamptz', relation, rule.deadline);
    END IF;
    FOR item IN
        SELECT a.attname FROM pg_attribute a
         WHERE a.attrelid = relation AND a.attname <> rule.fence_column
           AND col_description(relation, a.attnum) = column_comment AND NOT EXISTS (
               SELECT FROM pg_attribute f
                WHERE f.attrelid = relation AND f.attname = rule.fence_column
                  AND col_description(relation, f.attnum) = column_comment)
    LOOP
        RAISE WARNING USING
            MESSAGE = format('column "%s" is %s: the tokens seen so far are in "%s"', rule.fence_column,
                CASE WHEN has_column THEN 'another one than before' ELSE 'new and empty' END, item.attname),
            HINT = format('If that was renamed, call fence_protect with fence_column => %L.', item.attname);
    END LOOP;
    IF (SELECT col_description(relation, a.attnum) IS NULL FROM pg_attribute a
         WHERE a.attrelid = relation AND a.attname = rule.fence_column) THEN
        EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', relation, rule.fence_column, column_comment);
    END IF;
    -- The comment that marks the deadline column moves to the present one.
    FOR item IN
        SELECT a.attname, a.attname = rule.deadline AS is_deadline FROM pg_attribute a
         WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
           AND CASE WHEN a.attname = rule.deadline THEN col_description(relation, a.attnum) IS NULL
                    ELSE col_description(relation, a.attnum) = deadline_comment END
    LOOP
        EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', relation, item.attname,
            CASE WHEN item.is_deadline THEN deadline_comment END);
    END LOOP;

    -- The column and events that did not exist before, or did not cover every write.
    SELECT nullif(concat_ws(', ', max(format('column "%s"', rule.fence_column)) FILTER (WHERE c.name = 'column'),
               CASE WHEN NOT has_deadline THEN format('column "%s"', rule.deadline) END,
               'triggers for ' || string_agg(c.name, ', ' ORDER BY c.n) FILTER (WHERE c.name <> 'column')), '')
      INTO added
      FROM (VALUES (1, 'column', 0, 0), (2, 'INSERT', 3, 4), (3, 'UPDATE', 3, 16), (4, 'DELETE', 3, 8),
                   (5, 'TRUNCATE', 2, 32), (6, 'verify', 1, 20)) AS c (n, name, level, event)
     WHERE CASE c.name WHEN 'column' THEN NOT has_column WHEN 'verify' THEN rule.verify
           ELSE lower(c.name) = ANY (rule.events) END
       AND EXISTS (
           SELECT FROM (SELECT relation UNION SELECT relid FROM pg_partition_tree(relation)) AS parts (part)
            WHERE NOT EXISTS (
                  SELECT FROM pg_trigger t
                   WHERE t.tgrelid = part AND t.tgfoid = fenced_oid
                     AND t.tgtype & 3 = c.level AND t.tgtype & c.event <> 0
                     AND t.tgenabled IN ('O', 'A') AND t.tgqual IS NULL AND t.tgattr::text = ''));

    -- Drops all other triggers of the function, made by hand or by an earlier call.
    FOR item IN
        SELECT t.tgname, t.tgrelid::regclass AS rel FROM pg_trigger t
         WHERE t.tgfoid = fenced_oid AND t.tgparentid = 0
           AND t.tgrelid IN (SELECT relation UNION SELECT relid FROM pg_partition_tree(relation))
           AND (t.tgname <> ALL (rule.replaced) OR t.tgconstraint <> 0
                OR t.tgrelid <> relation AND t.tgname <> 'fenced_truncate')
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', item.tgname, item.rel);
    END LOOP;

    -- Postgres copies a row trigger to every partition, present and future, but not a statement trigger.
    FOR item IN
        SELECT 'fenced' AS tgname, relation AS rel, 'BEFORE' AS at, 'ROW' AS level,
               array_remove(row_events, 'truncate') AS on_events, lease_argument AS lease, empty_argument AS verify
         WHERE array_remove(row_events, 'truncate') <> '{}'
        UNION ALL
        SELECT 'fenced_verify', relation, 'AFTER', 'ROW',
               array_remove(array_remove(row_events, 'truncate'), 'delete'), coalesce(lease_argument, ''), 'verify'
         WHERE rule.verify
        UNION ALL
        SELECT 'fenced_truncate', part, 'BEFORE', 'STATEMENT', '{truncate}', lease_argument, empty_argument
          FROM (SELECT relation UNION SELECT relid FROM pg_partition_tree(relation)) AS parts (part)
         WHERE 'truncate' = ANY (rule.events)
    LOOP
        -- All arguments are given, so that \d shows the whole rule and each trigger states it.
        EXECUTE format('CREATE %s TRIGGER %I %s %s ON %s FOR EACH %s EXECUTE FUNCTION %s(%s)',
            CASE WHEN item.tgname = ANY (rule.replaced) THEN 'OR REPLACE' END,
            item.tgname, item.at, (SELECT string_agg(DISTINCT e, ' OR ') FROM unnest(item.on_events) AS e),
            item.rel, item.level, fenced_oid::regproc,
            concat_ws(', ', quote_literal(rule.fence_column), quote_literal(rule.mode), quote_literal(item.lease),
                quote_literal(coalesce(rule.deadline, CASE WHEN item.verify IS NOT NULL THEN '' END)),
                quote_literal(item.verify), quote_literal(rule.chosen_events)));
        IF rule.always THEN
            EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', item.rel, item.tgname);
        END IF;
        -- The name may belong to another function by now; the trigger has not run yet.
        IF NOT EXISTS (SELECT FROM pg_trigger t
                        WHERE t.tgrelid = item.rel AND t.tgname = item.tgname AND t.tgfoid = fenced_oid) THEN
            RAISE EXCEPTION USING ERRCODE = '40001', HINT = 'Call fence_protect again.',
                MESSAGE = format('cannot fence %s: the trigger function was renamed meanwhile', relation);
        END IF;
    END LOOP;

    IF to_regclass('pg_catalog.pg_dist_partition') IS NULL
       AND (present_comment LIKE '%(pg_fence, of table %' OR present_comment IS NULL AND rule.lease IS NOT NULL) THEN
        FOR item IN
            SELECT p.name, a.attname FROM unnest(leases) AS template, unnest(template.columns) AS p (name)
              JOIN pg_attribute a ON a.attrelid = relation AND a.attname <> p.name AND NOT a.attisdropped
             WHERE template.lease = rule.lease AND starts_with(present_comment, comment_start)
               AND strpos(present_comment || ' ', format(' {%s}=%s ', p.name, a.attnum)) > 0
             ORDER BY a.attnum
        LOOP
            RAISE WARNING USING
                MESSAGE = format('the lease of %s names {%s}, which is another column than before: that is "%s" now',
                    relation, item.name, item.attname),
                HINT = 'From now on the new columns count. Unless that is meant, rename them back and call fence_protect again.';
        END LOOP;
        IF EXISTS (SELECT FROM pg_trigger t
                    WHERE t.tgrelid = relation AND t.tgname = 'fenced' AND t.tgfoid = fenced_oid) THEN
            EXECUTE format('COMMENT ON TRIGGER fenced ON %s IS %L', relation, comment_start || (
                SELECT string_agg(format(' {%s}=%s', a.attname, a.attnum), '' ORDER BY a.attnum) FROM pg_attribute a
                 WHERE a.attrelid = relation
                   AND a.attname IN (SELECT p.name FROM unnest(leases) AS template, unnest(template.columns) AS p (name)
                                      WHERE template.lease = rule.lease)));
        END IF;
    END IF;

    IF added IS NOT NULL THEN
        RAISE NOTICE USING MESSAGE = format('%s is fenced: added %s', relation, added),
            HINT = format('SELECT * FROM fence_audit(%L) lists what is left around it.', relation);
    END IF;
    IF rule.weakened THEN
        RAISE NOTICE USING MESSAGE = format('%s was fenced with verify or always, and is no longer', relation),
            HINT = 'Pass true for what is to be kept, or NULL to keep what there is.';
    END IF;
    IF rule.lease IS NULL AND rule.deadline IS NULL THEN
        RAISE NOTICE USING
            MESSAGE = format('%s is bound to no lease: its fence checks the order of tokens alone, and the holder '
                'of any lease can write it', relation),
            HINT = format('SELECT fence_protect(%L, lease => ''order:{id}''); binds its rows to leases of such names.',
                relation);
    END IF;
    -- (In PostgreSQL 18 and newer, NOT NULL NOT VALID marks the column, but existing rows may still have NULL.)
    FOR item IN
        SELECT a.attname FROM unnest(leases) AS template, unnest(template.columns) AS p (name)
          JOIN pg_attribute a ON a.attrelid = relation AND a.attname = p.name
         WHERE template.lease = rule.lease AND (NOT a.attnotnull OR EXISTS (
               SELECT FROM pg_constraint k
                WHERE k.conrelid = a.attrelid AND k.contype = 'n' AND k.conkey = ARRAY [a.attnum] AND NOT k.convalidated))
         ORDER BY a.attnum
    LOOP
        RAISE NOTICE USING
            MESSAGE = format('column "%s" of %s may be NULL: nobody can write such a row (22004)', item.attname,
                relation),
            HINT = format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL;', relation, item.attname);
    END LOOP;

    -- Schemas of several tenants may be made from one template.
    SELECT string_agg(DISTINCT c.oid::regclass::text, ', ') INTO sharing_tables
      FROM unnest(triggers) AS a
      JOIN pg_trigger t ON t.oid = a.trigger AND t.tgparentid = 0
      JOIN pg_class c ON c.oid = t.tgrelid AND c.oid <> relation
      JOIN pg_class own ON own.oid = relation AND own.relname = c.relname
     WHERE a.lease = rule.lease;
    IF sharing_tables IS NOT NULL THEN
        RAISE NOTICE USING
            MESSAGE = format('%s has leases of the same names as %s: the holder of one holds all', relation,
                sharing_tables),
            HINT = format('Unless that is meant: SELECT fence_protect(%L, lease => %L); binds it to names of its own.',
                relation, (SELECT replace(replace(n.nspname, '{', '{{'), '}', '}}') || ':' || rule.lease
                             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation));
    END IF;

    -- (TimescaleDB copies the row triggers of a hypertable to each of its chunks, which are such children.)
    IF EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                WHERE i.inhparent = relation AND NOT c.relispartition
                  AND (array_remove(row_events, 'truncate') = '{}' OR EXISTS (
                       SELECT FROM pg_trigger t
                        WHERE t.tgrelid = relation AND t.tgfoid = fenced_oid AND t.tgtype & 1 = 1 AND NOT EXISTS (
                              SELECT FROM pg_trigger o
                               WHERE o.tgrelid = c.oid AND o.tgfoid = fenced_oid AND o.tgenabled IN ('O', 'A')
                                 AND (o.tgname, o.tgtype, o.tgargs) = (t.tgname, t.tgtype, t.tgargs)
                                 AND o.tgqual IS NULL AND o.tgattr::text = '')))) THEN
        RAISE WARNING USING MESSAGE = format('the inheritance children of %s are not fenced with it', relation),
            HINT = format('fence_audit(%L) has the statements that fence them.', relation);
    END IF;
END
$attach_fence$;

COMMENT ON FUNCTION fence.attach_fence(
    regclass, fence.table_rule, oid, fence.trigger_arguments[], fence.lease_template[], text, text) IS
'puts the fence column and the triggers on a locked table, and tells what is new; called by fence_protect alone';


CREATE FUNCTION fence_unprotect(relation regclass) RETURNS void
LANGUAGE c AS 'MODULE_PATHNAME', 'fence_unprotect';

COMMENT ON FUNCTION fence_unprotect(regclass) IS
'takes the triggers of pg_fence off a table and its partitions; the fence column stays';


CREATE FUNCTION fence.unprotect_table(relation regclass, fenced_oid oid) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $unprotect_table$
DECLARE
    item record;
BEGIN
    -- The lock is taken before pg_partition_tree is called, whose weaker locks would have to be raised: that invites
    -- deadlocks.
    IF EXISTS (SELECT FROM pg_class c WHERE c.oid = relation AND (c.relkind = 'p' OR c.relkind = 'r'
                  AND EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgfoid = fenced_oid))) THEN
        EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', relation);
    END IF;
    FOR item IN
        SELECT t.tgname, t.tgrelid::regclass AS rel FROM pg_trigger t
         WHERE t.tgfoid = fenced_oid AND t.tgparentid = 0
           AND t.tgrelid IN (SELECT relation UNION SELECT relid FROM pg_partition_tree(relation))
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', item.tgname, item.rel);
    END LOOP;
    IF NOT FOUND THEN
        RAISE NOTICE '% is not fenced', relation;
    END IF;
END
$unprotect_table$;

COMMENT ON FUNCTION fence.unprotect_table(regclass, oid) IS
'what fence_unprotect does, with the rights of its caller; called by that alone';


-- Called first by each of the three functions. Postgres itself checks the owner again in each statement that changes
-- the table.
--
-- Citus changes triggers of a distributed table only if citus.enable_unsafe_triggers is on. The owner is told so before
-- anything is changed.
CREATE FUNCTION fence.check_table(relation regclass, function text, fenced_oid oid) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $check_table$
DECLARE
    doing CONSTANT text := CASE function WHEN 'fence_protect' THEN 'fence' WHEN 'fence_audit' THEN 'audit'
                                ELSE 'take the fence off' END;
    refusal record;
    is_distributed boolean;
BEGIN
    SELECT r.*, n.nspname, c.relname INTO refusal
      FROM (VALUES (1)) AS once
      LEFT JOIN pg_class c ON c.oid = relation
      LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
     CROSS JOIN LATERAL (VALUES
        (relation IS NULL, '22004', 'relation must not be NULL', 'Name the table.'),
        (c.oid IS NULL, '42P01', 'there is no such table', 'Name a table that exists.'),
        (NOT pg_has_role(c.relowner, 'USAGE'), '42501', 'only its owner may',
         format('Ask %I, the owner.', pg_get_userbyid(c.relowner))),
        (function = 'fence_audit' AND c.relkind NOT IN ('r', 'p'), '42809', 'it is not a table of this server',
         'Name a table.'),
        (function = 'fence_unprotect' AND EXISTS (
            SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgfoid = fenced_oid AND t.tgparentid <> 0),
         '42809', 'it is fenced as a partition', format('Take the fence off %s.', pg_partition_root(c.oid)))
     ) AS r (applies, code, fault, hint)
     WHERE r.applies
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = refusal.code, HINT = refusal.hint,
            MESSAGE = format('cannot %s %s: %s', doing, coalesce(relation::text, 'a table'), refusal.fault),
            DETAIL = jsonb_strip_nulls(jsonb_build_object('relation', relation::text)),
            SCHEMA = coalesce(refusal.nspname, ''), TABLE = coalesce(refusal.relname, '');
    END IF;

    IF function = 'fence_audit' OR to_regclass('pg_catalog.pg_dist_partition') IS NULL THEN
        RETURN;
    END IF;
    EXECUTE 'SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = $1
                AND (p.partmethod <> ''n'' OR p.repmodel = ''t'' OR p.colocationid <> 0))'
       INTO is_distributed USING relation;
    IF NOT is_distributed THEN
        RETURN;
    END IF;
    IF NOT coalesce(current_setting('citus.enable_unsafe_triggers', true)::boolean, false) THEN
        RAISE EXCEPTION USING ERRCODE = '55000',
            MESSAGE = format('cannot %s %s: Citus has distributed it, and changes triggers there only where '
                'citus.enable_unsafe_triggers is on', doing, relation),
            HINT = format('SET citus.enable_unsafe_triggers = on; then call %s again.', function),
            DETAIL = jsonb_build_object('relation', relation::text);
    END IF;
    IF function = 'fence_protect' THEN
        RAISE NOTICE USING
            MESSAGE = format('%s is distributed by Citus: each node checks its rows by the leases of its own database',
                relation),
            HINT = 'Take leases on the row''s own node, or adopt them there: see Citus in the documentation of pg_fence.';
    END IF;
END
$check_table$;

COMMENT ON FUNCTION fence.check_table(regclass, text, oid) IS
'refuses a table that is not the caller''s to fence, to take a fence off or to audit, or whose triggers Citus lets nobody '
'change; called by fence_protect, fence_unprotect and fence_audit alone';
