-- Row leases by calls: many rows renewed in one statement, a row guarded, rows given up. Each call writes the rows under
-- their tokens, so the trigger of the table decides. Whoever may write the table may do without these calls.
--
-- They run with the rights of their caller, and write with its search_path: the triggers of the table expect that path,
-- and the values of a key are compared by the operator that the caller's own UPDATE would find. Everything else is looked
-- up among Postgres's own objects, and no body calls a function of the extension (3_fence.sql says why). pg_fence_lite has
-- them from this file, too, which may be run again.

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
    path CONSTANT text := pg_catalog.current_setting('search_path');
    safe_path CONSTANT text := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    shown CONSTANT text := coalesce(current_setting('pg_fence.token', true), '');
    pairs CONSTANT integer := cardinality(keys);
    fault CONSTANT text := CASE
        WHEN relation IS NULL OR fence_column IS NULL OR deadline IS NULL OR num_nulls(VARIADIC key_columns) IS DISTINCT FROM 0
          OR num_nulls(VARIADIC keys) + num_nulls(VARIADIC tokens) + num_nulls(VARIADIC ttls) IS DISTINCT FROM 0 THEN '22004'
        WHEN cardinality(tokens) <> pairs OR cardinality(ttls) <> pairs OR pairs > 10000 OR key_columns = '{}' OR (
            SELECT bool_or(CASE jsonb_typeof(k) WHEN 'array' THEN jsonb_array_length(k) <> cardinality(key_columns) ELSE true END)
              FROM unnest(keys) AS k) THEN '22023' END;
    kept CONSTANT integer := 1;
    lost CONSTANT integer := 2;
    later CONSTANT integer := 3;
    refused CONSTANT integer := 4;
    typed_values text;
    is_the_row text;
    together integer;
    first integer := 1;
    last integer;
    places bigint[];
    outcomes integer[];
    spans interval[];
    failure text;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = fault, DETAIL = '{"argument": "keys"}',
            MESSAGE = 'keys, tokens and ttls must be as many, at most 10000, and not NULL; a key has a value for each column',
            HINT = 'Give a key like ["7"], a token and a ttl for each row.';
    END IF;
    SELECT string_agg(format('pg_catalog.jsonb_array_element_text(g.key, %s)::%s AS k%1$s', c.n,
                             coalesce(format_type(a.atttypid, -1), 'text')), ', '),
           string_agg(format('r.%I = g.k%s', c.name, c.n), ' AND ')
             || format(' AND r.%I OPERATOR(pg_catalog.=) g.token', fence_column)
      INTO typed_values, is_the_row
      FROM (SELECT u.name, (u.n - 1)::integer AS n FROM unnest(key_columns) WITH ORDINALITY AS u (name, n)) AS c
      LEFT JOIN pg_attribute a ON a.attrelid = relation AND a.attname = c.name AND a.attnum > 0 AND NOT a.attisdropped;
    -- A managed table reads the token from the setting, so its rows are renewed one by one. (Of pg_fence_lite the first line
    -- of the trigger's function has the arguments.)
    SELECT CASE WHEN bool_or(starts_with(p.prosrc, format('-- [%s, "managed"', to_jsonb(fence_column))) OR position(
                    convert_to(fence_column, getdatabaseencoding()) || decode('006d616e6167656400', 'hex') IN t.tgargs) = 1)
                THEN 1 ELSE pairs END
      INTO together
      FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid AND starts_with(p.proname, 'fenced') WHERE t.tgrelid = relation
    HAVING count(*) > 0;
    IF together IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('cannot keep rows of %s: it is not fenced', relation),
            DETAIL = jsonb_build_object('relation', relation::text),
            HINT = format('Its owner calls fence_protect(%L, deadline => %L).', relation, deadline);
    END IF;

    WHILE first <= pairs LOOP
        last := least(first + together - 1, pairs);
        BEGIN
            PERFORM set_config('pg_fence.token', tokens[first]::text, true), set_config('search_path', path, true);
            -- A row that is locked is passed over: nothing waits, and no row holds up another. A row that is not the
            -- caller's any more is not written, because the trigger would refuse it, and all others with it. (The planner
            -- expects one row of each part: a join of two would compare each row of one with each of the other. A subquery,
            -- unlike a join, is looked up by the key, whatever the planner expects of the table.)
            EXECUTE pg_catalog.format($statement$
                WITH given AS MATERIALIZED (
                    SELECT pg_catalog.rank() OVER (ORDER BY g.key, g.token) AS place, g.token, g.ttl, %1$s
                      FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3)) AS g (key, token, ttl)),
                mine AS MATERIALIZED (
                    SELECT g.*, r.%4$I AS deadline FROM %3$s AS r JOIN given AS g ON %2$s FOR NO KEY UPDATE OF r SKIP LOCKED),
                kept AS (
                    UPDATE %3$s AS r SET %4$I = pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) g.ttl, %5$I = g.token
                      FROM mine AS g WHERE %2$s AND g.deadline OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()
                    RETURNING g.place, r.%4$I AS deadline)
                SELECT pg_catalog.array_agg(a.place), pg_catalog.array_agg(a.outcome),
                       pg_catalog.array_agg(a.deadline OPERATOR(pg_catalog.-) pg_catalog.clock_timestamp())
                  FROM (SELECT k.place, $4, k.deadline FROM kept AS k
                        UNION ALL SELECT m.place, $5, NULL FROM mine AS m
                        UNION ALL SELECT g.place, $6, (SELECT pg_catalog.max(r.%4$I) FROM %3$s AS r WHERE %2$s) FROM given AS g
                       ) AS a (place, outcome, deadline)
                $statement$, typed_values, is_the_row, relation, deadline, fence_column)
               INTO places, outcomes, spans USING keys[first:last], tokens[first:last], ttls[first:last], kept, lost, later;
            PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
            failure := NULL;
        EXCEPTION WHEN OTHERS THEN
            -- An error of the server is raised, and so is one of the only row, unless its write was refused. Of several
            -- rows each is asked for by itself. (To a client 42883 means that pg_fence is missing. Here it is an operator
            -- or a function of the table's.)
            IF pairs = 1 AND SQLSTATE = '42883' THEN
                RAISE EXCEPTION USING ERRCODE = '42804', MESSAGE = format('cannot keep a row of %s: %s', relation, SQLERRM),
                    DETAIL = jsonb_build_object('relation', relation::text),
                    HINT = 'A column of the key needs an operator =, and the deadline is a timestamptz.';
            ELSIF SQLSTATE ~ '^(08|25|53|57|58|XX)' OR pairs = 1 AND SQLSTATE !~ '^PF' THEN
                RAISE;
            ELSIF last > first THEN
                together := 1;
                CONTINUE;
            END IF;
            places := '{1}';
            outcomes := ARRAY[CASE WHEN SQLSTATE ~ '^PF' THEN lost WHEN SQLSTATE = '42501' THEN refused ELSE later END];
            spans := NULL;
            failure := SQLSTATE;
        END;
        RETURN QUERY
        SELECT g.key, g.token, ('{kept,lost,later,refused}'::text[])[o.outcome], CASE WHEN o.outcome <> lost THEN o.span END,
               CASE WHEN o.outcome = kept THEN least(o.span / 3, '1 day')
                    WHEN o.outcome = later AND o.span IS NOT NULL THEN greatest(o.span / 10, '10 ms') END,
               CASE WHEN o.outcome = later THEN coalesce(failure, '55P03') WHEN o.outcome = refused THEN failure END
          FROM (SELECT rank() OVER (ORDER BY u.key, u.token) AS place, u.* FROM ROWS FROM (
                    unnest(keys[first:last]), unnest(tokens[first:last])) WITH ORDINALITY AS u (key, token, n)) AS g
          LEFT JOIN (SELECT DISTINCT ON (s.place) s.* FROM unnest(places, outcomes, spans) AS s (place, outcome, span)
                      WHERE s.outcome <> later OR s.span IS NOT NULL OR failure IS NOT NULL ORDER BY s.place, s.outcome) AS s ON s.place = g.place
         CROSS JOIN LATERAL (SELECT coalesce(s.outcome, lost), CASE WHEN s.span < '0' THEN '0' ELSE s.span END) AS o (outcome, span)
         ORDER BY g.n;
        first := last + 1;
    END LOOP;
    PERFORM set_config('pg_fence.token', shown, true), set_config('search_path', path, true);
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
    path CONSTANT text := pg_catalog.current_setting('search_path');
    safe_path CONSTANT text := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    shown CONSTANT text := coalesce(current_setting('pg_fence.token', true), '');
    fault CONSTANT text := CASE
        WHEN relation IS NULL OR key IS NULL OR token IS NULL OR fence_column IS NULL OR deadline IS NULL
          OR num_nulls(VARIADIC key_columns) IS DISTINCT FROM 0 THEN '22004'
        WHEN key_columns = '{}' OR CASE jsonb_typeof(key) WHEN 'array' THEN jsonb_array_length(key) <> cardinality(key_columns) ELSE true END
        THEN '22023' END;
    is_the_key text;
    written integer;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = fault, DETAIL = '{"argument": "key"}',
            MESSAGE = 'key and token must not be NULL; a key has a value for each column', HINT = 'Give a key like ["7"] and a token.';
    END IF;
    SELECT string_agg(format('r.%I = (pg_catalog.jsonb_array_element_text($1, %s))::%s', c.name, c.n - 1,
                             coalesce(format_type(a.atttypid, -1), 'text')), ' AND ')
      INTO is_the_key
      FROM unnest(key_columns) WITH ORDINALITY AS c (name, n)
      LEFT JOIN pg_attribute a ON a.attrelid = relation AND a.attname = c.name AND a.attnum > 0 AND NOT a.attisdropped;
    PERFORM set_config('pg_fence.token', token::text, true), set_config('search_path', path, true);
    EXECUTE pg_catalog.format('UPDATE %1$s AS r SET %2$I = $2 WHERE %4$s AND r.%2$I OPERATOR(pg_catalog.=) $2 AND r.%3$I IS NOT NULL',
        relation, fence_column, deadline, is_the_key) USING key, token;
    GET DIAGNOSTICS written = ROW_COUNT;
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    PERFORM set_config('pg_fence.token', shown, true) WHERE written = 0;
    PERFORM set_config('search_path', path, true);
    RETURN CASE WHEN written > 0 THEN token END;
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
    path CONSTANT text := pg_catalog.current_setting('search_path');
    safe_path CONSTANT text := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    shown CONSTANT text := coalesce(current_setting('pg_fence.token', true), '');
    pairs CONSTANT integer := cardinality(keys);
    fault CONSTANT text := CASE
        WHEN relation IS NULL OR fence_column IS NULL OR deadline IS NULL OR num_nulls(VARIADIC key_columns) IS DISTINCT FROM 0
          OR num_nulls(VARIADIC keys) + num_nulls(VARIADIC tokens) IS DISTINCT FROM 0 THEN '22004'
        WHEN cardinality(tokens) <> pairs OR pairs > 10000 OR key_columns = '{}' OR (
            SELECT bool_or(CASE jsonb_typeof(k) WHEN 'array' THEN jsonb_array_length(k) <> cardinality(key_columns) ELSE true END)
              FROM unnest(keys) AS k) THEN '22023' END;
    is_the_key text;
    written integer;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = fault, DETAIL = '{"argument": "keys"}',
            MESSAGE = 'keys and tokens must be as many, at most 10000, and not NULL; a key has a value for each column',
            HINT = 'Give a key like ["7"] and a token for each row.';
    END IF;
    SELECT string_agg(format('r.%I = (pg_catalog.jsonb_array_element_text($1, %s))::%s', c.name, c.n - 1,
                             coalesce(format_type(a.atttypid, -1), 'text')), ' AND ')
      INTO is_the_key
      FROM unnest(key_columns) WITH ORDINALITY AS c (name, n)
      LEFT JOIN pg_attribute a ON a.attrelid = relation AND a.attname = c.name AND a.attnum > 0 AND NOT a.attisdropped;
    FOR place IN 1..pairs LOOP
        PERFORM set_config('pg_fence.token', tokens[place]::text, true), set_config('search_path', path, true);
        EXECUTE pg_catalog.format('UPDATE %1$s AS r SET %2$I = $2, %3$I = NULL WHERE %4$s AND r.%2$I OPERATOR(pg_catalog.=) $2 AND r.%3$I IS NOT NULL',
            relation, fence_column, deadline, is_the_key) USING keys[place], tokens[place];
        GET DIAGNOSTICS written = ROW_COUNT;
        PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
        RETURN QUERY SELECT tokens[place] WHERE written > 0 UNION ALL SELECT NULL WHERE written = 0;
    END LOOP;
    PERFORM set_config('pg_fence.token', shown, true), set_config('search_path', path, true);
END
$lease_release_rows$;

COMMENT ON FUNCTION lease_release_rows(regclass, name[], jsonb[], bigint[], name, name) IS
'gives up rows under their tokens, so that others may claim them at once: for each its token, or NULL when it is not the row''s any more';
