package pgfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Pgx is a *pgx.Conn, a *pgxpool.Pool or *pgxpool.Conn, or whatever else begins transactions of pgx; or a pgx.Tx.
type Pgx interface {
	Begin(context.Context) (pgx.Tx, error)
}

// SQL is an *sql.DB, an *sql.Conn, or whatever else begins transactions of database/sql; or an *sql.Tx.
type SQL interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// PgxWork and SQLWork are what is done in a transaction. Its context ends with the caller's, and at a loss: use it for every
// statement.
type (
	PgxWork = func(context.Context, pgx.Tx) error
	SQLWork = func(context.Context, *sql.Tx) error
)

// transaction is one that is open. Within one that somebody else ends it is a savepoint (isInner).
type transaction[Tx any] struct {
	tx      Tx
	isInner bool
	// socket is where it hangs, and conn the same where its state can be looked at; nil where the driver shows neither.
	socket, conn     *pgconn.PgConn
	value            func(context.Context, call) (*int64, error)
	commit, rollback func(context.Context) error
	// end gives the connection back.
	end func()
}

// opening begins one. Its waiting for a connection of a pool is the caller's, and the rest to be done in time.
type opening[Tx any] func(ctx context.Context, inTime func(func() error) error) (*transaction[Tx], error)

func onPgx(from Pgx) opening[pgx.Tx] {
	return func(ctx context.Context, inTime func(func() error) error) (*transaction[pgx.Tx], error) {
		t := &transaction[pgx.Tx]{end: func() {}}
		switch pool := from.(type) {
		case *pgxpool.Pool:
			pooled, err := pool.Acquire(ctx)
			if err != nil {
				return nil, err
			}
			from, t.end = pooled.Conn(), pooled.Release
		case *pgxpool.Conn:
			from = pool.Conn()
		}
		conn, isConn := from.(*pgx.Conn)
		if isConn && !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' {
			return nil, errors.New("pgfence: the connection is in a transaction already: guard its pgx.Tx, by a savepoint")
		}
		var tx pgx.Tx
		err := inTime(func() (err error) {
			tx, err = from.Begin(ctx)
			return err
		})
		if err != nil {
			t.end()
			return nil, err
		}
		_, t.isInner = from.(pgx.Tx)
		t.tx, t.conn, t.socket, t.commit, t.rollback = tx, tx.Conn().PgConn(), tx.Conn().PgConn(), tx.Commit, tx.Rollback
		t.value = func(ctx context.Context, c call) (value *int64, err error) {
			err = tx.QueryRow(ctx, c.sql, append([]any{pgx.QueryExecModeExec}, c.args...)...).Scan(&value)
			return value, err
		}
		return t, nil
	}
}

func onSQL(from SQL) opening[*sql.Tx] {
	return func(ctx context.Context, inTime func(func() error) error) (*transaction[*sql.Tx], error) {
		t := &transaction[*sql.Tx]{end: func() {}}
		if pool, isPool := from.(*sql.DB); isPool {
			conn, err := pool.Conn(ctx)
			if err != nil {
				return nil, err
			}
			from, t.end = conn, func() { _ = conn.Close() }
		}
		if conn, isConn := from.(*sql.Conn); isConn {
			_ = conn.Raw(func(raw any) error {
				if onPgx, is := raw.(interface{ Conn() *pgx.Conn }); is {
					t.socket = onPgx.Conn().PgConn()
				}
				return nil
			})
		}
		var err error
		switch from := from.(type) {
		case *sql.Tx:
			exec := func(sql string) func(context.Context) error {
				return func(ctx context.Context) error {
					_, err := from.ExecContext(ctx, sql)
					return err
				}
			}
			t.tx, t.isInner, err = from, true, exec("SAVEPOINT pg_fence")(ctx)
			t.commit, t.rollback = exec("RELEASE SAVEPOINT pg_fence"), exec("ROLLBACK TO SAVEPOINT pg_fence")
		case interface {
			BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
		}:
			err = inTime(func() (err error) {
				t.tx, err = from.BeginTx(ctx, nil)
				return err
			})
			t.commit = func(context.Context) error { return t.tx.Commit() }
			t.rollback = func(context.Context) error { return t.tx.Rollback() }
		default:
			err = fmt.Errorf("pgfence: %T begins no transactions: this takes an *sql.DB, *sql.Conn or *sql.Tx", from)
		}
		if err != nil {
			t.end()
			return nil, err
		}
		t.value = func(ctx context.Context, c call) (value *int64, err error) {
			err = t.tx.QueryRowContext(ctx, c.sql, c.args...).Scan(&value)
			return value, err
		}
		return t, nil
	}
}

// isBroken tells, after that error, whether the session has ended.
func (t *transaction[Tx]) isBroken(err error) bool {
	if t.conn != nil {
		return t.conn.IsClosed()
	}
	return sessionEnded(err)
}

// state is an error where the work swallowed one that undid it, or ended it.
func (t *transaction[Tx]) state(ctx context.Context) error {
	const ended = "the work has ended the transaction itself: what it did after that was not guarded"
	if t.conn == nil {
		// The token was set for that transaction alone.
		token, err := t.value(ctx, call{sql: "SELECT nullif(current_setting('pg_fence.token', true), '')::bigint"})
		switch {
		case stateOf(err) == "25P02":
			return failedInside(err)
		case errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil, err == nil && token == nil:
			return &Error{Kind: TransactionLost, InDoubt: true, message: ended}
		}
		return err
	}
	switch status := t.conn.TxStatus(); {
	case t.conn.IsClosed():
		return tell(TransactionLost, nil, "the session has ended under the transaction")
	case status == 'E':
		return failedInside(nil)
	case status == 'I':
		return &Error{Kind: TransactionLost, InDoubt: true, message: ended}
	}
	return nil
}

func failedInside(cause error) error {
	return tell(TransactionLost, cause, "a statement of the transaction has failed, and all of it is rolled back")
}
