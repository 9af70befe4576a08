package pgfence

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// connection is opened when it is needed, and used by one goroutine at a time. Every call is bounded by its context,
// whatever hangs. Arguments go as text with the statement, and nothing is prepared under a name: behind a pooler the next
// transaction may run in another session.
type connection struct {
	config *pgconn.Config
	conn   *pgconn.PgConn
	// mayDial: the driver would have the server cancel whatever it breaks off, over a new connection, and that may hang,
	// too.
	mayDial *atomic.Bool
	// mu guards what canceling from another goroutine looks at: the connection of a call that is under way.
	mu         sync.Mutex
	cancelable *pgconn.PgConn
	isCanceled bool
}

func (c *connection) isOpen() bool { return c.conn != nil }

// bounds are what the server is told for a transaction.
type bounds struct {
	// limit is for each statement, and for the whole call on this side.
	limit time.Duration
	// lock is for each lock; 0 is none.
	lock time.Duration
}

// call runs one statement in autocommit, and returns its only value; nil is NULL. It can be canceled.
func (c *connection) call(ctx context.Context, limit time.Duration, sql string, args ...any) (*int64, error) {
	rows, err := c.bounded(ctx, limit, func(ctx context.Context) ([][][]byte, error) {
		c.setCancelable(c.conn)
		result := c.conn.ExecParams(ctx, sql, texts(args), nil, nil, nil).Read()
		return result.Rows, result.Err
	})
	if c.setCancelable(nil) {
		// A request that is late would hit the next statement: the release of a grant that came all the same.
		c.close()
	}
	return number(rows, err)
}

// setCancelable tells whether the call before was canceled.
func (c *connection) setCancelable(conn *pgconn.PgConn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	wasCanceled := c.isCanceled
	c.cancelable, c.isCanceled = conn, false
	return wasCanceled
}

// rows runs a statement in a transaction that the server bounds, too, with one round trip.
func (c *connection) rows(ctx context.Context, within bounds, sql string, args ...any) ([][][]byte, error) {
	return c.bounded(ctx, within.limit, func(ctx context.Context) ([][][]byte, error) {
		limits := []any{settable(within.limit), settable(within.lock)}
		const set = "SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', $2, true)"
		batch := &pgconn.Batch{}
		batch.ExecParams("BEGIN", nil, nil, nil, nil)
		batch.ExecParams(set, texts(limits), nil, nil, nil)
		batch.ExecParams(sql, texts(args), nil, nil, nil)
		batch.ExecParams("COMMIT", nil, nil, nil, nil)
		results, err := c.conn.ExecBatch(ctx, batch).ReadAll()
		if err != nil {
			if !c.conn.IsClosed() {
				_, _ = c.conn.Exec(ctx, "ROLLBACK").ReadAll()
			}
			return nil, err
		}
		return results[2].Rows, nil
	})
}

// settable is a span in milliseconds for a setting, which holds no more.
func settable(span time.Duration) int64 {
	if ms := span.Milliseconds(); ms < math.MaxInt32 {
		return ms
	}
	return math.MaxInt32
}

func (c *connection) bounded(
	ctx context.Context, limit time.Duration, call func(context.Context) ([][][]byte, error),
) ([][][]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if c.conn == nil {
		if err := c.open(ctx); err != nil {
			return nil, err
		}
	}
	rows, err := call(ctx)
	if c.conn.IsClosed() {
		c.close()
	}
	return rows, err
}

func (c *connection) open(ctx context.Context) error {
	config := c.config.Copy()
	mayDial := &atomic.Bool{}
	mayDial.Store(true)
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if !mayDial.Load() {
			return nil, net.ErrClosed
		}
		return c.config.DialFunc(ctx, network, address)
	}
	conn, err := pgconn.ConnectConfig(ctx, config)
	mayDial.Store(false)
	if err == nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.conn, c.mayDial = conn, mayDial
	}
	return err
}

// cancel asks the server to end the call that is under way, whose answer then comes.
func (c *connection) cancel(ctx context.Context) {
	c.mu.Lock()
	conn, mayDial := c.cancelable, c.mayDial
	c.isCanceled = conn != nil
	c.mu.Unlock()
	if conn != nil {
		// Where the server cannot be reached the call ends at its limit.
		mayDial.Store(true)
		_ = conn.CancelRequest(ctx)
		mayDial.Store(false)
	}
}

// giveUp has the server end the call that is under way, and returns its answer. After the limit the call is stopped.
func (c *connection) giveUp(ctx context.Context, limit time.Duration, stop func(), answer <-chan error) error {
	// A call that has not reached the server yet is not canceled by the first attempt. After the last one it is broken
	// off.
	for until := now() + limit; ; {
		attempt, cancel := context.WithTimeout(ctx, limit)
		c.cancel(attempt)
		cancel()
		if now() >= until {
			stop()
		}
		select {
		case err := <-answer:
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// untilItEnds returns when the connection has ended, or the context.
func (c *connection) untilItEnds(ctx context.Context) error {
	for {
		if err := c.conn.WaitForNotification(ctx); err != nil {
			return err
		}
	}
}

func (c *connection) close() {
	conn := c.conn
	if conn == nil {
		return
	}
	c.conn = nil
	if conn.IsClosed() {
		// The driver closes the socket in its own time.
		breakOff(conn.Conn())
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// breakOff ends what hangs on a socket, from any goroutine, without waiting for anything.
func breakOff(socket net.Conn) {
	_ = socket.SetDeadline(time.Unix(1, 0))
	// Some wait here: TLS for saying goodbye, and a tunnel.
	go func() { _ = socket.Close() }()
}

// number is the only value of the only row.
func number(rows [][][]byte, err error) (*int64, error) {
	if err != nil {
		return nil, err
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return nil, fmt.Errorf("pgfence: the server answers %d rows instead of one value", len(rows))
	}
	return whole(rows[0][0])
}

// whole reads a bigint; nil is NULL.
func whole(text []byte) (*int64, error) {
	if text == nil {
		return nil, nil
	}
	value, err := strconv.ParseInt(string(text), 10, 64)
	return &value, err
}

// texts are arguments as PostgreSQL reads them; nil is NULL.
func texts(args []any) [][]byte {
	values := make([][]byte, len(args))
	for index, arg := range args {
		switch arg := arg.(type) {
		case nil:
		case time.Duration:
			values[index] = []byte(interval(arg))
		case []string:
			values[index] = []byte(arrayOf(arg))
		case []int64:
			numbers := make([]string, len(arg))
			for index, number := range arg {
				numbers[index] = strconv.FormatInt(number, 10)
			}
			values[index] = []byte("{" + strings.Join(numbers, ",") + "}")
		default:
			values[index] = []byte(fmt.Sprint(arg))
		}
	}
	return values
}

func interval(span time.Duration) string {
	return strconv.FormatInt(span.Microseconds(), 10) + " microseconds"
}

var arrayQuotes = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

// arrayOf is a text[] as PostgreSQL reads it.
func arrayOf(elements []string) string {
	quoted := make([]string, len(elements))
	for index, element := range elements {
		quoted[index] = `"` + arrayQuotes.Replace(element) + `"`
	}
	return "{" + strings.Join(quoted, ",") + "}"
}

// isOverdue tells that a call took longer than it may, and was broken off.
func isOverdue(err error) bool {
	return errors.Is(err, context.DeadlineExceeded)
}
