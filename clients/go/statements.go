package pgfence

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
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
	const taken = ` AS granted LEFT JOIN LATERAL (
			SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
			FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i
			WHERE granted IS NULL AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
			ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true`
	ttl := interval(o.TTL.Milliseconds())
	if len(e.Names) != 1 {
		return s.of(`SELECT granted, taken.* FROM lease_acquire_all(
				$1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)`+taken,
			e.Names, e.Holder, ttl, o.Metadata, o.Session)
	}
	return s.of(`SELECT granted, taken.* FROM lease_acquire(
			($1::text[])[1], $2::text, $3::interval, least($4::interval,
				nullif(current_setting('statement_timeout'), '0')::interval / 2,
				nullif(current_setting('lock_timeout'), '0')::interval / 2),
			$5::jsonb, $6::boolean, $7::integer, $8::boolean, $9::boolean)`+taken,
		e.Names, e.Holder, ttl, interval(e.Wait), o.Metadata, o.Shared, o.Slots, e.Reclaim, o.Session)
}

func (s schema) keep(e effect) statement {
	return s.of(`SELECT outcome, extract(epoch FROM remaining)::float8,
			extract(epoch FROM again_in)::float8, code
		FROM lease_keep($1::text[], $2::bigint[])`, e.Names, e.Tokens)
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
func (s schema) guard(pairs string, isAdopted bool) statement {
	token := "x.token"
	if isAdopted {
		// Each transaction makes the number known, and whose it is.
		token = "(SELECT lease_adopt(x.name, x.token, x.holder))"
	}
	return s.of(`SELECT count(lease_guard(x.name, `+token+`))::text
		FROM (SELECT * FROM `+recordset+` ORDER BY name COLLATE "C") AS x`, pairs)
}

// last returns a name under which there is nothing to be released, or NULL.
func (s schema) last(pairs string) statement {
	return s.of(`SELECT min(x.name) FILTER (WHERE lease_release(x.name, x.token) IS NULL)
		FROM `+recordset, pairs)
}

// rowTable is a table whose rows are leases of their own; the names are quoted.
type rowTable struct {
	name, fence, deadline string
	keys, types           []string
	isManaged             bool
}

// describe asks for what is known of such a table.
func describe(table string) statement {
	const columns = ` FROM pg_index AS i, unnest(i.indkey) WITH ORDINALITY AS k(attnum, at), pg_attribute AS a
		WHERE i.indrelid = c.oid AND i.indisprimary AND a.attrelid = c.oid AND a.attnum = k.attnum
		ORDER BY k.at)`
	return statement{`SELECT DISTINCT format('%I.%I', n.nspname, c.relname), t.tgargs,
			ARRAY(SELECT a.attname::text` + columns + `,
			ARRAY(SELECT format_type(a.atttypid, a.atttypmod)` + columns + `
		FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
		JOIN pg_trigger AS t ON t.tgrelid = c.oid AND t.tgnargs > 3
		JOIN pg_proc AS p ON p.oid = t.tgfoid AND p.proname = 'fenced'
		WHERE c.oid = $1::text::regclass`, []any{table}}
}

var errNoRowTable = errors.New("its rows are no leases of their own, or it has no primary key: " +
	"fence_protect(…, deadline => …)")

// described reads what describe has found.
func described(rows [][]any) (*rowTable, error) {
	quoted := func(name string) string { return pgx.Identifier{name}.Sanitize() }
	for _, row := range rows {
		arguments, is := row[1].([]byte)
		parts := bytes.Split(arguments, []byte{0})
		if !is || len(parts) < 4 || len(parts[3]) == 0 {
			continue
		}
		t := &rowTable{
			name: row[0].(string), fence: quoted(string(parts[0])), deadline: quoted(string(parts[3])),
			isManaged: string(parts[1]) == "managed",
		}
		for _, key := range row[2].([]any) {
			t.keys = append(t.keys, quoted(key.(string)))
		}
		for _, of := range row[3].([]any) {
			t.types = append(t.types, of.(string))
		}
		if len(t.keys) > 0 {
			return t, nil
		}
	}
	return nil, errNoRowTable
}

// key is the text of a key, for the primary key's columns in their order.
func (t *rowTable) key(value any) (string, error) {
	columns, is := value.([]any)
	if !is {
		columns = []any{value}
	}
	if len(columns) != len(t.keys) {
		return "", fmt.Errorf("pgfence: the key of %s has %d columns", t.name, len(t.keys))
	}
	texts := make([]string, len(columns))
	for i, column := range columns {
		texts[i] = fmt.Sprint(column)
	}
	key, err := json.Marshal(texts)
	return string(key), err
}

// asked are the rows of a call, as the query that all its statements begin with. The setting is
// what a managed table is presented, and what tells a guard its own transaction.
func (t *rowTable) asked(
	keys []string, tokens, ttls []int64, setsToken bool,
) (query, rows string) {
	all := make([]map[string]any, len(keys))
	for i, key := range keys {
		all[i] = map[string]any{"key": json.RawMessage(key), "token": tokens[i], "ttl": ttls[i]}
	}
	columns := ""
	for i, of := range t.types {
		columns += fmt.Sprintf(", (x->'key'->>%d)::%s AS k%d", i, of, i)
	}
	if setsToken {
		columns += ", set_config('pg_fence.token', x->>'token', true)"
	}
	text, _ := json.Marshal(all)
	return `WITH asked AS MATERIALIZED (SELECT n, (x->>'token')::bigint AS token,
			(x->>'ttl')::bigint * interval '1 millisecond' AS ttl` + columns + `
		FROM jsonb_array_elements($1::text::jsonb) WITH ORDINALITY AS all_rows(x, n))`, string(text)
}

// is compares a row with what is asked for.
func (t *rowTable) is(asked string) string {
	all := "r." + t.fence + " = " + asked + ".token"
	for i, key := range t.keys {
		all += fmt.Sprintf(" AND r.%s = %s.k%d", key, asked, i)
	}
	return all
}

// keep waits for no lock, and renews what is not over.
func (t *rowTable) keep(keys []string, tokens, ttls []int64) statement {
	query, rows := t.asked(keys, tokens, ttls, t.isManaged)
	return statement{query + `, free AS MATERIALIZED (SELECT asked.* FROM asked
			JOIN ` + t.name + ` AS r ON ` + t.is("asked") + `
			WHERE r.` + t.deadline + ` > clock_timestamp() FOR UPDATE OF r SKIP LOCKED)
		UPDATE ` + t.name + ` AS r
		SET ` + t.deadline + ` = clock_timestamp() + free.ttl, ` + t.fence + ` = free.token
		FROM free WHERE ` + t.is("free") + `
		RETURNING free.n, extract(epoch FROM r.` + t.deadline + ` - clock_timestamp())::float8`, []any{rows}}
}

// look tells, without a lock, which rows have their token still, and whether they were given up.
func (t *rowTable) look(keys []string, tokens []int64) statement {
	query, rows := t.asked(keys, tokens, make([]int64, len(keys)), false)
	return statement{query + ` SELECT asked.n, r.` + t.deadline + ` IS NULL FROM asked
		JOIN ` + t.name + ` AS r ON ` + t.is("asked"), []any{rows}}
}

// touch is the guard of a row, or with gives up its last write. It returns how many rows it was.
func (t *rowTable) touch(key string, token int64, givesUp bool) statement {
	query, rows := t.asked([]string{key}, []int64{token}, []int64{0}, true)
	set := t.fence + " = asked.token"
	if givesUp {
		set += ", " + t.deadline + " = NULL"
	}
	return statement{query + `, touched AS (UPDATE ` + t.name + ` AS r SET ` + set + ` FROM asked
		WHERE ` + t.is("asked") + ` AND r.` + t.deadline + ` IS NOT NULL RETURNING 1)
		SELECT count(*)::text FROM touched`, []any{rows}}
}

// release gives rows up.
func (t *rowTable) release(e effect) statement {
	query, rows := t.asked(e.Names, e.Tokens, make([]int64, len(e.Names)), t.isManaged)
	return statement{query + `, given_up AS (UPDATE ` + t.name + ` AS r
			SET ` + t.fence + ` = asked.token, ` + t.deadline + ` = NULL
			FROM asked, set_config('lock_timeout', $2, true)
			WHERE ` + t.is("asked") + ` AND r.` + t.deadline + ` IS NOT NULL RETURNING asked.n)
		SELECT EXISTS (SELECT FROM given_up WHERE given_up.n = asked.n) FROM asked ORDER BY asked.n`,
		[]any{rows, lockTimeout(e)}}
}
