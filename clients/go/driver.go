package pgfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"reflect"
)

// driverTx is a transaction of pgx or of database/sql.
type driverTx interface {
	// value is the only value of a statement's only row; nil is NULL.
	value(ctx context.Context, query string, args ...any) (*string, error)
	commit(ctx context.Context) error
	rollback(ctx context.Context) error
	// isBroken tells, after that error, whether its session has ended.
	isBroken(err error) bool
	// breakOff ends what hangs in it, from any goroutine.
	breakOff()
}

// row is what all drivers return for one.
type row interface{ Scan(into ...any) error }

func driverOf(tx any) (driverTx, error) {
	switch tx := tx.(type) {
	case sqlTransaction:
		return &sqlTx{tx: tx}, nil
	case pgxTransaction:
		return newPgxTx(tx)
	default:
		return nil, fmt.Errorf("pgfence: %T is no transaction of pgx or database/sql", tx)
	}
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

func (t *sqlTx) value(ctx context.Context, query string, args ...any) (*string, error) {
	return scan(t.tx.QueryRowContext(ctx, query, args...))
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

// pgxTransaction is the part of pgx.Tx that does not name types of its version.
type pgxTransaction interface {
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// pgxTx calls the rest by name. The versions of pgx are different types to Go, and alike in what is called here.
type pgxTx struct {
	pgxTransaction
	queryRow reflect.Value
	conn     interface{ IsClosed() bool }
	socket   net.Conn
	// hasEnded: the connection may be somebody else's by now, so what was known of it then counts.
	hasEnded, broken bool
}

func newPgxTx(tx pgxTransaction) (*pgxTx, error) {
	made := &pgxTx{pgxTransaction: tx, queryRow: reflect.ValueOf(tx).MethodByName("QueryRow")}
	conn := reflect.ValueOf(tx).MethodByName("Conn")
	if !made.queryRow.IsValid() || !conn.IsValid() {
		return nil, fmt.Errorf("pgfence: %T is no transaction of pgx or database/sql", tx)
	}
	pgxConn := conn.Call(nil)[0]
	pgConn := pgxConn.MethodByName("PgConn").Call(nil)[0]
	made.conn = pgxConn.Interface().(interface{ IsClosed() bool })
	made.socket = pgConn.Interface().(interface{ Conn() net.Conn }).Conn()
	return made, nil
}

func (t *pgxTx) value(ctx context.Context, query string, args ...any) (*string, error) {
	in := []reflect.Value{reflect.ValueOf(ctx), reflect.ValueOf(query)}
	for _, arg := range args {
		in = append(in, reflect.ValueOf(arg))
	}
	return scan(t.queryRow.Call(in)[0].Interface().(row))
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

func scan(from row) (*string, error) {
	var value *string
	err := from.Scan(&value)
	return value, err
}
