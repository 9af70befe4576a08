// The worker of the scenarios in Go. It reads orders, one JSON object a line, carries them out and
// writes an answer to each. The orders and answers are the same for the clients of all languages;
// clients/new-language.md lists them.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"pgfence.example/pgfence"
)

var kinds = map[pgfence.Kind]string{
	pgfence.LeaseTaken:      "taken",
	pgfence.LeaseLost:       "lost",
	pgfence.Refused:         "refused",
	pgfence.TransactionLost: "transaction-lost",
	pgfence.NotInstalled:    "not-installed",
	pgfence.NotGranted:      "not-granted",
	pgfence.NoConnection:    "no-answer",
	pgfence.NoAnswer:        "no-answer",
}

// claim takes the row of the table run, if nobody holds it.
const claim = `UPDATE run SET held_until = clock_timestamp() + $1 * interval '1 ms' WHERE id = (
		SELECT id FROM run WHERE held_until IS NULL OR held_until < clock_timestamp()
		FOR UPDATE SKIP LOCKED)
	RETURNING fence`

var (
	errWork       = errors.New("an error of the work's own")
	errRolledBack = errors.New("rolled back by order")
	errNoLease    = &pgfence.Error{Kind: pgfence.LeaseLost}
	background    = context.Background()
)

// order is an order that the worker reads.
type order struct {
	Do, Host, User, Dbname, Application, Name, Holder, Value, How string

	Port, Slots              int
	Names                    []string
	Token, Ms                int64
	TTL                      int64 `json:"ttl_ms"`
	Wait                     int64 `json:"wait_ms"`
	Within                   int64 `json:"within_ms"`
	Session, Shared, Reclaim bool
	Release                  bool
	ReadFirst                bool `json:"read_first"`
}

// holding is a lease or an adopted lease.
type holding interface {
	Guard(context.Context, pgfence.Pgx, pgfence.PgxWork, ...pgfence.Last) error
}

type worker struct {
	url   string
	fence *pgfence.Fence
	lines chan order

	// table is the table that the worker writes: run while it keeps a row of it, else work.
	table string

	mu    sync.Mutex
	lease holding
	// crowd are the names of the leases of hold, and many the leases.
	crowd map[string]bool
	many  pgfence.Leases
	// isBroken has the next opening of a connection of the fence panic.
	isBroken atomic.Bool
	// how takes the way in which the work of the leader ends.
	how     chan string
	stop    context.CancelFunc
	stopped chan struct{}
}

func main() {
	ctx, cancel := signal.NotifyContext(background, syscall.SIGTERM)
	defer cancel()
	w := &worker{
		table: "work", lines: make(chan order), crowd: map[string]bool{}, how: make(chan string, 1),
	}
	go w.read()
	first := <-w.lines
	w.url = fmt.Sprintf("postgresql://%s@%s:%d/%s?application_name=%s&connect_timeout=2",
		first.User, first.Host, first.Port, first.Dbname, first.Application)
	w.fence = pgfence.New(w.connect, pgfence.OnEvent(w.onEvent))
	defer w.fence.Close()
	answer("connected", nil)
	for {
		select {
		case <-ctx.Done():
			return
		case next, more := <-w.lines:
			if !more {
				return
			}
			if event, more, err := w.carryOut(next); err != nil {
				answerError(err)
			} else if event != "" {
				answer(event, more)
			}
		}
	}
}

// connect opens a connection for the fence.
func (w *worker) connect(ctx context.Context) (pgfence.Conn, error) {
	if w.isBroken.CompareAndSwap(true, false) {
		panic("broken")
	}
	return pgx.Connect(ctx, w.url)
}

func (w *worker) read() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var next order
		if err := json.Unmarshal(lines.Bytes(), &next); err != nil {
			panic(err)
		}
		w.lines <- next
	}
	close(w.lines)
}

// Answers

var answering sync.Mutex

type fields map[string]any

func answer(event string, more fields) {
	answering.Lock()
	defer answering.Unlock()
	line := fields{"event": event, "at": time.Now().UnixMilli()}
	for key, value := range more {
		line[key] = value
	}
	if err := json.NewEncoder(os.Stdout).Encode(line); err != nil {
		panic(err)
	}
}

func answerError(err error) {
	kind, state := "other", ""
	var server *pgconn.PgError
	var fenceErr *pgfence.Error
	if errors.As(err, &server) {
		kind, state = "refused", server.Code
	}
	switch {
	case errors.As(err, &fenceErr) && fenceErr.Kind == pgfence.TransactionLost && fenceErr.InDoubt:
		kind = "in-doubt"
	case fenceErr != nil:
		kind = kinds[fenceErr.Kind]
	case errors.Is(err, context.DeadlineExceeded):
		kind = "deadline"
	}
	answer("refused", fields{"error": kind, "sqlstate": state, "message": err.Error()})
}

func (w *worker) onEvent(event pgfence.Event) {
	w.mu.Lock()
	isInCrowd := w.crowd[event.Names[0]]
	w.mu.Unlock()
	if event.Kind == "lost" {
		answer("lost", fields{"name": event.Names[0], "reason": event.Reason})
	} else if event.Kind == "renewed" && !isInCrowd {
		deadline := time.Now().Add(event.Remaining)
		answer("renewed", fields{"token": event.Token, "deadline": deadline.UnixMilli()})
	}
}

func granted(lease *pgfence.Lease) fields {
	// The clock is read first: after Remaining the deadline could be too late.
	wall := time.Now()
	return fields{"token": lease.Token(), "deadline": wall.Add(lease.Remaining()).UnixMilli()}
}

// Orders

func (w *worker) carryOut(o order) (event string, more fields, err error) {
	switch o.Do {
	case "acquire":
		return w.acquire(o)
	case "claim":
		return w.claim(o)
	case "hold":
		return w.hold(o)
	case "holding":
		return "holding", fields{"count": w.held()}, nil
	case "release-all":
		_ = w.many.Release()
		w.many = nil
		return "released", nil, nil
	case "adopted":
		w.table = "work"
		w.setLease(w.fence.Adopted(o.Name, o.Token))
		return "adopted", fields{"token": o.Token}, nil
	case "break":
		w.isBroken.Store(true)
	case "lead":
		w.lead(o)
	case "stop":
		w.stop()
	case "work":
		w.how <- o.How
	case "census":
		return "census", fields{"tasks": runtime.NumGoroutine()}, nil
	case "close":
		return w.close()
	case "unfenced":
		return w.unfenced(o)
	case "guard-all":
		return w.runSteps("guarded", func(conn *pgx.Conn, work pgfence.PgxWork) error {
			return w.fence.Guard(background, conn, w.many, work)
		})
	case "update", "sleep", "commit", "rollback", "commit-itself", "fail-and-go-on":
		return "", nil, errNoLease
	default:
		return w.carryOutWithLease(o)
	}
	return "done", nil, nil
}

// carryOutWithLease carries out the orders that use a lease.
func (w *worker) carryOutWithLease(o order) (event string, more fields, err error) {
	holding := w.holding()
	if holding == nil {
		return "", nil, errNoLease
	}
	lease, _ := holding.(*pgfence.Lease)
	switch o.Do {
	case "check":
		return "held", nil, lease.Check()
	case "release":
		if err = lease.Check(); err == nil {
			err = lease.Release()
		}
		return "released", nil, err
	case "write":
		last := []pgfence.Last{pgfence.Last(o.Release)}
		return "wrote", nil, w.withConnection("", func(conn *pgx.Conn) error {
			if o.ReadFirst {
				if _, err := conn.Exec(background, "SELECT 1"); err != nil {
					return err
				}
			}
			return holding.Guard(background, conn, w.update(o), last...)
		})
	case "truncate":
		return "wrote", nil, w.withConnection("", func(conn *pgx.Conn) error {
			return holding.Guard(background, conn, exec("TRUNCATE work"))
		})
	case "guard":
		return w.runSteps("guarded", func(conn *pgx.Conn, work pgfence.PgxWork) error {
			return holding.Guard(background, conn, work)
		})
	case "present":
		return "", nil, w.withConnection(lease.Options(), func(conn *pgx.Conn) error {
			return answerEnd(pgx.BeginFunc(background, conn, func(tx pgx.Tx) error {
				return w.transaction(background, "presented", tx)
			}))
		})
	}
	return "", nil, errors.New("unknown order")
}

func (w *worker) holding() holding {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lease
}

func (w *worker) setLease(lease holding) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lease = lease
}

func ms(number int64) time.Duration { return time.Duration(number) * time.Millisecond }

// within adds the caller's deadline of an order to a context.
func within(ctx context.Context, o order) (context.Context, context.CancelFunc) {
	if o.Within == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, ms(o.Within))
}

func (w *worker) update(o order) pgfence.PgxWork {
	return exec("UPDATE "+w.table+" SET value = $1 WHERE id = 1", o.Value)
}

// releaseLease releases the lease that the worker has, unless it is an adopted one.
func (w *worker) releaseLease() {
	if lease, ok := w.holding().(*pgfence.Lease); ok {
		_ = lease.Release()
	}
	w.setLease(nil)
	w.table = "work"
}

func (w *worker) claim(o order) (event string, more fields, err error) {
	w.releaseLease()
	var token int64
	err = w.withConnection("", func(conn *pgx.Conn) error {
		return conn.QueryRow(background, claim, o.TTL).Scan(&token)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return "taken", nil, nil
	}
	if err != nil {
		return "", nil, err
	}
	key, options := map[string]any{"id": 1}, pgfence.RowOptions{TTL: ms(o.TTL)}
	lease, err := w.fence.KeepRow(background, "run", key, token, options)
	if err != nil {
		return "", nil, err
	}
	w.setLease(lease)
	w.table = "run"
	return "acquired", granted(lease), nil
}

func (w *worker) acquire(o order) (event string, more fields, err error) {
	w.releaseLease()
	ctx, cancel := within(background, o)
	defer cancel()
	lease, err := w.fence.Acquire(ctx, o.Names, pgfence.Options{
		TTL: ms(o.TTL), Wait: ms(o.Wait), Holder: o.Holder, Reclaim: o.Reclaim,
		Session: o.Session, Shared: o.Shared, Slots: o.Slots,
	})
	if errors.Is(err, pgfence.LeaseTaken) {
		return "taken", nil, nil
	}
	if err != nil {
		return "", nil, err
	}
	w.setLease(lease)
	return "acquired", granted(lease), nil
}

func (w *worker) addToCrowd(names []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		w.crowd[name] = true
	}
}

func (w *worker) hold(o order) (event string, more fields, err error) {
	w.addToCrowd(o.Names)
	for _, name := range o.Names {
		lease, err := w.fence.Acquire(background, []string{name}, pgfence.Options{TTL: ms(o.TTL)})
		if errors.Is(err, pgfence.LeaseTaken) {
			return "taken", nil, nil
		}
		if err != nil {
			return "", nil, err
		}
		w.many = append(w.many, lease)
	}
	return "holding", fields{"count": w.held()}, nil
}

func (w *worker) held() (count int) {
	for _, lease := range w.many {
		if lease.Held() {
			count++
		}
	}
	return count
}

// withConnection calls do with a new connection.
func (w *worker) withConnection(options string, do func(*pgx.Conn) error) error {
	config, err := pgx.ParseConfig(w.url)
	if err != nil {
		return err
	}
	if options != "" {
		config.RuntimeParams["options"] = options
	}
	// Behind a pooler no statement may be prepared.
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(background, config)
	if err != nil {
		return err
	}
	defer conn.Close(background)
	return do(conn)
}

func exec(statement string, args ...any) pgfence.PgxWork {
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, statement, args...)
		return err
	}
}

func (w *worker) unfenced(o order) (event string, more fields, err error) {
	return "wrote", nil, w.withConnection("", func(conn *pgx.Conn) error {
		_, err := conn.Exec(background, "UPDATE work SET value = $1 WHERE id = 1", o.Value)
		return err
	})
}

// runSteps runs a transaction of the orders that follow, until "commit" or "rollback".
func (w *worker) runSteps(
	beginEvent string, guard func(*pgx.Conn, pgfence.PgxWork) error,
) (event string, more fields, err error) {
	return "", nil, w.withConnection("", func(conn *pgx.Conn) error {
		return answerEnd(guard(conn, func(ctx context.Context, tx pgx.Tx) error {
			return w.transaction(ctx, beginEvent, tx)
		}))
	})
}

// answerEnd answers how a transaction has ended, or returns the error that has ended it.
func answerEnd(err error) error {
	switch {
	case err == nil:
		answer("committed", nil)
	case errors.Is(err, errRolledBack):
		answer("rolled-back", nil)
	default:
		return err
	}
	return nil
}

func (w *worker) transaction(ctx context.Context, beginEvent string, tx pgx.Tx) error {
	answer(beginEvent, nil)
	for o := range w.lines {
		done, err := "done", error(nil)
		switch o.Do {
		case "commit":
			return nil
		case "rollback":
			return errRolledBack
		case "update":
			done, err = "updated", w.update(o)(ctx, tx)
		case "sleep":
			ctx, cancel := within(ctx, o)
			done, err = "slept", exec("SELECT pg_sleep($1)", float64(o.Ms)/1000)(ctx, tx)
			cancel()
		case "guard":
			work := func(ctx context.Context, tx pgx.Tx) error {
				return w.transaction(ctx, "guarded", tx)
			}
			done, err = "", answerEnd(w.holding().Guard(ctx, tx, work))
		case "check":
			lease, _ := w.holding().(*pgfence.Lease)
			done, err = "held", lease.Check()
		case "commit-itself":
			err = exec("COMMIT")(ctx, tx)
		case "fail-and-go-on":
			_ = exec("SELECT 1 / 0")(ctx, tx)
		default:
			err = errors.New("unknown order")
		}
		if err != nil {
			return err
		}
		if done != "" {
			answer(done, nil)
		}
	}
	return errRolledBack
}

func (w *worker) lead(o order) {
	ctx, cancel := context.WithCancel(background)
	w.stop, w.stopped = cancel, make(chan struct{})
	go func() {
		defer close(w.stopped)
		err := w.fence.Lead(ctx, o.Name, ms(o.TTL), w.leadWork)
		if errors.Is(err, errWork) {
			answer("stopped", fields{"reason": "fails"})
		} else {
			answer("stopped", nil)
		}
	}()
}

func (w *worker) leadWork(ctx context.Context, lease *pgfence.Lease) error {
	w.setLease(lease)
	answer("leading", granted(lease))
	select {
	case how := <-w.how:
		switch how {
		case "fails":
			return errWork
		case "loses-connection":
			return w.withConnection("", func(conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())")
				return err
			})
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *worker) close() (event string, more fields, err error) {
	if w.stop != nil {
		w.stop()
		<-w.stopped
	}
	w.fence.Close()
	w.setLease(nil)
	w.many = nil
	return "closed", nil, nil
}
