package pgfence

import (
	"regexp"
	"strconv"
)

// statement is an SQL statement with its arguments. It is sent in autocommit, or in a guarded
// transaction.
type statement struct {
	sql  string
	args []any
}

// schema is the extension's schema, quoted and with its dot, or empty if it is on the search_path.
type schema string

// functionPrefix is the beginning of the names of the extension's functions.
var functionPrefix = regexp.MustCompile(`\blease_`)

// sql adds the schema to the names of the extension's functions.
func (s schema) sql(text string, args ...any) statement {
	return statement{functionPrefix.ReplaceAllLiteralString(text, string(s)+"lease_"), args}
}

// interval returns a text that every IntervalStyle reads alike.
func interval(ms int64) string { return strconv.FormatInt(ms, 10) + " milliseconds" }

// acquire makes one attempt, or waits for a portion of the wait. The portion is at most half of the
// role's timeouts.
func (s schema) acquire(e effect, a acquireArgs) statement {
	const token = `SELECT coalesce(granted, 0), coalesce(holder, ''), greatest(remaining, 0),
			coalesce(state, '')
		FROM `
	const taken = ` AS granted LEFT JOIN LATERAL (
			SELECT i.holder, extract(epoch FROM i.remaining)::float8 AS remaining, i.state
			FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i
			WHERE granted IS NULL
				AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
			ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true`
	if len(e.Names) != 1 {
		return s.sql(token+`lease_acquire_all(
				$1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)`+taken,
			e.Names, e.Holder, interval(a.TTL), a.Metadata, a.Session)
	}
	return s.sql(token+`lease_acquire(
			($1::text[])[1], $2::text, $3::interval, least($4::interval,
				nullif(current_setting('statement_timeout'), '0')::interval / 2,
				nullif(current_setting('lock_timeout'), '0')::interval / 2),
			$5::jsonb, $6::boolean, $7::integer, $8::boolean, $9::boolean)`+taken,
		e.Names, e.Holder, interval(a.TTL), interval(e.Wait), a.Metadata, a.Shared, a.Slots, e.Reclaim,
		a.Session)
}

// outcomes selects -1 for a missing time.
const outcomes = `SELECT outcome, coalesce(extract(epoch FROM remaining), -1)::float8,
		coalesce(extract(epoch FROM again_in), -1)::float8, coalesce(code, '')`

func (s schema) keep(e effect) statement {
	return s.sql(outcomes+` FROM lease_keep($1::text[], $2::bigint[])`, e.Names, e.Tokens)
}

// lockTimeout returns how many milliseconds a release waits for locks of other open transactions.
func lockTimeout(e effect) string { return strconv.FormatInt(max(10, e.Limit/4), 10) }

func (s schema) release(e effect) statement {
	return s.sql(`SELECT lease_release(x.name, x.token) IS NOT NULL
		FROM set_config('lock_timeout', $1, true), unnest($2::text[], $3::bigint[]) AS x(name, token)`,
		lockTimeout(e), e.Names, e.Tokens)
}

// undo releases the leases of these names that the holder has.
func (s schema) undo(e effect) statement {
	return s.sql(`SELECT count(lease_release(n.name, i.first_token))
		FROM set_config('lock_timeout', $1, true), unnest($2::text[]) AS n(name), lease_info(n.name) AS i
		WHERE i.holder = $3::text AND i.state = 'held'`, lockTimeout(e), e.Names, e.Holder)
}

// pairsFromJSON reads names with tokens, and the holder of an adopted lease, from JSON: every driver
// can send a text.
const pairsFromJSON = `jsonb_to_recordset($1::text::jsonb) AS x(name text, token bigint, holder text)`

// setting returns the name of a setting that a guard makes and that ends with its transaction. The
// session may have the token before and after that. An inner guard has another setting, as the work
// may have begun the transaction of that guard itself.
func setting(isInner bool) string {
	if isInner {
		return "'pg_fence_client.savepoint'"
	}
	return "'pg_fence_client.transaction'"
}

// withSetting adds the setting to a guard's statement.
func withSetting(s statement, isInner bool) statement {
	return statement{s.sql + ", set_config(" + setting(isInner) + ", 'on', true)", s.args}
}

// guard locks the names in the same order everywhere, so that transactions do not deadlock. It
// returns a name that is lost, or NULL.
func (s schema) guard(pairs string) statement { return s.guardWith("x.token", pairs) }

// guardAdopted adopts the lease in each transaction, so that the server knows its number and
// holder.
func (s schema) guardAdopted(pairs string) statement {
	return s.guardWith("(SELECT lease_adopt(x.name, x.token, x.holder))", pairs)
}

func (s schema) guardWith(token, pairs string) statement {
	return s.sql(`SELECT min(x.name) FILTER (WHERE lease_guard(x.name, `+token+`) IS NULL)
		FROM (SELECT * FROM `+pairsFromJSON+` ORDER BY name COLLATE "C") AS x`, pairs)
}

// guardedRelease releases the names, and returns one that is lost, or NULL.
func (s schema) guardedRelease(pairs string) statement {
	return s.sql(`SELECT min(x.name) FILTER (WHERE lease_release(x.name, x.token) IS NULL)
		FROM `+pairsFromJSON, pairs)
}

// rowTable is a table whose rows are leases. The heartbeat and the statements identify it by its
// JSON.
type rowTable struct {
	Relation string   `json:"relation"` // the name as written in SQL
	Columns  []string `json:"columns"`  // the columns of the key
	Fence    string   `json:"fence"`
	Deadline string   `json:"deadline"`
}

// fromRowTable reads a rowTable from its JSON, as every driver can send a text.
const fromRowTable = `jsonb_to_record($1::text::jsonb)
		AS t(relation regclass, columns name[], fence name, deadline name)`

func (s schema) keepRows(e effect, ttls []string) statement {
	return s.sql(outcomes+` FROM `+fromRowTable+`, lease_keep_rows(t.relation, t.columns, $2::text[]::jsonb[],
			$3::bigint[], $4::text[]::interval[], t.fence, t.deadline)`, e.Table, e.Names, e.Tokens, ttls)
}

func (s schema) releaseRows(e effect) statement {
	return s.sql(`SELECT lease_release_rows(t.relation, t.columns, $2::text[]::jsonb[], $3::bigint[],
			t.fence, t.deadline) IS NOT NULL
		FROM `+fromRowTable+`, set_config('lock_timeout', $4, true)`, e.Table, e.Names, e.Tokens, lockTimeout(e))
}

// guardRow returns the key if there is no row with this key and token, else NULL.
func (s schema) guardRow(l *Lease) statement {
	return s.sql(`SELECT CASE WHEN lease_guard_row(t.relation, t.columns, $2::text::jsonb, $3::bigint,
			t.fence, t.deadline) IS NULL THEN $2::text END
		FROM `+fromRowTable, l.tableJSON, l.names[1], l.token)
}

// guardedRowRelease releases a row. It returns NULL in any case, as the work may have released the
// row itself.
func (s schema) guardedRowRelease(l *Lease) statement {
	return s.sql(`SELECT NULL::text FROM `+fromRowTable+`, lease_release_rows(t.relation, t.columns,
		ARRAY[$2::text::jsonb], ARRAY[$3::bigint], t.fence, t.deadline)`, l.tableJSON, l.names[1], l.token)
}
