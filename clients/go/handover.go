package pgfence

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Resume keeps a lease that another process has acquired, and handed over by its token: see [Lease.Detach]. It renews at
// once, with the TTL of the options, and returns an error of the kind ErrLeaseLost where the lease is over. Of the other
// options only HoldAtMost, HoldAtLeast, OnLost and Logf mean anything here.
func (f *Fence) Resume(ctx context.Context, name string, token int64, options Options) (*Lease, error) {
	if f.err != nil {
		return nil, f.err
	}
	options, err := options.complete([]string{name})
	if err != nil {
		return nil, err
	}
	lease := f.newLease(ctx, []string{name}, options)
	lease.token = token
	if err := lease.throughKeeper(ctx, lease.resume, func() {}); err != nil {
		lease.cancel(err)
		return nil, asked(err, lease.names)
	}
	return lease, nil
}

func (l *Lease) resume(k *keeper) error {
	// A renewal's token serves for 16 more renewals only: what is kept is the grant's first.
	query := "SELECT CASE WHEN t IS NOT NULL THEN coalesce((SELECT i.first_token FROM " + l.fence.schema +
		"lease_info($1::text, t) AS i WHERE i.token = t), t) END FROM " + l.fence.schema +
		"lease_renew($1::text, $2::bigint, $3::interval) AS t"
	for mayRepeat := k.own.isOpen(); ; mayRepeat = false {
		before := now()
		token, err := number(k.rows(l.options.TTL, query, l.names[0], l.token, l.options.TTL))
		switch {
		case err == nil && token == nil:
			return &Error{Kind: ErrLeaseLost, Reason: Gone, Names: l.names}
		case err == nil:
			l.token, l.acquiredAt = *token, now()
			l.begins(before)
			return nil
		case mayRepeat && k.hasEndedUnseen(err):
			continue
		}
		return err
	}
}

// Claim takes the first n leases that are free among those that a query names, in one statement and in the order of the
// query. The first column of the query is the name of the lease, a text; what else it says is the lease's [Lease.Row].
//
//	SELECT 'job:' || id, id, payload FROM jobs WHERE status = 'new' ORDER BY id
//
// It returns those that it could take, or none. Each is released by itself.
func (f *Fence) Claim(ctx context.Context, query string, args []any, n int, options Options) (leases []*Lease, err error) {
	if f.err != nil {
		return nil, f.err
	}
	if options, err = options.complete([]string{query}); err != nil {
		return nil, err
	}
	if options.Session || options.Wait > 0 {
		return nil, errors.New("pgfence: leases that are claimed are tried for, and outlive the session: no Session, no Wait")
	}
	spanned, end := f.telemetry.Start(ctx, "pg_fence.acquire", nil)
	defer func() { end(err) }()
	bounded, cancel := context.WithTimeout(spanned, options.TTL/3)
	defer cancel()
	conn, err := pgx.ConnectConfig(bounded, f.config)
	if err != nil {
		return nil, asked(err, nil)
	}
	defer func() { _ = conn.Close(bounded) }()
	before := now()
	claiming, own := f.claiming(query, len(args), n, options)
	// Nothing is prepared under a name: see connection.
	all := append([]any{pgx.QueryExecModeExec}, args...)
	rows, err := conn.Query(bounded, claiming, append(all, own...)...)
	if err == nil {
		leases, err = f.claimed(ctx, rows, options)
	}
	if err != nil {
		return nil, asked(err, nil)
	}
	for _, lease := range leases {
		lease.begins(before)
		f.kept.join(lease)
	}
	return leases, nil
}

// claiming is the statement, and its arguments after those of the query.
func (f *Fence) claiming(query string, before, n int, o Options) (string, []any) {
	own := []any{o.Holder, interval(o.TTL), o.metadata, o.Shared, o.Slots, n}
	places := make([]any, len(own))
	for index, cast := range []string{"text", "text::interval", "text::jsonb", "boolean", "integer", "bigint"} {
		places[index] = fmt.Sprintf("$%d::%s", before+index+1, cast)
	}
	return "SELECT c.pg_fence_name::text, t, c.* FROM (" + strings.TrimRight(query, "; \n\t") + "\n) AS c (pg_fence_name), " +
		"LATERAL " + f.schema + fmt.Sprintf("lease_acquire(c.pg_fence_name::text, %s, %s, NULL, %s, %s, %s) AS t "+
		"WHERE t IS NOT NULL LIMIT %s", places...), own
}

func (f *Fence) claimed(ctx context.Context, rows pgx.Rows, options Options) (leases []*Lease, err error) {
	defer rows.Close()
	for rows.Next() {
		values, err := rows.Values()
		if err != nil {
			return nil, err
		}
		// The name and the token come first, and then what the query says, whose first column is the name once more.
		lease := f.newLease(ctx, []string{values[0].(string)}, options)
		lease.token, lease.acquiredAt, lease.row = values[1].(int64), now(), map[string]any{}
		for index := 3; index < len(values); index++ {
			lease.row[rows.FieldDescriptions()[index].Name] = values[index]
		}
		leases = append(leases, lease)
	}
	return leases, rows.Err()
}
