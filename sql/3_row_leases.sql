-- Row leases by calls: many rows renewed in one statement, a row guarded, rows given up. Each call writes the rows under
-- their tokens, so the trigger of the table decides. Whoever may write the table may do without these calls.
--
-- They run with the rights of their caller, and write with its search_path: the triggers of the table expect that path,
-- and the values of a key are compared by the operator that the caller's own UPDATE would find. Everything else is looked
-- up among Postgres's own objects: the variable safe_path is never read, but setting it sets the path. The types of
-- variables are qualified, because PL/pgSQL looks them up once, when the first caller's path is in force.
--
-- No body calls a function of the extension (3_fence.sql says why). So each of them repeats how the table and the types
-- of its key are looked up. pg_fence_lite has the functions from this file, too, which may be run again.

CREATE OR REPLACE FUNCTION lease_keep_rows(
    relation     regclass,
    key_columns  name[],
    keys         jsonb[],
    tokens       bigint[],
    ttls         interval[],
    fence_column name DEFAULT 'fence',
    deadline     name DEFAULT 'held_until'
) RETURNS TABLE (key jsonb, token bigint, outcome text, remaining interval, again_in interval, code text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 1000 ROWS 10
AS $lease_keep_rows$
#variable_conflict use_column
DECLARE
    caller_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    safe_path CONSTANT pg_catalog.text := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    ambient_token CONSTANT pg_catalog.text := coalesce(current_setting('pg_fence.token', true), '');
    pair_count CONSTANT integer := cardinality(keys);
    fault CONSTANT pg_catalog.text := CASE
        WHEN relation IS NULL OR num_nulls(VARIADIC key_columns) IS DISTINCT FROM 0
          OR num_nulls(VARIADIC keys) + num_nulls(VARIADIC tokens) + num_nulls(VARIADIC ttls) IS DISTINCT FROM 0 THEN '22004'
        WHEN cardinality(tokens) <> pair_count OR cardinality(ttls) <> pair_count OR pair_count > 10000
          OR key_columns = '{}' OR 0 >= ANY (tokens) OR '0' >= ANY (ttls)
          OR num_nonnulls(array_length(keys, 2), array_length(tokens, 2), array_length(ttls, 2)) > 0
          OR array_lower(keys, 1) <> 1 OR array_lower(tokens, 1) <> 1 OR array_lower(ttls, 1) <> 1 OR (
            SELECT bool_or(CASE jsonb_typeof(k) WHEN 'array' THEN jsonb_array_length(k) <> cardinality(key_columns) ELSE true END)
              FROM unnest(keys) AS k) THEN '22023' END;
    kept CONSTANT integer := 1;
    lost CONSTANT integer := 2;
    later CONSTANT integer := 3;
    refused CONSTANT integer := 4;
    is_managed boolean;
    table_name pg_catalog.text;
    lock_strength pg_catalog.text;
    typed_values pg_catalog.text;
    row_condition pg_catalog.text;
    statement pg_catalog.text;
    batch_size integer;
    first integer := 1;
    last integer;
    began pg_catalog.timestamptz;
    positions bigint[];
    versions pg_catalog.text[];
    outcomes integer[];
    times_left interval[];
    failure pg_catalog.text;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = fault, DETAIL = '{"argument": "keys"}',
            MESSAGE = 'keys, tokens and ttls must be as many, at most 10000, and not NULL; a key has a value for each column',
            HINT = 'Give a key like ["7"], a token and a positive ttl for each row.';
    END IF;
    -- NULL means the default, as in every call.
    fence_column := coalesce(fence_column, 'fence');
    deadline := coalesce(deadline, 'held_until');
    -- A managed table reads the token from the setting, so its rows are renewed one by one. In pg_fence_lite the first line
    -- of the trigger's function has the arguments of the trigger.
    SELECT bool_or(starts_with(p.prosrc, format('-- [%s, "managed"', to_jsonb(fence_column))) OR position(
               convert_to(fence_column, getdatabaseencoding()) || decode('006d616e6167656400', 'hex') IN t.tgargs) = 1)
      INTO is_managed
      FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid AND starts_with(p.proname, 'fenced') WHERE t.tgrelid = relation;
    IF is_managed IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('cannot keep rows of %s: it is not fenced', relation),
            DETAIL = jsonb_build_object('relation', relation::text),
            HINT = format('Its owner calls fence_protect(%L, deadline => %L).', relation, deadline);
    END IF;
    -- An UPDATE of a column of a unique index takes the stronger lock, for which it would wait.
    SELECT format('%I.%I', n.nspname, c.relname), CASE WHEN EXISTS (
               SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
                WHERE i.indrelid = c.oid AND i.indisunique AND a.attname IN (fence_column, deadline)) THEN 'UPDATE' ELSE 'NO KEY UPDATE' END
      INTO table_name, lock_strength
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    -- A value of a domain is read as of its base type, like a constant in the caller's own UPDATE.
    WITH RECURSIVE key_part (n, name, type, collation_oid) AS (
        SELECT c.n - 1, c.name, a.atttypid, a.attcollation FROM unnest(key_columns) WITH ORDINALITY AS c (name, n)
          LEFT JOIN pg_attribute a ON a.attrelid = relation AND a.attname = c.name AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT p.n, p.name, t.typbasetype, p.collation_oid FROM key_part p JOIN pg_type t ON t.oid = p.type
         WHERE t.typtype = 'd')
    SELECT string_agg(format('pg_catalog.jsonb_array_element_text(g.key, %s)::%s%s AS key%1$s', p.n,
                             coalesce(quote_ident(s.nspname) || '.' || quote_ident(t.typname), 'pg_catalog.text'),
                             (SELECT format(' COLLATE %I.%I', n.nspname, c.collname) FROM pg_collation c
                                JOIN pg_namespace n ON n.oid = c.collnamespace WHERE c.oid = p.collation_oid)), ', '),
           string_agg(format('r.%I = g.key%s', p.name, p.n), ' AND ')
           || format(' AND r.%I OPERATOR(pg_catalog.=) g.token', fence_column)
      INTO typed_values, row_condition
      FROM key_part p LEFT JOIN pg_type t ON t.oid = p.type LEFT JOIN pg_namespace s ON s.oid = t.typnamespace
     WHERE t.typtype IS DISTINCT FROM 'd';

    -- A row that is locked is passed over: nothing waits, and no row holds up another. A row that is not the
    -- caller's any more is not written, because the trigger would refuse it, and all others with it. A row that is
    -- given twice is written once, after all have been locked.
    -- Each row of the answer is one of three: a version that was written (kept); a pair whose row was locked (lost,
    -- unless that version was written); a pair, with the deadline if its row is there (later, unless it was locked).
    -- The planner expects one row of each part, so it would join two parts by comparing all their rows. A subquery
    -- finds its row by the key, whatever the planner expects.
    statement := format($statement$
        WITH given AS MATERIALIZED (
            SELECT g.n, g.token, g.ttl, %1$s FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3))
                   WITH ORDINALITY AS g (key, token, ttl, n)),
        locked AS MATERIALIZED (
            SELECT g.*, pg_catalog.concat(r.tableoid, r.ctid) AS version, r.%4$I AS deadline
              FROM %3$s AS r JOIN given AS g ON %2$s FOR %6$s OF r SKIP LOCKED),
        written AS (
            UPDATE %3$s AS r SET %4$I = pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) g.ttl, %5$I = g.token
              FROM (SELECT DISTINCT ON (m.version) m.* FROM locked AS m ORDER BY m.version) AS g
             WHERE %2$s AND g.deadline OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()
            RETURNING g.version, r.%4$I AS deadline)
        SELECT pg_catalog.array_agg(a.n), pg_catalog.array_agg(a.version), pg_catalog.array_agg(a.outcome),
               pg_catalog.array_agg(a.deadline OPERATOR(pg_catalog.-) pg_catalog.clock_timestamp())
          FROM (SELECT NULL::pg_catalog.int8, k.version, $4, k.deadline FROM written AS k
                UNION ALL SELECT m.n, m.version, $5, m.deadline FROM locked AS m
                UNION ALL SELECT g.n, NULL, $6, (SELECT pg_catalog.max(r.%4$I) FROM %3$s AS r WHERE %2$s) FROM given AS g
               ) AS a (n, version, outcome, deadline)
        $statement$, typed_values, row_condition, table_name, deadline, fence_column, lock_strength);
    batch_size := CASE WHEN is_managed THEN 1 ELSE pair_count END;
    WHILE first <= pair_count LOOP
        last := least(first + batch_size - 1, pair_count);
        began := clock_timestamp();
        BEGIN
            PERFORM set_config('pg_fence.token', tokens[first]::text, true) WHERE is_managed;
            PERFORM set_config('search_path', caller_path, true);
            EXECUTE statement
               INTO positions, versions, outcomes, times_left
              USING keys[first:last], tokens[first:last], ttls[first:last], kept, lost, later;
            PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
            failure := NULL;
        EXCEPTION WHEN OTHERS THEN
            -- An error of the server is raised, and so is one of the only row, unless its write was refused. Of several
            -- rows it is one's, which is looked for in halves; but the lock of the table is waited for once. What is wrong
            -- with the row's key or ttl (class 22) is wrong the next time, too. (To a client 42883 means that pg_fence is
            -- missing. Here it is an operator or a function of the table's.)
            IF pair_count = 1 AND SQLSTATE = '42883' THEN
                RAISE EXCEPTION USING ERRCODE = '42804', MESSAGE = format('cannot keep a row of %s: %s', relation, SQLERRM),
                    DETAIL = jsonb_build_object('relation', relation::text),
                    HINT = 'A column of the key needs an operator =, and the deadline is a timestamptz.';
            ELSIF SQLSTATE ~ '^(08|25|53|57|58|XX)' OR pair_count = 1 AND SQLSTATE !~ '^PF' THEN
                RAISE;
            ELSIF last > first AND (SQLSTATE = '55P03'
                  AND clock_timestamp() - began >= nullif(current_setting('lock_timeout'), '0')::interval) IS NOT TRUE THEN
                batch_size := (last - first + 1) / 2;
                CONTINUE;
            END IF;
            failure := SQLSTATE;
            positions := NULL;
            versions := NULL;
            outcomes := NULL;
            times_left := NULL;
        END;
        RETURN QUERY
        WITH answer AS (
            SELECT a.* FROM unnest(positions, versions, outcomes, times_left) AS a (n, version, outcome, time_left))
        SELECT g.key, g.token, ('{kept,lost,later,refused}'::text[])[o.outcome],
               CASE WHEN o.outcome <> lost THEN o.time_left END,
               CASE WHEN o.outcome = kept THEN least(o.time_left / 3, '1 day')
                    WHEN o.outcome = later AND o.time_left IS NOT NULL THEN greatest(o.time_left / 10, '10 ms') END,
               CASE WHEN o.outcome = later THEN coalesce(failure, '55P03') WHEN o.outcome = refused THEN failure END
          FROM ROWS FROM (unnest(keys[first:last]), unnest(tokens[first:last])) WITH ORDINALITY AS g (key, token, n)
          LEFT JOIN answer AS locked ON locked.n = g.n AND locked.outcome = lost
          LEFT JOIN answer AS written ON written.version = locked.version AND written.outcome = kept
          LEFT JOIN answer AS present ON present.n = g.n AND present.outcome = later
         CROSS JOIN LATERAL (SELECT CASE WHEN failure ~ '^PF' THEN lost WHEN failure ~ '^(22|42501)' THEN refused
                    WHEN failure <> '' THEN later
                    WHEN written.time_left IS NOT NULL THEN kept
                    -- A trigger of the table has passed over the write of a row that is held.
                    WHEN locked.n IS NOT NULL
                    THEN CASE WHEN written.version IS NULL AND locked.time_left > '0' THEN later ELSE lost END
                    WHEN present.time_left IS NOT NULL THEN later ELSE lost END,
                coalesce(written.time_left, CASE WHEN present.time_left < '0' THEN '0' ELSE present.time_left END)
                ) AS o (outcome, time_left)
         ORDER BY g.n;
        first := last + 1;
        batch_size := CASE WHEN is_managed THEN 1 ELSE 2 * batch_size END;
    END LOOP;
    PERFORM set_config('pg_fence.token', ambient_token, true) WHERE is_managed;
    PERFORM set_config('search_path', caller_path, true);
END
$lease_keep_rows$;

COMMENT ON FUNCTION lease_keep_rows(regclass, name[], jsonb[], bigint[], interval[], name, name) IS
'the heartbeat of a process whose leases are rows: renews each row that can be renewed at once, says what became of each, and when to send it again';


CREATE OR REPLACE FUNCTION lease_guard_row(
    relation     regclass,
    key_columns  name[],
    key          jsonb,
    token        bigint,
    fence_column name DEFAULT 'fence',
    deadline     name DEFAULT 'held_until'
) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 1000
AS $lease_guard_row$
DECLARE
    caller_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    safe_path CONSTANT pg_catalog.text := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    ambient_token CONSTANT pg_catalog.text := coalesce(current_setting('pg_fence.token', true), '');
    fault CONSTANT pg_catalog.text := CASE
        WHEN num_nulls(relation, key, token) + num_nulls(VARIADIC key_columns) IS DISTINCT FROM 0 THEN '22004'
        WHEN token < 1 OR key_columns = '{}' OR CASE jsonb_typeof(key)
            WHEN 'array' THEN jsonb_array_length(key) <> cardinality(key_columns) ELSE true END THEN '22023' END;
    is_managed boolean;
    table_name pg_catalog.text;
    key_condition pg_catalog.text;
    written integer;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = fault, DETAIL = '{"argument": "key"}',
            MESSAGE = 'key and token must not be NULL; a key has a value for each column', HINT = 'Give a key like ["7"] and a token.';
    END IF;
    fence_column := coalesce(fence_column, 'fence');
    deadline := coalesce(deadline, 'held_until');
    SELECT bool_or(starts_with(p.prosrc, format('-- [%s, "managed"', to_jsonb(fence_column))) OR position(
               convert_to(fence_column, getdatabaseencoding()) || decode('006d616e6167656400', 'hex') IN t.tgargs) = 1)
      INTO is_managed
      FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid AND starts_with(p.proname, 'fenced') WHERE t.tgrelid = relation;
    IF is_managed IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('cannot guard a row of %s: it is not fenced', relation),
            DETAIL = jsonb_build_object('relation', relation::text),
            HINT = format('Its owner calls fence_protect(%L, deadline => %L).', relation, deadline);
    END IF;
    SELECT format('%I.%I', n.nspname, c.relname) INTO table_name
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    WITH RECURSIVE key_part (n, name, type, collation_oid) AS (
        SELECT c.n - 1, c.name, a.atttypid, a.attcollation FROM unnest(key_columns) WITH ORDINALITY AS c (name, n)
          LEFT JOIN pg_attribute a ON a.attrelid = relation AND a.attname = c.name AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT p.n, p.name, t.typbasetype, p.collation_oid FROM key_part p JOIN pg_type t ON t.oid = p.type
         WHERE t.typtype = 'd')
    SELECT string_agg(format('r.%I = (pg_catalog.jsonb_array_element_text($1, %s))::%s%s', p.name, p.n,
                             coalesce(quote_ident(s.nspname) || '.' || quote_ident(t.typname), 'pg_catalog.text'),
                             (SELECT format(' COLLATE %I.%I', n.nspname, c.collname) FROM pg_collation c
                                JOIN pg_namespace n ON n.oid = c.collnamespace WHERE c.oid = p.collation_oid)), ' AND ')
      INTO key_condition
      FROM key_part p LEFT JOIN pg_type t ON t.oid = p.type LEFT JOIN pg_namespace s ON s.oid = t.typnamespace
     WHERE t.typtype IS DISTINCT FROM 'd';
    PERFORM set_config('pg_fence.token', token::text, true) WHERE is_managed;
    PERFORM set_config('search_path', caller_path, true);
    EXECUTE pg_catalog.format('UPDATE %1$s AS r SET %2$I = $2 WHERE %4$s AND r.%2$I OPERATOR(pg_catalog.=) $2 AND r.%3$I IS NOT NULL',
        table_name, fence_column, deadline, key_condition) USING key, token;
    GET DIAGNOSTICS written = ROW_COUNT;
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    PERFORM set_config('pg_fence.token', CASE WHEN written > 0 THEN token::text ELSE ambient_token END, true)
      WHERE written > 0 OR is_managed;
    PERFORM set_config('search_path', caller_path, true);
    RETURN CASE WHEN written OPERATOR(pg_catalog.>) 0 THEN token END;
END
$lease_guard_row$;

COMMENT ON FUNCTION lease_guard_row(regclass, name[], jsonb, bigint, name, name) IS
'writes a row under its token, so that nobody else gets it before this transaction ends; the token, which this transaction presents from then on, or NULL when it is not the row''s any more';


CREATE OR REPLACE FUNCTION lease_release_rows(
    relation     regclass,
    key_columns  name[],
    keys         jsonb[],
    tokens       bigint[],
    fence_column name DEFAULT 'fence',
    deadline     name DEFAULT 'held_until'
) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 1000 ROWS 10
AS $lease_release_rows$
DECLARE
    caller_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    safe_path CONSTANT pg_catalog.text := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    ambient_token CONSTANT pg_catalog.text := coalesce(current_setting('pg_fence.token', true), '');
    pair_count CONSTANT integer := cardinality(keys);
    fault CONSTANT pg_catalog.text := CASE
        WHEN relation IS NULL OR num_nulls(VARIADIC key_columns) IS DISTINCT FROM 0
          OR num_nulls(VARIADIC keys) + num_nulls(VARIADIC tokens) IS DISTINCT FROM 0 THEN '22004'
        WHEN cardinality(tokens) <> pair_count OR pair_count > 10000 OR key_columns = '{}' OR 0 >= ANY (tokens)
          OR num_nonnulls(array_length(keys, 2), array_length(tokens, 2)) > 0
          OR array_lower(keys, 1) <> 1 OR array_lower(tokens, 1) <> 1 OR (
            SELECT bool_or(CASE jsonb_typeof(k) WHEN 'array' THEN jsonb_array_length(k) <> cardinality(key_columns) ELSE true END)
              FROM unnest(keys) AS k) THEN '22023' END;
    is_managed boolean;
    table_name pg_catalog.text;
    key_condition pg_catalog.text;
    statement pg_catalog.text;
    written integer;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = fault, DETAIL = '{"argument": "keys"}',
            MESSAGE = 'keys and tokens must be as many, at most 10000, and not NULL; a key has a value for each column',
            HINT = 'Give a key like ["7"] and a token for each row.';
    END IF;
    fence_column := coalesce(fence_column, 'fence');
    deadline := coalesce(deadline, 'held_until');
    SELECT bool_or(starts_with(p.prosrc, format('-- [%s, "managed"', to_jsonb(fence_column))) OR position(
               convert_to(fence_column, getdatabaseencoding()) || decode('006d616e6167656400', 'hex') IN t.tgargs) = 1)
      INTO is_managed
      FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid AND starts_with(p.proname, 'fenced') WHERE t.tgrelid = relation;
    IF is_managed IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('cannot release rows of %s: it is not fenced', relation),
            DETAIL = jsonb_build_object('relation', relation::text),
            HINT = format('Its owner calls fence_protect(%L, deadline => %L).', relation, deadline);
    END IF;
    SELECT format('%I.%I', n.nspname, c.relname) INTO table_name
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    WITH RECURSIVE key_part (n, name, type, collation_oid) AS (
        SELECT c.n - 1, c.name, a.atttypid, a.attcollation FROM unnest(key_columns) WITH ORDINALITY AS c (name, n)
          LEFT JOIN pg_attribute a ON a.attrelid = relation AND a.attname = c.name AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT p.n, p.name, t.typbasetype, p.collation_oid FROM key_part p JOIN pg_type t ON t.oid = p.type
         WHERE t.typtype = 'd')
    SELECT string_agg(format('r.%I = (pg_catalog.jsonb_array_element_text($1, %s))::%s%s', p.name, p.n,
                             coalesce(quote_ident(s.nspname) || '.' || quote_ident(t.typname), 'pg_catalog.text'),
                             (SELECT format(' COLLATE %I.%I', n.nspname, c.collname) FROM pg_collation c
                                JOIN pg_namespace n ON n.oid = c.collnamespace WHERE c.oid = p.collation_oid)), ' AND ')
      INTO key_condition
      FROM key_part p LEFT JOIN pg_type t ON t.oid = p.type LEFT JOIN pg_namespace s ON s.oid = t.typnamespace
     WHERE t.typtype IS DISTINCT FROM 'd';
    statement := format(
        'UPDATE %1$s AS r SET %2$I = $2, %3$I = NULL WHERE %4$s AND r.%2$I OPERATOR(pg_catalog.=) $2 AND r.%3$I IS NOT NULL',
        table_name, fence_column, deadline, key_condition);
    FOR n IN 1..pair_count LOOP
        PERFORM set_config('pg_fence.token', tokens[n]::text, true) WHERE is_managed;
        PERFORM set_config('search_path', caller_path, true);
        EXECUTE statement USING keys[n], tokens[n];
        GET DIAGNOSTICS written = ROW_COUNT;
        PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
        RETURN QUERY SELECT tokens[n] WHERE written > 0 UNION ALL SELECT NULL WHERE written = 0;
    END LOOP;
    PERFORM set_config('pg_fence.token', ambient_token, true) WHERE is_managed;
    PERFORM set_config('search_path', caller_path, true);
END
$lease_release_rows$;

COMMENT ON FUNCTION lease_release_rows(regclass, name[], jsonb[], bigint[], name, name) IS
'gives up rows under their tokens, so that others may claim them at once: for each its token, or NULL when it is not the row''s any more';
