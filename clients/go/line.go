package pgfence

import (
	"context"
	"errors"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// longestCallTime is what no call takes, whatever the ttl; opening a connection may take shortestOpeningTime in any case.
const longestCallTime, shortestOpeningTime = 10 * time.Second, 2 * time.Second

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
	// The holder of busy has the turn, and all that follows. An acquire waits for calm before.
	busy, calm sync.Mutex
	conn       Conn
	usedAt     time.Duration
	// session is which connection it is: another number after each.
	session atomic.Int64
}

// askCalmly is ask behind all that keeps or releases, unless the context ends before its turn comes.
func (l *line) askCalmly(ctx context.Context, limit time.Duration, c statement) (rows [][]any, session int64, err error) {
	l.calm.Lock()
	defer l.calm.Unlock()
	if ctx.Err() != nil {
		return nil, 0, ctx.Err()
	}
	return l.ask(limit, c)
}

// ask runs a statement in autocommit, and returns its rows, and the session that they are of.
func (l *line) ask(limit time.Duration, c statement) (rows [][]any, session int64, err error) {
	l.busy.Lock()
	defer l.busy.Unlock()
	defer func() {
		if what := recover(); what != nil {
			l.close()
			err = tell(panicked, nil, "panic: %v\n%s", what, debug.Stack())
		}
	}()
	if l.conn != nil && now()-l.usedAt > tryingAgain {
		// It may have ended since: the server's reason comes first, then the end.
		if bounded(time.Millisecond, l.conn.PgConn().WaitForNotification) != nil && l.conn.PgConn().IsClosed() {
			l.close()
		}
	}
	if l.conn == nil {
		err = bounded(max(limit, shortestOpeningTime), func(ctx context.Context) (err error) {
			conn, err := l.open(ctx)
			if err == nil {
				l.conn = conn
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
	session, l.usedAt = l.session.Load(), now()
	if on := l.conn.PgConn(); err != nil {
		err = typed(err, false, on.ParameterStatus("session_authorization"))
		if on.IsClosed() || on.TxStatus() != 'I' {
			l.close()
		}
	}
	return rows, session, err
}

// close waits for nothing. It is for who has the turn, or where nobody can have it.
func (l *line) close() {
	if conn := l.conn; conn != nil {
		l.conn = nil
		l.session.Add(1)
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
