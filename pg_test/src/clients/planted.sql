-- lease_keep with a known fault, in the place of the server's: what a client with that fault would see, whatever its language.
-- FAULT stands for the fault, and PACE for how many times more slowly the scenario is played than it is written.
ALTER FUNCTION lease_keep(text[], bigint[]) RENAME TO lease_keep_as_it_is;

CREATE FUNCTION lease_keep(names text[], tokens bigint[])
    RETURNS TABLE (name text, token bigint, outcome text, renewed bigint, remaining interval, again_in interval, code text)
    LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    fault text := 'FAULT';
    -- Of a client whose renewals have failed since the last third of the ttl began.
    is_late boolean;
BEGIN
    IF fault = 'renew-in-work' AND EXISTS (SELECT FROM pg_stat_activity
            WHERE application_name = current_setting('application_name') AND state = 'idle in transaction') THEN
        -- A part of the transaction that is open: nobody else sees it.
        RETURN QUERY SELECT i.name, t, 'kept', t, i.remaining, i.remaining / 3, NULL
            FROM unnest(names, tokens) AS x(n, t), lease_info(x.n) AS i;
        RETURN;
    END IF;
    is_late := EXISTS (SELECT FROM unnest(names) AS n, lease_info(n) AS i
        WHERE i.remaining < 0.6 * (i.expires_at - COALESCE(i.renewed_at, i.acquired_at)));
    RETURN QUERY
    WITH answered AS MATERIALIZED (SELECT * FROM lease_keep_as_it_is(names, tokens)),
        spread (outcome) AS (SELECT CASE fault
            WHEN 'error-is-loss' THEN (SELECT 'lost' WHERE is_late)
            WHEN 'one-lost-loses-all' THEN (SELECT max(outcome) FROM answered WHERE outcome = 'lost')
            WHEN 'one-lock-stops-all' THEN (SELECT max(outcome) FROM answered WHERE outcome = 'later') END)
    SELECT a.name, a.token, COALESCE(s.outcome, a.outcome), a.renewed,
        -- As long as a call takes whose two answers are slow, as a driver has that describes a statement first.
        a.remaining + CASE fault WHEN 'deadline-from-answer' THEN PACE * interval '1.4 s' ELSE '0' END, a.again_in, a.code
      FROM answered AS a, spread AS s;
END $$;
