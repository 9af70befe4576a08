package pgfence

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Conn is what a fence needs of its connection: a *pgx.Conn, or what wraps one.
type Conn interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	PgConn() *pgconn.PgConn
	Close(ctx context.Context) error
}

// connection is one of the heartbeat's: for one call at a time, without a time limit of its own,
// until it is cut.
type connection struct {
	number int
	// use is held by the one who uses it, and guards usedAt.
	use    sync.Mutex
	usedAt time.Duration
	// open ends when it is cut.
	open context.Context
	end  context.CancelFunc
	conn atomic.Pointer[Conn]
}

// opened is the driver's connection, or nil.
func (c *connection) opened() Conn {
	if conn := c.conn.Load(); conn != nil {
		return *conn
	}
	return nil
}

func (c *connection) opens(open func(context.Context) (Conn, error)) error {
	conn, err := open(c.open)
	if err != nil {
		return err
	}
	c.usedAt = now()
	if c.conn.Store(&conn); c.open.Err() != nil {
		// Whoever cut it may have seen none.
		go hangUp(conn)
	}
	return c.open.Err()
}

// query runs the statement of a call in autocommit.
func (c *connection) query(e effect, s statement) (a answer, err error) {
	// Nothing is prepared under a name: behind a pooler the next transaction may be in another
	// session.
	args := append([]any{pgx.QueryExecModeExec}, s.args...)
	rows, err := c.opened().Query(c.open, s.sql, args...)
	if err == nil {
		a, err = read(e, rows)
	}
	c.usedAt = now()
	return a, err
}

// hasEnded looks whether the server has closed it, where it was idle for a while.
func (c *connection) hasEnded(idle time.Duration) bool {
	conn := c.opened()
	if conn == nil || now()-c.usedAt < idle {
		return false
	}
	// Not by a context: what its end does can be set, and may ask the server to cancel.
	on := conn.PgConn()
	_ = on.Conn().SetReadDeadline(time.Now().Add(time.Millisecond))
	// The server's reason comes first, then the end.
	err := on.WaitForNotification(context.Background())
	_ = on.Conn().SetReadDeadline(time.Time{})
	return err != nil && on.IsClosed()
}

// isBroken tells whether it is of no use for another statement.
func (c *connection) isBroken() bool {
	conn := c.opened()
	return conn == nil || conn.PgConn().IsClosed() || conn.PgConn().TxStatus() != 'I'
}

// role is the one that logged in.
func (c *connection) role() string {
	if conn := c.opened(); conn != nil {
		return conn.PgConn().ParameterStatus("session_authorization")
	}
	return ""
}

// cut ends it at once, whatever hangs in it, without waiting for anything.
func (c *connection) cut() {
	c.end()
	if conn := c.opened(); conn != nil {
		cut(conn.PgConn())
	}
	go c.hangUp()
}

// hangUp ends it as it should, when nobody uses it.
func (c *connection) hangUp() {
	c.use.Lock()
	defer c.use.Unlock()
	if conn := c.opened(); conn != nil {
		hangUp(conn)
	}
	c.end()
}

func hangUp(conn Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
	cut(conn.PgConn())
}

// cut ends what hangs on a connection, from any goroutine.
func cut(conn *pgconn.PgConn) {
	_ = conn.Conn().SetDeadline(time.Unix(1, 0))
	// Some wait here: TLS for saying goodbye, and a tunnel.
	go func() { _ = conn.Conn().Close() }()
}

// opener makes of a source what opens connections.
func opener(source any) func(context.Context) (Conn, error) {
	var pool *pgxpool.Config
	var wrong error
	switch source := source.(type) {
	case func(context.Context) (Conn, error):
		return source
	case *pgxpool.Pool:
		pool = source.Config()
	case string:
		pool, wrong = pgxpool.ParseConfig(source)
	}
	return func(ctx context.Context) (Conn, error) {
		if wrong != nil {
			return nil, wrong
		}
		// Not by a pool of its own: what hangs in one, or panics, is out of reach.
		config := pool.ConnConfig.Copy()
		// The server would refuse the setting that lib/pq takes for itself. Go's strings are UTF-8,
		// whatever the role has set.
		delete(config.RuntimeParams, "binary_parameters")
		config.RuntimeParams["client_encoding"] = "UTF8"
		hosts := map[string]bool{config.Host: true}
		for _, other := range config.Fallbacks {
			hosts[other.Host] = true
		}
		if len(hosts) > 1 && config.ConnectTimeout == 0 {
			// The first one must leave time for the others.
			config.ConnectTimeout = shortestOpening * time.Millisecond / time.Duration(len(hosts))
		}
		if pool.BeforeConnect != nil {
			if err := pool.BeforeConnect(ctx, config); err != nil {
				return nil, err
			}
		}
		conn, err := pgx.ConnectConfig(ctx, config)
		if err == nil && pool.AfterConnect != nil {
			if err = pool.AfterConnect(ctx, conn); err != nil {
				go hangUp(conn)
			}
		}
		return conn, err
	}
}

// read takes the rows of a call, none of whose columns is NULL.
func read(e effect, rows pgx.Rows) (a answer, err error) {
	var first, second string
	var remaining, again float64
	var is bool
	into, count := []any{&first, &remaining, &again, &second}, len(e.Names)
	switch e.Do {
	case "keep", "keep_row":
		a.outcomes = make([]outcome, 0, count)
	case "acquire":
		into, count = []any{&a.token, &first, &remaining, &second}, 1
	case "release":
		into = []any{&is}
	case "undo":
		into, count = []any{&a.undone}, 1
	}
	tag, err := pgx.ForEachRow(rows, into, func() error {
		switch e.Do {
		case "acquire":
			if a.token == 0 {
				a.taken = &taken{first, milliseconds(remaining), second}
			}
		case "release":
			a.released = append(a.released, is)
		case "keep", "keep_row":
			o := outcome{first, milliseconds(remaining), milliseconds(again), second}
			a.outcomes = append(a.outcomes, o)
		}
		return nil
	})
	if err == nil && tag.RowsAffected() != int64(count) {
		err = fmt.Errorf("pgfence: %d rows instead of %d", tag.RowsAffected(), count)
	}
	return a, err
}

func milliseconds(seconds float64) int64 { return int64(min(seconds*1000, float64(never))) }
