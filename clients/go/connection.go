package pgfence

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Conn is a connection that a fence can use: a *pgx.Conn, or a wrapper of one.
type Conn interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	PgConn() *pgconn.PgConn
	Close(ctx context.Context) error
}

// connection is a connection of the heartbeat, for one call at a time. A call has no time limit
// here: the heartbeat cuts the connection.
type connection struct {
	number int
	// use is locked while the connection is used, and guards usedAt.
	use    sync.Mutex
	usedAt time.Duration
	// open ends when the connection is cut.
	open context.Context
	end  context.CancelFunc
	conn atomic.Pointer[Conn]
}

// driver returns the driver's connection, or nil if it is not open yet.
func (c *connection) driver() Conn {
	if conn := c.conn.Load(); conn != nil {
		return *conn
	}
	return nil
}

func (c *connection) connect(open func(context.Context) (Conn, error)) error {
	conn, err := open(c.open)
	if err != nil {
		return err
	}
	if conn == nil {
		return errors.New("pgfence: the source has returned no connection")
	}
	if conn.PgConn().TxStatus() != 'I' {
		go hangUp(conn)
		return errors.New("pgfence: the source has returned a connection that is in a transaction")
	}
	c.usedAt = now()
	if c.conn.Store(&conn); c.open.Err() != nil {
		// The goroutine that cut this connection may have found no driver's connection to end.
		go hangUp(conn)
	}
	return c.open.Err()
}

// query runs the statement of a call in autocommit.
func (c *connection) query(e effect, s statement) (a answer, err error) {
	// No statement is prepared under a name: behind a pooler the next transaction may be in another
	// session.
	args := append([]any{pgx.QueryExecModeExec}, s.args...)
	rows, err := c.driver().Query(c.open, s.sql, args...)
	if err == nil {
		a, err = readAnswer(e, rows)
	}
	c.usedAt = now()
	return a, err
}

// hasEnded reports whether the server has closed the connection. It looks only if the connection
// has been idle for the given time.
func (c *connection) hasEnded(idle time.Duration) bool {
	conn := c.driver()
	if conn == nil || now()-c.usedAt < idle {
		return false
	}
	pgConn := conn.PgConn()
	if isQuiet(pgConn.Conn()) {
		return false
	}
	// A deadline, not a context: at the end of a context the driver may send a cancel request,
	// depending on its settings.
	_ = pgConn.Conn().SetReadDeadline(time.Now().Add(time.Millisecond))
	// The server sends the reason before it closes the connection.
	err := pgConn.WaitForNotification(context.Background())
	_ = pgConn.Conn().SetReadDeadline(time.Time{})
	return err != nil && pgConn.IsClosed()
}

// isBroken reports whether the connection cannot be used for another statement.
func (c *connection) isBroken() bool {
	conn := c.driver()
	return conn == nil || conn.PgConn().IsClosed() || conn.PgConn().TxStatus() != 'I'
}

// role returns the role that has logged in.
func (c *connection) role() string {
	if conn := c.driver(); conn != nil {
		return conn.PgConn().ParameterStatus("session_authorization")
	}
	return ""
}

// cut ends the connection at once, whatever hangs in it, and waits for nothing.
func (c *connection) cut() {
	c.end()
	if conn := c.driver(); conn != nil {
		cut(conn.PgConn())
	}
	go c.hangUp()
}

// hangUp waits until the connection is not used, and closes it properly.
func (c *connection) hangUp() {
	c.use.Lock()
	defer c.use.Unlock()
	if conn := c.driver(); conn != nil {
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

// cut ends a connection and any call that hangs on it. It may be called from any goroutine.
func cut(conn *pgconn.PgConn) {
	_ = conn.Conn().SetDeadline(time.Unix(1, 0))
	// Close may block: TLS sends an alert first, and a tunnel may wait, too.
	go func() { _ = conn.Conn().Close() }()
}

// opener returns the function that opens the connections of a source.
func opener(source any) func(context.Context) (Conn, error) {
	var pool *pgxpool.Config
	var parseErr error
	switch source := source.(type) {
	case func(context.Context) (Conn, error):
		return source
	case *pgxpool.Pool:
		pool = source.Config()
	case string:
		pool, parseErr = pgxpool.ParseConfig(source)
	}
	return func(ctx context.Context) (Conn, error) {
		if parseErr != nil {
			return nil, parseErr
		}
		// The fence has no pool of its own: a call that hangs or panics in a pool cannot be ended.
		config := pool.ConnConfig.Copy()
		// Go's strings are UTF-8, whatever encoding the role has set.
		config.RuntimeParams["client_encoding"] = "UTF8"
		hosts := map[string]bool{config.Host: true}
		for _, other := range config.Fallbacks {
			hosts[other.Host] = true
		}
		if len(hosts) > 1 && config.ConnectTimeout == 0 {
			// A host that does not answer must leave time for the others.
			config.ConnectTimeout = shortestOpening * time.Millisecond / time.Duration(len(hosts))
			config.LookupFunc = lookupOnce(config.LookupFunc, config.ConnectTimeout)
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

// lookupOnce looks up each host once, for this time at most. The driver looks up all hosts before it
// connects to the first one, and a host twice if it tries it with TLS and without.
func lookupOnce(lookup pgconn.LookupFunc, limit time.Duration) pgconn.LookupFunc {
	found := map[string]func() ([]string, error){}
	return func(ctx context.Context, host string) ([]string, error) {
		if found[host] == nil {
			found[host] = sync.OnceValues(func() ([]string, error) {
				ctx, cancel := context.WithTimeout(ctx, limit)
				defer cancel()
				return lookup(ctx, host)
			})
		}
		return found[host]()
	}
}

// readAnswer reads the rows of a call. Its statement returns no NULL.
func readAnswer(e effect, rows pgx.Rows) (a answer, err error) {
	var first, second string
	var remaining, again float64
	var isReleased bool
	columns, count := []any{&first, &remaining, &again, &second}, len(e.Names)
	switch e.Do {
	case "keep", "keep_row":
		a.outcomes = make([]outcome, 0, count)
	case "acquire":
		columns, count = []any{&a.token, &first, &remaining, &second}, 1
	case "release":
		columns = []any{&isReleased}
	case "undo":
		columns, count = []any{&a.undone}, 1
	}
	tag, err := pgx.ForEachRow(rows, columns, func() error {
		switch e.Do {
		case "acquire":
			if a.token == 0 {
				a.taken = &taken{first, milliseconds(remaining), second}
			}
		case "release":
			a.released = append(a.released, isReleased)
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
