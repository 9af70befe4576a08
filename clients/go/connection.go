package pgfence

import (
	"context"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgconn"
)

// ownConnection is a lease's own: opened when it is needed, used by one goroutine at a time. Every call is bounded by
// its context, whatever hangs. Arguments go as text with the statement, and nothing is prepared under a name: behind a
// pooler the next transaction may run in another session.
type ownConnection struct {
	config *pgconn.Config
	conn   *pgconn.PgConn
	// mu guards what canceling from another goroutine looks at: the connection of a call that is under way.
	mu         sync.Mutex
	cancelable *pgconn.PgConn
	isCanceled bool
}

func (o *ownConnection) isOpen() bool { return o.conn != nil }

// call runs one statement in autocommit, and returns its only value; nil is NULL. It can be canceled.
func (o *ownConnection) call(ctx context.Context, limit time.Duration, sql string, args ...any) (*int64, error) {
	value, err := o.bounded(ctx, limit, func(ctx context.Context) (*int64, error) {
		o.setCancelable(o.conn)
		result := o.conn.ExecParams(ctx, sql, texts(args), nil, nil, nil).Read()
		return number(result, result.Err)
	})
	if o.setCancelable(nil) {
		// A request that is late would hit the next statement: the release of a grant that came all the same.
		o.close()
	}
	return value, err
}

// setCancelable tells whether the call before was canceled.
func (o *ownConnection) setCancelable(conn *pgconn.PgConn) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	wasCanceled := o.isCanceled
	o.cancelable, o.isCanceled = conn, false
	return wasCanceled
}

// callWithin runs it in a transaction that the server ends at the limit, too, with one round trip.
func (o *ownConnection) callWithin(ctx context.Context, limit time.Duration, sql string, args ...any) (*int64, error) {
	return o.bounded(ctx, limit, func(ctx context.Context) (*int64, error) {
		timeout := strconv.FormatInt(settable(limit), 10)
		batch := &pgconn.Batch{}
		batch.ExecParams("BEGIN", nil, nil, nil, nil)
		batch.ExecParams("SELECT set_config('statement_timeout', $1, true)", texts([]any{timeout}), nil, nil, nil)
		batch.ExecParams(sql, texts(args), nil, nil, nil)
		batch.ExecParams("COMMIT", nil, nil, nil, nil)
		results, err := o.conn.ExecBatch(ctx, batch).ReadAll()
		if err != nil {
			if !o.conn.IsClosed() {
				_, _ = o.conn.Exec(ctx, "ROLLBACK").ReadAll()
			}
			return nil, err
		}
		return number(results[2], nil)
	})
}

// settable is a span in milliseconds for a setting, which holds no more.
func settable(span time.Duration) int64 {
	if ms := span.Milliseconds(); ms < math.MaxInt32 {
		return ms
	}
	return math.MaxInt32
}

func (o *ownConnection) bounded(
	ctx context.Context, limit time.Duration, call func(context.Context) (*int64, error),
) (*int64, error) {
	if o.conn == nil {
		if err := o.open(ctx, limit); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	value, err := call(ctx)
	if o.conn.IsClosed() {
		o.close()
	}
	return value, err
}

func (o *ownConnection) open(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn, err := pgconn.ConnectConfig(ctx, o.config)
	if err == nil {
		o.conn = conn
	}
	return err
}

// cancel asks the server to end the call that is under way, whose answer then comes.
func (o *ownConnection) cancel(ctx context.Context) {
	o.mu.Lock()
	conn := o.cancelable
	o.isCanceled = conn != nil
	o.mu.Unlock()
	if conn != nil {
		// Where the server cannot be reached the call ends at its limit.
		_ = conn.CancelRequest(ctx)
	}
}

// giveUp has the server end the call that is under way, and returns its answer. After the limit the call is stopped.
func (o *ownConnection) giveUp(ctx context.Context, limit time.Duration, stop func(), answer <-chan error) error {
	// A call that has not reached the server yet is not canceled by the first attempt. After the last one it is broken
	// off.
	for until := now() + limit; ; {
		attempt, cancel := context.WithTimeout(ctx, limit)
		o.cancel(attempt)
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

func (o *ownConnection) close() {
	conn := o.conn
	if conn == nil {
		return
	}
	o.conn = nil
	if conn.IsClosed() {
		// The driver first tries to have the server cancel what ran, and closes the socket only then.
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
	// Some wait here: TLS for saying goodbye, a tunnel, and those of pgx 5.0 to 5.3 for the very read that is to end.
	go func() { _ = socket.Close() }()
}

func number(result *pgconn.Result, err error) (*int64, error) {
	if err != nil {
		return nil, err
	}
	if len(result.Rows) != 1 || len(result.Rows[0]) != 1 {
		return nil, fmt.Errorf("pgfence: the server answers %d rows instead of one value", len(result.Rows))
	}
	text := result.Rows[0][0]
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
			values[index] = []byte(strconv.FormatInt(arg.Microseconds(), 10) + " microseconds")
		case []string:
			quote := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
			quoted := make([]string, len(arg))
			for index, element := range arg {
				quoted[index] = `"` + quote.Replace(element) + `"`
			}
			values[index] = []byte("{" + strings.Join(quoted, ",") + "}")
		default:
			values[index] = []byte(fmt.Sprint(arg))
		}
	}
	return values
}
