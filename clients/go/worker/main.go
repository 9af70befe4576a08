// The worker of the scenarios in Go: does what it reads, a JSON object a line, and says what became
// of it.
//
// Its orders and answers are the same for the clients of all languages, and written down in
// clients/new-language.md.
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
	errRolledBack = errors.New("rolled back, as told")
	errHeld       = &pgfence.Error{Kind: pgfence.LeaseLost}
	background    = context.Background()
)

// order is what the worker is told.
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

// holding is what a lease and an adopted one have.
type holding interface {
	Guard(context.Context, pgfence.Pgx, pgfence.PgxWork, ...pgfence.Last) error
}

type worker struct {
	url   string
	fence *pgfence.Fence
	lines chan order

	// table is what it writes: that of the row that it keeps, or work.
	table string

	mu    sync.Mutex
	lease holding
	// crowd are the names of those of hold.
	crowd map[string]bool
	many  pgfence.Leases
	// isBroken: the next connection of the fence's cannot be opened.
	isBroken atomic.Bool
	// how the work of the leader is to end.
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
	w.fence = pgfence.New(w.opens, pgfence.OnEvent(w.tell))
	defer w.fence.Close()
	say("connected", nil)
	for {
		select {
		case <-ctx.Done():
			return
		case next, more := <-w.lines:
			if !more {
				return
			}
			if event, more, err := w.follow(next); err != nil {
				refused(err)
			} else if event != "" {
				say(event, more)
			}
		}
	}
}

// opens a connection for the fence.
func (w *worker) opens(ctx context.Context) (pgfence.Conn, error) {
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

// Its answers

var saying sync.Mutex

type said map[string]any

func say(event string, more said) {
	saying.Lock()
	defer saying.Unlock()
	line := said{"event": event, "at": time.Now().UnixMilli()}
	for key, value := range more {
		line[key] = value
	}
	if err := json.NewEncoder(os.Stdout).Encode(line); err != nil {
		panic(err)
	}
}

func refused(err error) {
	kind, state := "other", ""
	var server *pgconn.PgError
	var told *pgfence.Error
	if errors.As(err, &server) {
		kind, state = "refused", server.Code
	}
	switch {
	case errors.As(err, &told) && told.Kind == pgfence.TransactionLost && told.InDoubt:
		kind = "in-doubt"
	case told != nil:
		kind = kinds[told.Kind]
	case errors.Is(err, context.DeadlineExceeded):
		kind = "deadline"
	}
	say("refused", said{"error": kind, "sqlstate": state, "message": err.Error()})
}

func (w *worker) tell(event pgfence.Event) {
	w.mu.Lock()
	ofCrowd := w.crowd[event.Names[0]]
	w.mu.Unlock()
	if event.Kind == "lost" {
		say("lost", said{"name": event.Names[0], "reason": event.Reason})
	} else if event.Kind == "renewed" && !ofCrowd {
		deadline := time.Now().Add(event.Remaining)
		say("renewed", said{"token": event.Token, "deadline": deadline.UnixMilli()})
	}
}

func granted(lease *pgfence.Lease) said {
	// The time is read first: the other way round it could be late.
	wall := time.Now()
	return said{"token": lease.Token(), "deadline": wall.Add(lease.Remaining()).UnixMilli()}
}

// Its orders

func (w *worker) follow(o order) (event string, more said, err error) {
	switch o.Do {
	case "acquire":
		return w.acquire(o)
	case "claim":
		return w.claim(o)
	case "hold":
		return w.hold(o)
	case "holding":
		return "holding", said{"count": w.held()}, nil
	case "release-all":
		_ = w.many.Release()
		w.many = nil
		return "released", nil, nil
	case "adopted":
		w.table = "work"
		w.holds(w.fence.Adopted(o.Name, o.Token))
		return "adopted", said{"token": o.Token}, nil
	case "break":
		w.isBroken.Store(true)
	case "lead":
		w.lead(o)
	case "stop":
		w.stop()
	case "work":
		w.how <- o.How
	case "census":
		return "census", said{"tasks": runtime.NumGoroutine()}, nil
	case "close":
		return w.close()
	case "unfenced":
		return w.unfenced(o)
	case "guard-all":
		return w.steps("guarded", func(conn *pgx.Conn, work pgfence.PgxWork) error {
			return w.fence.Guard(background, conn, w.many, work)
		})
	case "update", "sleep", "commit", "rollback", "commit-itself", "fail-and-go-on":
		return "", nil, errHeld
	default:
		return w.with(o)
	}
	return "done", nil, nil
}

// with carries out what takes a lease.
func (w *worker) with(o order) (event string, more said, err error) {
	holding := w.of()
	if holding == nil {
		return "", nil, errHeld
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
		return "wrote", nil, w.connected("", func(conn *pgx.Conn) error {
			if o.ReadFirst {
				if _, err := conn.Exec(background, "SELECT 1"); err != nil {
					return err
				}
			}
			return holding.Guard(background, conn, w.update(o), last...)
		})
	case "truncate":
		return "wrote", nil, w.connected("", func(conn *pgx.Conn) error {
			return holding.Guard(background, conn, does("TRUNCATE work"))
		})
	case "guard":
		return w.steps("guarded", func(conn *pgx.Conn, work pgfence.PgxWork) error {
			return holding.Guard(background, conn, work)
		})
	case "present":
		return "", nil, w.connected(lease.Options(), func(conn *pgx.Conn) error {
			return told(pgx.BeginFunc(background, conn, func(tx pgx.Tx) error {
				return w.transaction(background, "presented", tx)
			}))
		})
	}
	return "", nil, errors.New("unknown order")
}

func (w *worker) of() holding {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lease
}

func (w *worker) holds(lease holding) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lease = lease
}

func ms(number int64) time.Duration { return time.Duration(number) * time.Millisecond }

// within is the caller's own deadline.
func within(ctx context.Context, o order) (context.Context, context.CancelFunc) {
	if o.Within == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, ms(o.Within))
}

func (w *worker) update(o order) pgfence.PgxWork {
	return does("UPDATE "+w.table+" SET value = $1 WHERE id = 1", o.Value)
}

// ends gives back the lease that it has, unless that is an adopted one.
func (w *worker) ends() {
	if lease, is := w.of().(*pgfence.Lease); is {
		_ = lease.Release()
	}
	w.holds(nil)
	w.table = "work"
}

func (w *worker) claim(o order) (event string, more said, err error) {
	w.ends()
	var token int64
	err = w.connected("", func(conn *pgx.Conn) error {
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
	w.holds(lease)
	w.table = "run"
	return "acquired", granted(lease), nil
}

func (w *worker) acquire(o order) (event string, more said, err error) {
	w.ends()
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
	w.holds(lease)
	return "acquired", granted(lease), nil
}

func (w *worker) isOfCrowd(names []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		w.crowd[name] = true
	}
}

func (w *worker) hold(o order) (event string, more said, err error) {
	w.isOfCrowd(o.Names)
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
	return "holding", said{"count": w.held()}, nil
}

func (w *worker) held() (count int) {
	for _, lease := range w.many {
		if lease.Held() {
			count++
		}
	}
	return count
}

// connected does something on a connection of its own.
func (w *worker) connected(options string, do func(*pgx.Conn) error) error {
	config, err := pgx.ParseConfig(w.url)
	if err != nil {
		return err
	}
	if options != "" {
		config.RuntimeParams["options"] = options
	}
	// Behind a pooler nothing may be prepared.
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(background, config)
	if err != nil {
		return err
	}
	defer conn.Close(background)
	return do(conn)
}

func does(statement string, args ...any) pgfence.PgxWork {
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, statement, args...)
		return err
	}
}

func (w *worker) unfenced(o order) (event string, more said, err error) {
	return "wrote", nil, w.connected("", func(conn *pgx.Conn) error {
		_, err := conn.Exec(background, "UPDATE work SET value = $1 WHERE id = 1", o.Value)
		return err
	})
}

// steps are a transaction of what it reads, until "commit" or "rollback".
func (w *worker) steps(
	begun string, guard func(*pgx.Conn, pgfence.PgxWork) error,
) (event string, more said, err error) {
	return "", nil, w.connected("", func(conn *pgx.Conn) error {
		return told(guard(conn, func(ctx context.Context, tx pgx.Tx) error {
			return w.transaction(ctx, begun, tx)
		}))
	})
}

// told says how a transaction has ended.
func told(err error) error {
	switch {
	case err == nil:
		say("committed", nil)
	case errors.Is(err, errRolledBack):
		say("rolled-back", nil)
	default:
		return err
	}
	return nil
}

func (w *worker) transaction(ctx context.Context, begun string, tx pgx.Tx) error {
	say(begun, nil)
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
			patience, cancel := within(ctx, o)
			done, err = "slept", does("SELECT pg_sleep($1)", float64(o.Ms)/1000)(patience, tx)
			cancel()
		case "guard":
			done, err = "", told(w.of().Guard(ctx, tx, func(ctx context.Context, tx pgx.Tx) error {
				return w.transaction(ctx, "guarded", tx)
			}))
		case "commit-itself":
			err = does("COMMIT")(ctx, tx)
		case "fail-and-go-on":
			_ = does("SELECT 1 / 0")(ctx, tx)
		default:
			err = errors.New("unknown order")
		}
		if err != nil {
			return err
		}
		if done != "" {
			say(done, nil)
		}
	}
	return errRolledBack
}

func (w *worker) lead(o order) {
	ctx, cancel := context.WithCancel(background)
	w.stop, w.stopped = cancel, make(chan struct{})
	go func() {
		defer close(w.stopped)
		err := w.fence.Lead(ctx, o.Name, ms(o.TTL), w.leads)
		if errors.Is(err, errWork) {
			say("stopped", said{"reason": "fails"})
		} else {
			say("stopped", nil)
		}
	}()
}

func (w *worker) leads(ctx context.Context, lease *pgfence.Lease) error {
	w.holds(lease)
	say("leading", granted(lease))
	select {
	case how := <-w.how:
		switch how {
		case "fails":
			return errWork
		case "loses-connection":
			return w.connected("", func(conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())")
				return err
			})
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *worker) close() (event string, more said, err error) {
	if w.stop != nil {
		w.stop()
		<-w.stopped
	}
	w.fence.Close()
	w.holds(nil)
	w.many = nil
	return "closed", nil, nil
}
