package pgfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"

	"github.com/jackc/pgx/v5"
)

// driverTx is a transaction of pgx or of database/sql.
type driverTx interface {
	// value is the only value of a statement's only row; nil is NULL.
	value(ctx context.Context, query string, args ...any) (any, error)
	// goesOn returns an error where the transaction was rolled back, or ended, under its work.
	goesOn(ctx context.Context) error
	commit(ctx context.Context) error
	rollback(ctx context.Context) error
	// isBroken tells, after that error, whether its session has ended.
	isBroken(err error) bool
	// breakOff ends what hangs in it, from any goroutine.
	breakOff()
}

func driverOf(tx any) (driverTx, error) {
	switch tx := tx.(type) {
	case sqlTransaction:
		return &sqlTx{tx: tx}, nil
	case pgx.Tx:
		conn := tx.Conn()
		return &pgxTx{Tx: tx, conn: conn, socket: conn.PgConn().Conn()}, nil
	default:
		return nil, fmt.Errorf("pgfence: %T is no transaction: begin is conn.Begin or pool.Begin of pgx 5, pgfence.SQL(db), "+
			"or returns a pgx.Tx, an *sql.Tx, or what embeds one", tx)
	}
}

var (
	errFailed = errors.New("a statement of its work has failed, and it is rolled back")
	errEnded  = errors.New("it was ended by its work")
)

// failedInside is for work that goes on after a statement of its own has failed.
func failedInside() error { return fromServer(ErrTransactionLost, errFailed, "", nil) }

// endedInside is for work that has ended its transaction itself, by ROLLBACK or COMMIT.
func endedInside() error {
	ended := fromServer(ErrTransactionLost, errEnded, "", nil)
	ended.InDoubt = true
	return ended
}

// sqlTransaction is sql.Tx, or what wraps it (sqlx.Tx, bun.Tx).
type sqlTransaction interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	Commit() error
	Rollback() error
}

// sqlTx does not get at the connection: what hangs in it ends by its context, which the work has to use.
type sqlTx struct {
	tx     sqlTransaction
	broken bool
}

func (t *sqlTx) value(ctx context.Context, query string, args ...any) (value any, err error) {
	err = t.tx.QueryRowContext(ctx, query, args...).Scan(&value)
	return value, err
}

// goesOn asks the server: the token was set for that transaction alone.
func (t *sqlTx) goesOn(ctx context.Context) error {
	var isThere bool
	err := t.tx.QueryRowContext(ctx, "SELECT coalesce(current_setting('pg_fence.token', true), '') <> ''").Scan(&isThere)
	state, _ := sqlState(err)
	switch {
	case state == "25P02":
		return failedInside()
	case err == nil && !isThere:
		return endedInside()
	default:
		return err
	}
}

func (t *sqlTx) commit(ctx context.Context) error {
	err := t.tx.Commit()
	if err != nil {
		// Where the context had ended before, database/sql has rolled back. Otherwise an error that is not the
		// server's is the network's.
		wasRolledBack := errors.Is(err, sql.ErrTxDone) || err == ctx.Err()
		state, _ := sqlState(err)
		t.broken = !wasRolledBack && state == ""
	}
	return err
}

func (t *sqlTx) rollback(context.Context) error {
	err := t.tx.Rollback()
	t.broken = t.broken || err != nil && !errors.Is(err, sql.ErrTxDone)
	return err
}

func (t *sqlTx) isBroken(err error) bool {
	state, _ := sqlState(err)
	return t.broken || isEnd(state) || isBroken(err)
}

func (t *sqlTx) breakOff() {}

type pgxTx struct {
	pgx.Tx
	conn   *pgx.Conn
	socket net.Conn
	// hasEnded: the connection may be somebody else's by now, so what was known of it then counts.
	hasEnded, broken bool
}

func (t *pgxTx) value(ctx context.Context, query string, args ...any) (value any, err error) {
	err = t.QueryRow(ctx, query, args...).Scan(&value)
	return value, err
}

func (t *pgxTx) goesOn(context.Context) error {
	if t.conn.IsClosed() {
		return nil
	}
	switch t.conn.PgConn().TxStatus() {
	case 'E':
		return failedInside()
	case 'I':
		return endedInside()
	default:
		return nil
	}
}

func (t *pgxTx) commit(ctx context.Context) error {
	err := t.Commit(ctx)
	if state, _ := sqlState(err); err != nil && (state == "" || isEnd(state)) {
		t.broken = t.conn.IsClosed()
	}
	t.hasEnded = true
	return err
}

func (t *pgxTx) rollback(ctx context.Context) error {
	t.broken = t.isBroken(nil)
	t.hasEnded = true
	// Also where it is broken: a pool gets its connection back by that.
	return t.Rollback(ctx)
}

func (t *pgxTx) isBroken(error) bool {
	if t.hasEnded {
		return t.broken
	}
	return t.conn.IsClosed()
}

func (t *pgxTx) breakOff() { breakOff(t.socket) }
