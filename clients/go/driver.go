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
type transaction struct {
	isInner bool
	role    string
	// socket is where it hangs; nil where the driver does not show it.
	socket *pgconn.PgConn
	work   func(context.Context) error
	text   func(context.Context, statement) (*string, error)
	// whole is an error where the work swallowed one that undid it, or ended it.
	whole, commit, rollback func(context.Context) error
	// isBroken tells, after that error, whether the session has ended.
	isBroken func(error) bool
	// end gives the connection back.
	end func()
}

// opening begins one.
type opening func(context.Context) (*transaction, error)

func onPgx(from Pgx, work PgxWork) opening {
	return func(ctx context.Context) (*transaction, error) {
		on, end := from, func() {}
		switch pool := from.(type) {
		case *pgxpool.Pool:
			pooled, err := pool.Acquire(ctx)
			if err != nil {
				return nil, err
			}
			on, end = pooled.Conn(), pooled.Release
		case *pgxpool.Conn:
			on = pool.Conn()
		}
		if conn, is := on.(*pgx.Conn); is && !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' {
			end()
			return nil, errors.New("pgfence: the connection is in a transaction already: guard its pgx.Tx, by a savepoint")
		}
		tx, err := on.Begin(ctx)
		if err != nil {
			end()
			return nil, err
		}
		conn := tx.Conn().PgConn()
		_, isInner := on.(pgx.Tx)
		return &transaction{
			isInner: isInner, role: conn.ParameterStatus("session_authorization"), socket: conn,
			work: func(ctx context.Context) error { return work(ctx, tx) },
			text: func(ctx context.Context, c statement) (text *string, err error) {
				err = tx.QueryRow(ctx, c.sql, append([]any{pgx.QueryExecModeExec}, c.args...)...).Scan(&text)
				return text, err
			},
			whole: func(context.Context) error {
				switch {
				case conn.IsClosed():
					return tell(TransactionLost, nil, "the session has ended under the transaction")
				case conn.TxStatus() == 'E':
					return failedInside(nil)
				case conn.TxStatus() == 'I':
					return endedInside()
				}
				return nil
			},
			commit: tx.Commit, rollback: tx.Rollback, end: end,
			isBroken: func(error) bool { return conn.IsClosed() },
		}, nil
	}
}

func onSQL(from SQL, work SQLWork) opening {
	return func(ctx context.Context) (_ *transaction, err error) {
		on, t := from, &transaction{isBroken: sessionEnded, end: func() {}}
		if pool, is := from.(*sql.DB); is {
			conn, err := pool.Conn(ctx)
			if err != nil {
				return nil, err
			}
			on, t.end = conn, func() { _ = conn.Close() }
		}
		if conn, is := on.(*sql.Conn); is {
			_ = conn.Raw(func(raw any) error {
				if onPgx, is := raw.(interface{ Conn() *pgx.Conn }); is {
					t.socket = onPgx.Conn().PgConn()
				}
				return nil
			})
		}
		tx, isInner := on.(*sql.Tx)
		begins, canBegin := on.(interface {
			BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
		})
		does := func(sql string) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := tx.ExecContext(ctx, sql)
				return err
			}
		}
		switch {
		case isInner:
			err = does("SAVEPOINT pg_fence")(ctx)
			t.commit, t.rollback = does("RELEASE SAVEPOINT pg_fence"), does("ROLLBACK TO SAVEPOINT pg_fence")
		case canBegin:
			tx, err = begins.BeginTx(ctx, nil)
			t.commit = func(context.Context) error { return tx.Commit() }
			t.rollback = func(context.Context) error { return tx.Rollback() }
		default:
			err = fmt.Errorf("pgfence: %T begins no transactions: this takes an *sql.DB, *sql.Conn or *sql.Tx", from)
		}
		if err != nil {
			t.end()
			return nil, err
		}
		t.isInner, t.work = isInner, func(ctx context.Context) error { return work(ctx, tx) }
		t.text = func(ctx context.Context, c statement) (text *string, err error) {
			err = tx.QueryRowContext(ctx, c.sql, c.args...).Scan(&text)
			return text, err
		}
		t.whole = func(ctx context.Context) error {
			// The token was set for that transaction alone.
			token, err := t.text(ctx, statement{sql: "SELECT nullif(current_setting('pg_fence.token', true), '')"})
			if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil || err == nil && token == nil {
				return endedInside()
			}
			return err
		}
		return t, nil
	}
}
