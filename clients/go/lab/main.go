// The laboratory's worker in Go: does what it reads, a JSON object a line, and says what became of it.
//
// What it is told and what it says is the same for the clients of all languages, and written down in clients/README.md.
// --plant builds in a known fault, which the laboratory must catch.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"pgfence.example/pgfence"
	"pgfence.example/pgfence/internal/hooks"
)

var kinds = map[pgfence.Kind]string{
	pgfence.ErrStaleToken:      "stale",
	pgfence.ErrNoToken:         "no-token",
	pgfence.ErrNeverIssued:     "never-issued",
	pgfence.ErrNotSpeaking:     "not-speaking",
	pgfence.ErrCannotBeFenced:  "cannot-be-fenced",
	pgfence.ErrLeaseLost:       "lost",
	pgfence.ErrTransactionLost: "transaction-lost",
}

// order is what the worker is told.
type order struct {
	Do          string
	Host        string
	Port        int
	User        string
	Dbname      string
	Application string
	Names       []string
	Name        string
	Token       int64
	TTL         int64 `json:"ttl_ms"`
	Wait        int64 `json:"wait_ms"`
	AtMost      int64 `json:"hold_at_most_ms"`
	AtLeast     int64 `json:"hold_at_least_ms"`
	N           int
	Session     bool
	Shared      bool
	Slots       int
	Value       string
	By          string
	Release     bool
	Ms          int64
}

type worker struct {
	url     string
	fence   *pgfence.Fence
	plant   string
	starved atomic.Bool
	// work is the connection of the transaction that is open.
	work atomic.Pointer[pgx.Conn]

	// background is of what leads and observes, until close.
	background sync.WaitGroup
	stop       context.CancelFunc
	ctx        context.Context

	mu    sync.Mutex
	lease pgfence.Holding
	// crowd are those of hold and claim.
	crowd pgfence.Leases
}

func main() {
	w := &worker{}
	w.ctx, w.stop = context.WithCancel(context.Background())
	if len(os.Args) == 3 && os.Args[1] == "--plant" {
		w.plant = os.Args[2]
	}
	for {
		next, more := read()
		if !more {
			return
		}
		if err := w.follow(next); err != nil {
			refused(err)
		}
	}
}

var lines = bufio.NewScanner(os.Stdin)

func read() (next order, more bool) {
	if !lines.Scan() {
		return order{}, false
	}
	if err := json.Unmarshal(lines.Bytes(), &next); err != nil {
		panic(err)
	}
	return next, true
}

// What it says

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
	if errors.As(err, &server) {
		state = server.Code
	}
	if told := pgfence.Classify(err); told != nil {
		kind = kinds[told.Kind]
	}
	say("refused", said{"error": kind, "sqlstate": state, "message": err.Error()})
}

// until is when a lease ends of which so much remains. The time is read first: the other way round it could be late.
func until(remaining func() time.Duration) int64 {
	wall := time.Now()
	return wall.Add(remaining()).UnixMilli()
}

// What it is told

func (w *worker) follow(o order) error {
	switch o.Do {
	case "connect":
		return w.connect(o)
	case "acquire":
		return w.acquire(o)
	case "adopt":
		return w.adopt(o)
	case "resume":
		return w.resume(o)
	case "detach":
		return w.detach()
	case "hold":
		return w.holdAll(o)
	case "claim":
		return w.claim(o)
	case "holding":
		w.sayHolding()
	case "release-all":
		w.releaseAll()
		say("released", nil)
	case "observe":
		w.observe(o)
	case "check":
		return w.with(func(lease pgfence.Holding) error { return lease.(*pgfence.Lease).Check() }, "held")
	case "renew":
		return w.with(func(lease pgfence.Holding) error {
			_, err := lease.(*pgfence.Lease).Renew(context.Background())
			return err
		}, "done")
	case "release":
		return w.with(pgfence.Holding.Release, "released")
	case "write":
		return w.with(func(lease pgfence.Holding) error { return w.write(lease, o) }, "wrote")
	case "truncate":
		return w.with(func(lease pgfence.Holding) error {
			return w.transaction(lease, "guard", func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "TRUNCATE work")
				return err
			})
		}, "wrote")
	case "unfenced":
		return w.unfenced(o.Value)
	case "guard", "present":
		return w.with(func(lease pgfence.Holding) error { return w.steps(lease, o.Do) }, "")
	case "guard-all":
		return w.steps(w.crowd, "guard")
	case "starve":
		w.starved.Store(true)
		say("done", nil)
	case "lead":
		w.lead(o)
	case "census":
		say("census", said{"tasks": runtime.NumGoroutine()})
	case "close":
		w.close()
	case "update", "sleep", "commit", "rollback":
		return &pgfence.Error{
			Kind: pgfence.ErrLeaseLost, Reason: pgfence.Released, Names: []string{"its transaction has ended"},
		}
	default:
		return errors.New("unknown order")
	}
	return nil
}

func (w *worker) connect(o order) error {
	w.url = fmt.Sprintf("postgresql://%s@%s:%d/%s?application_name=%s&default_query_exec_mode=exec",
		o.User, o.Host, o.Port, o.Dbname, o.Application)
	with, err := w.hooks()
	if err != nil {
		return err
	}
	w.fence = pgfence.New(w.url).Hooked(with)
	say("connected", nil)
	return nil
}

func (w *worker) held() pgfence.Holding {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lease
}

func (w *worker) hold(lease pgfence.Holding) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lease = lease
}

// with does something with the lease, and says that it is done.
func (w *worker) with(do func(pgfence.Holding) error, event string) error {
	lease := w.held()
	if lease == nil {
		return &pgfence.Error{Kind: pgfence.ErrLeaseLost, Reason: pgfence.Gone, Names: []string{"job"}}
	}
	if err := do(lease); err != nil {
		return err
	}
	if event != "" {
		say(event, nil)
	}
	return nil
}

func told(loss *pgfence.Error) { say("lost", said{"reason": loss.Reason, "name": loss.Names[0]}) }

func ms(number int64) time.Duration { return time.Duration(number) * time.Millisecond }

func (w *worker) acquire(o order) error {
	if lease := w.held(); lease != nil {
		_ = lease.Release()
		w.hold(nil)
	}
	w.starved.Store(false)
	lease, err := w.fence.AcquireAll(context.Background(), o.Names, pgfence.Options{
		TTL:         ms(o.TTL),
		Wait:        ms(o.Wait),
		Session:     o.Session,
		Shared:      o.Shared,
		Slots:       o.Slots,
		HoldAtMost:  ms(o.AtMost),
		HoldAtLeast: ms(o.AtLeast),
		OnLost:      told,
	})
	if errors.Is(err, pgfence.ErrLeaseTaken) {
		say("taken", nil)
		return nil
	}
	if err != nil {
		return err
	}
	w.isAcquired(lease)
	return nil
}

func (w *worker) isAcquired(lease *pgfence.Lease) {
	w.hold(lease)
	say("acquired", said{"token": lease.Token(), "deadline": until(lease.Remaining)})
}

func (w *worker) resume(o order) error {
	options := pgfence.Options{TTL: ms(o.TTL), OnLost: told}
	lease, err := w.fence.Resume(context.Background(), o.Name, o.Token, options)
	if err == nil {
		w.isAcquired(lease)
	}
	return err
}

func (w *worker) detach() error {
	return w.with(func(lease pgfence.Holding) error {
		token, err := lease.(*pgfence.Lease).Detach()
		if err == nil {
			say("detached", said{"token": token})
		}
		return err
	}, "")
}

// The leases of hold and claim

func (w *worker) holdAll(o order) error {
	for _, name := range o.Names {
		lease, err := w.fence.Acquire(context.Background(), name, pgfence.Options{TTL: ms(o.TTL), OnLost: told})
		if errors.Is(err, pgfence.ErrLeaseTaken) {
			say("taken", nil)
			return nil
		}
		if err != nil {
			return err
		}
		w.crowd = append(w.crowd, lease)
	}
	w.sayHolding()
	return nil
}

func (w *worker) claim(o order) error {
	options := pgfence.Options{TTL: ms(o.TTL), OnLost: told}
	leases, err := w.fence.Claim(context.Background(), "SELECT unnest($1::text[])", []any{o.Names}, o.N, options)
	if err != nil {
		return err
	}
	w.crowd = append(w.crowd, leases...)
	names := pgfence.Leases(leases).Names()
	if names == nil {
		names = []string{}
	}
	say("claimed", said{"names": names})
	return nil
}

func (w *worker) sayHolding() {
	count := 0
	for _, lease := range w.crowd {
		if lease.Held() {
			count++
		}
	}
	say("holding", said{"count": count})
}

func (w *worker) releaseAll() {
	_ = w.crowd.Release()
	w.crowd = nil
}

func (w *worker) adopt(o order) error {
	options := pgfence.AdoptOptions{Wait: ms(o.Wait)}
	adopted, err := w.fence.Adopt(context.Background(), o.Name, o.Token, options)
	if errors.Is(err, pgfence.ErrLeaseTaken) {
		say("taken", nil)
		return nil
	}
	if err != nil {
		return err
	}
	w.hold(adopted)
	say("adopted", said{"token": adopted.Token()})
	return nil
}

// write is a whole transaction; with Release, the last one.
func (w *worker) write(lease pgfence.Holding, o order) error {
	return w.transaction(lease, o.By, func(ctx context.Context, tx pgx.Tx) error {
		return update(ctx, tx, o.Value)
	}, pgfence.Last(o.Release))
}

// transaction runs one on a connection of its own.
func (w *worker) transaction(
	lease pgfence.Holding, by string, work func(context.Context, pgx.Tx) error, last ...pgfence.Last,
) error {
	conn, err := pgx.Connect(context.Background(), w.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	if by == "present" {
		return pgfence.Present(context.Background(), lease, conn.Begin, work, last...)
	}
	return pgfence.Guard(context.Background(), lease, conn.Begin, work, last...)
}

func update(ctx context.Context, tx pgx.Tx, value string) error {
	_, err := tx.Exec(ctx, "UPDATE work SET value = $1 WHERE id = 1", value)
	return err
}

// unfenced is a write that knows nothing of leases.
func (w *worker) unfenced(value string) error {
	conn, err := pgx.Connect(context.Background(), w.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	// Outside of a transaction a pooler may have what is prepared and what is executed meet two servers.
	const write = "UPDATE work SET value = $1 WHERE id = 1"
	if _, err = conn.Exec(context.Background(), write, pgx.QueryExecModeSimpleProtocol, value); err == nil {
		say("wrote", nil)
	}
	return err
}

var errRolledBack = errors.New("rolled back, as told")

// steps are a transaction of what it reads, until "commit" or "rollback".
func (w *worker) steps(lease pgfence.Holding, by string) error {
	begun := map[string]string{"guard": "guarded", "present": "presented"}[by]
	err := w.transaction(lease, by, func(ctx context.Context, tx pgx.Tx) error {
		w.work.Store(tx.Conn())
		defer w.work.Store(nil)
		say(begun, nil)
		for {
			if isDone, err := step(ctx, tx); isDone || err != nil {
				return err
			}
		}
	})
	switch {
	case errors.Is(err, errRolledBack):
		say("rolled-back", nil)
		return nil
	case err == nil:
		say("committed", nil)
	}
	return err
}

func step(ctx context.Context, tx pgx.Tx) (isDone bool, err error) {
	switch o, _ := read(); o.Do {
	case "update":
		if err = update(ctx, tx, o.Value); err == nil {
			say("updated", nil)
		}
		return false, err
	case "sleep":
		// In the server, so that the work hangs in its connection.
		if _, err = tx.Exec(ctx, "SELECT pg_sleep($1)", float64(o.Ms)/1000); err == nil {
			say("slept", nil)
		}
		return false, err
	case "commit":
		return true, nil
	default:
		return true, errRolledBack
	}
}

func (w *worker) lead(o order) {
	options := pgfence.Options{TTL: ms(o.TTL), OnLost: told}
	w.background.Go(func() {
		err := w.fence.Lead(w.ctx, o.Name, options, func(ctx context.Context, lease *pgfence.Lease) error {
			w.hold(lease)
			say("leading", said{"token": lease.Token(), "deadline": until(lease.Remaining)})
			<-ctx.Done()
			return ctx.Err()
		})
		if w.ctx.Err() == nil {
			say("stopped", said{"message": fmt.Sprint(err)})
		}
	})
	say("done", nil)
}

func (w *worker) observe(o order) {
	w.background.Go(func() {
		_ = w.fence.Observe(w.ctx, o.Name, func(leader pgfence.Leader) {
			if leader.Token == 0 {
				say("leader", said{"name": o.Name, "holder": nil, "token": nil})
			} else {
				say("leader", said{"name": o.Name, "holder": leader.Holder, "token": leader.Token})
			}
		})
	})
	say("done", nil)
}

func (w *worker) close() {
	w.stop()
	w.background.Wait()
	if lease := w.held(); lease != nil {
		_ = lease.Release()
		w.hold(nil)
	}
	w.releaseAll()
	say("closed", nil)
}

// hooks watch the leases, and build in what is planted.
func (w *worker) hooks() (hooks.Hooks, error) {
	made := hooks.None()
	made.Renewed = func(name string, token int64, remaining func() time.Duration) {
		// Those of hold and claim are not told.
		if lease := w.held(); lease != nil && lease.Names()[0] == name {
			say("renewed", said{"token": token, "deadline": until(remaining)})
		}
	}
	made.IsStarved = w.starved.Load
	switch w.plant {
	case "":
	case "deadline-from-answer":
		made.CountsFrom = func(_, after time.Duration) time.Duration { return after }
	case "error-is-loss":
		made.Renew = func(renew func() ([]*int64, error), _ []string, _ []int64) ([]*int64, error) {
			tokens, err := renew()
			if err != nil {
				return nil, &pgconn.PgError{Code: "42501", Message: err.Error()}
			}
			return tokens, nil
		}
	case "renew-in-work":
		made.Renew = func(renew func() ([]*int64, error), names []string, tokens []int64) ([]*int64, error) {
			conn := w.work.Load()
			if conn == nil {
				return renew()
			}
			var renewed *int64
			err := conn.QueryRow(context.Background(), "SELECT lease_renew($1, $2)", names[0], tokens[0]).Scan(&renewed)
			return []*int64{renewed}, err
		}
	case "one-null-loses-all":
		made.Renew = func(renew func() ([]*int64, error), _ []string, _ []int64) ([]*int64, error) {
			tokens, err := renew()
			if slices.Contains(tokens, nil) {
				clear(tokens)
			}
			return tokens, err
		}
	case "one-lock-stops-all":
		made.Renew = func(renew func() ([]*int64, error), _ []string, _ []int64) ([]*int64, error) {
			tokens, err := renew()
			if err != nil {
				err = errors.New(err.Error())
			}
			return tokens, err
		}
	case "hang-hides-loss":
		made.Watch = func(func()) {}
	case "adopts-late":
		made.Adopt = func(func() (*int64, error)) (*int64, error) { return new(int64), nil }
	case "adopts-once":
		made.AdoptsAgain = func() bool { return false }
	default:
		return made, fmt.Errorf("there is no plant %q", w.plant)
	}
	return made, nil
}
