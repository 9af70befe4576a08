package pgfence

import (
	"strconv"
	"strings"
)

// statement is one that is sent in autocommit, or in a transaction of the work.
type statement struct {
	sql  string
	args []any
}

// schema is the extension's, quoted and with its dot, or empty: then it is on the search_path.
type schema string

func (s schema) of(sql string, args ...any) statement {
	return statement{strings.ReplaceAll(sql, "lease_", string(s)+"lease_"), args}
}

// interval is a text that every IntervalStyle reads alike.
func interval(ms int64) string { return strconv.FormatInt(ms, 10) + " milliseconds" }

// acquire is one try, or a portion of a wait, which is below the role's timeouts, whatever these
// are.
func (s schema) acquire(e effect, o Options) statement {
	const token = `SELECT coalesce(granted, 0), coalesce(holder, ''), greatest(remaining, 0),
			coalesce(state, '')
		FROM `
	const taken = ` AS granted LEFT JOIN LATERAL (
			SELECT i.holder, extract(epoch FROM i.remaining)::float8 AS remaining, i.state
			FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i
			WHERE granted IS NULL
				AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
			ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true`
	ttl := interval(o.TTL.Milliseconds())
	if len(e.Names) != 1 {
		return s.of(token+`lease_acquire_all(
				$1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)`+taken,
			e.Names, e.Holder, ttl, o.Metadata, o.Session)
	}
	return s.of(token+`lease_acquire(
			($1::text[])[1], $2::text, $3::interval, least($4::interval,
				nullif(current_setting('statement_timeout'), '0')::interval / 2,
				nullif(current_setting('lock_timeout'), '0')::interval / 2),
			$5::jsonb, $6::boolean, $7::integer, $8::boolean, $9::boolean)`+taken,
		e.Names, e.Holder, ttl, interval(e.Wait), o.Metadata, o.Shared, o.Slots, e.Reclaim, o.Session)
}

// outcomes have -1 for what is not told.
const outcomes = `SELECT outcome, coalesce(extract(epoch FROM remaining), -1)::float8,
		coalesce(extract(epoch FROM again_in), -1)::float8, coalesce(code, '')`

func (s schema) keep(e effect) statement {
	return s.of(outcomes+` FROM lease_keep($1::text[], $2::bigint[])`, e.Names, e.Tokens)
}

// lockTimeout is how long a release waits for the lock of somebody's open transaction.
func lockTimeout(e effect) string { return strconv.FormatInt(max(10, e.Limit/4), 10) }

func (s schema) release(e effect) statement {
	return s.of(`SELECT lease_release(x.name, x.token) IS NOT NULL
		FROM set_config('lock_timeout', $1, true), unnest($2::text[], $3::bigint[]) AS x(name, token)`,
		lockTimeout(e), e.Names, e.Tokens)
}

// undo releases what a holder has of these names.
func (s schema) undo(e effect) statement {
	return s.of(`SELECT count(lease_release(n.name, i.first_token))
		FROM set_config('lock_timeout', $1, true), unnest($2::text[]) AS n(name), lease_info(n.name) AS i
		WHERE i.holder = $3::text AND i.state = 'held'`, lockTimeout(e), e.Names, e.Holder)
}

// recordset is of pairs, and of the holder of an adopted one, in a form that every driver can send.
const recordset = `jsonb_to_recordset($1::text::jsonb) AS x(name text, token bigint, holder text)`

// guard is in the same order everywhere, so that no two transactions wait for each other.
func (s schema) guard(pairs string) statement { return s.guardBy("x.token", pairs) }

// guardAdopted makes the number known in each transaction, and whose it is.
func (s schema) guardAdopted(pairs string) statement {
	return s.guardBy("(SELECT lease_adopt(x.name, x.token, x.holder))", pairs)
}

func (s schema) guardBy(token, pairs string) statement {
	return s.of(`SELECT min(x.name) FILTER (WHERE lease_guard(x.name, `+token+`) IS NULL)
		FROM (SELECT * FROM `+recordset+` ORDER BY name COLLATE "C") AS x`, pairs)
}

// last returns a name under which there is nothing to be released, or NULL.
func (s schema) last(pairs string) statement {
	return s.of(`SELECT min(x.name) FILTER (WHERE lease_release(x.name, x.token) IS NULL)
		FROM `+recordset, pairs)
}

// rowTable is a table whose rows are leases of their own. Its JSON is what the heartbeat and the
// statements know it by.
type rowTable struct {
	Relation string   `json:"relation"` // as SQL reads it
	Columns  []string `json:"columns"`  // of the key
	Fence    string   `json:"fence"`
	Deadline string   `json:"deadline"`
}

// table has every driver send a list of columns as a text.
const table = `jsonb_to_record($1::text::jsonb)
		AS t(relation regclass, columns name[], fence name, deadline name)`

func (s schema) keepRows(e effect, ttls []string) statement {
	return s.of(outcomes+` FROM `+table+`, lease_keep_rows(t.relation, t.columns, $2::text[]::jsonb[],
			$3::bigint[], $4::text[]::interval[], t.fence, t.deadline)`, e.Table, e.Names, e.Tokens, ttls)
}

func (s schema) releaseRows(e effect) statement {
	return s.of(`SELECT lease_release_rows(t.relation, t.columns, $2::text[]::jsonb[], $3::bigint[],
			t.fence, t.deadline) IS NOT NULL
		FROM `+table+`, set_config('lock_timeout', $4, true)`, e.Table, e.Names, e.Tokens, lockTimeout(e))
}

// guardRow returns the key where the row is not there under the token.
func (s schema) guardRow(l *Lease) statement {
	return s.of(`SELECT CASE WHEN lease_guard_row(t.relation, t.columns, $2::text::jsonb, $3::bigint,
			t.fence, t.deadline) IS NULL THEN $2::text END
		FROM `+table, l.table, l.names[1], l.token)
}

// lastOfRow is a guard's release of a row, which the work may have given up itself.
func (s schema) lastOfRow(l *Lease) statement {
	return s.of(`SELECT NULL::text FROM `+table+`, lease_release_rows(t.relation, t.columns,
		ARRAY[$2::text::jsonb], ARRAY[$3::bigint], t.fence, t.deadline)`, l.table, l.names[1], l.token)
}
