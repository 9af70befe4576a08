package pgfence

import (
	"context"
	"errors"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// longest is what no call takes, whatever the ttl; opening a connection may take shortestOpening in any case.
const longest, shortestOpening = 10 * time.Second, 2 * time.Second

// panicked is the kind of an error that no driver returns.
const panicked Kind = "panicked"

// Conn is what a fence needs of its connection: a *pgx.Conn, or what wraps one.
type Conn interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	PgConn() *pgconn.PgConn
	Close(ctx context.Context) error
}

// line is a connection of the fence's own: opened when it is needed, for one call at a time.
type line struct {
	open func(context.Context) (Conn, error)
	// Who has busy has the turn, and what follows. Who acquires waits for calm before.
	busy, calm sync.Mutex
	conn       Conn
	usedAt     time.Duration
	// session is which connection it is: another number after each.
	session int
}

// askCalmly is ask behind all that keeps or releases, unless the context ends before its turn comes.
func (l *line) askCalmly(ctx context.Context, limit time.Duration, c call) (rows [][]any, session int, err error) {
	l.calm.Lock()
	defer l.calm.Unlock()
	if ctx.Err() != nil {
		return nil, 0, ctx.Err()
	}
	return l.ask(limit, c)
}

// ask runs a statement in autocommit, and returns its rows, and the session that they are of.
func (l *line) ask(limit time.Duration, c call) (rows [][]any, session int, err error) {
	l.busy.Lock()
	defer l.busy.Unlock()
	defer func() {
		if what := recover(); what != nil {
			l.close()
			err = tell(panicked, nil, "panic: %v\n%s", what, debug.Stack())
		}
	}()
	if now()-l.usedAt > tryAgain {
		l.closeIfEnded()
	}
	if l.conn == nil {
		err = bounded(max(limit, shortestOpening), func(ctx context.Context) (err error) {
			conn, err := l.open(ctx)
			if err == nil {
				l.conn, l.session = conn, l.session+1
			}
			return err
		})
		if err != nil {
			return nil, 0, err
		}
	}
	err = bounded(limit, func(ctx context.Context) error {
		// Nothing is prepared under a name: behind a pooler the next transaction may be in another session.
		found, err := l.conn.Query(ctx, c.sql, append([]any{pgx.QueryExecModeExec}, c.args...)...)
		if err == nil {
			rows, err = pgx.CollectRows(found, func(row pgx.CollectableRow) ([]any, error) { return row.Values() })
		}
		return err
	})
	l.usedAt = now()
	if on := l.conn.PgConn(); err != nil {
		err = typed(err, false, on)
		if on.IsClosed() || on.TxStatus() != 'I' {
			l.close()
		}
	}
	return rows, l.session, err
}

// look tells which session it is now, 0 for none, and -1 where it is in use.
func (l *line) look() int {
	if !l.busy.TryLock() {
		return -1
	}
	defer l.busy.Unlock()
	if l.closeIfEnded(); l.conn == nil {
		return 0
	}
	return l.session
}

// closeIfEnded is for a connection that the server has ended.
func (l *line) closeIfEnded() {
	if l.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	// The reason comes first, then the end.
	if err := l.conn.PgConn().WaitForNotification(ctx); err != nil && !pgconn.Timeout(err) {
		l.close()
	}
}

// close waits for nothing. It is for who has the turn, or where nobody can have it.
func (l *line) close() {
	if conn := l.conn; conn != nil {
		l.conn = nil
		go hangUp(conn)
	}
}

func hangUp(conn Conn) {
	_ = bounded(time.Second, conn.Close)
	cut(conn.PgConn())
}

// cut ends what hangs on a connection, from any goroutine, without waiting for anything.
func cut(conn *pgconn.PgConn) {
	_ = conn.Conn().SetDeadline(time.Unix(1, 0))
	// Some wait here: TLS for saying goodbye, and a tunnel.
	go func() { _ = conn.Conn().Close() }()
}

// bounded is a NoAnswer where it takes longer than that.
func bounded(limit time.Duration, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	err := do(ctx)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return noAnswer(limit, err)
	}
	return err
}
