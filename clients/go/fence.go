// Package pgfence keeps leases with fencing tokens of the PostgreSQL extension pg_fence.
//
// All leases of a [Fence] are kept by one heartbeat on one connection. [Lease.Guard] and [Lease.GuardSQL] run the
// transactions that write, of pgx 5 or of database/sql with any driver, and put the lease's token into them. A loss is told by
// the deadline at the latest, whatever hangs: the contexts of the lease's work and of its transactions end.
package pgfence

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Fence is where leases come from: one for a process. It has a connection, and a timer, while leases of it are held, and none
// otherwise. Its methods may be called from any goroutine.
type Fence struct{ k *keeper }

// Source is what a fence can be made from: a connection string, as a URL or in key=value form; a pool, like whose connections
// the fence's own is, which is not taken from it; or a function that opens a connection.
type Source interface {
	string | *pgxpool.Pool | func(context.Context) (Conn, error)
}

// Setting is how a fence is made otherwise.
type Setting func(*keeper)

// InSchema names the extension's schema, where that is not on the search_path.
func InSchema(schema string) Setting {
	return func(k *keeper) { k.schema = pgx.Identifier{schema}.Sanitize() + "." }
}

// OnEvent is told what becomes of leases, in whatever goroutine it happens. It must not block.
func OnEvent(tell func(Event)) Setting { return func(k *keeper) { k.onEvent = tell } }

// New makes a fence. It connects when the first lease is asked for, which tells, too, what is wrong with the source.
func New[S Source](source S, settings ...Setting) *Fence {
	k := &keeper{line: &line{open: opener(source)}, leases: map[*Lease]struct{}{}, onEvent: func(Event) {}}
	k.open, k.close = context.WithCancel(context.Background())
	k.timer = time.AfterFunc(time.Hour, k.look)
	k.timer.Stop()
	for _, set := range settings {
		set(k)
	}
	return &Fence{k}
}

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
		// The server would refuse the setting that lib/pq takes for itself. Go's strings are UTF-8, whatever the role has set.
		delete(config.RuntimeParams, "binary_parameters")
		config.RuntimeParams["client_encoding"] = "UTF8"
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

// Options are how a lease is asked for.
type Options struct {
	TTL      time.Duration // how long it is held without a renewal: 30 s unless it is given, and at least 100 ms
	Wait     time.Duration // how long to wait for it, where somebody else has it
	Holder   string        // is shown in the view of all leases; unless it is given, it is unique for each call
	Reclaim  bool          // where that Holder has it already, it gets a new grant at once
	Session  bool          // it ends with the fence's connection, too; not through a pooler in transaction mode
	Shared   bool          // others may have it shared at the same time
	Slots    int           // how many may have it at the same time; 0 is 1
	Metadata any           // is shown in the view, too, as JSON
}

// complete looks them over, and fills in what is missing.
func (o Options) complete(names []string) (Options, error) {
	o.TTL, o.Slots = cmp.Or(o.TTL, 30*time.Second), cmp.Or(o.Slots, 1)
	switch {
	case o.TTL < 100*time.Millisecond, o.Wait < 0, o.Wait > 0 && o.Wait < time.Millisecond:
		// To Go a number is nanoseconds.
		return o, fmt.Errorf("pgfence: TTL %v is below 100ms, or Wait %v below 1ms: a number without its unit?", o.TTL, o.Wait)
	case o.Reclaim && o.Holder == "":
		return o, errors.New("pgfence: Reclaim takes a Holder: whose lease is it?")
	case len(names) > 1 && (o.Shared || o.Slots > 1 || o.Reclaim):
		return o, errors.New("pgfence: several names at once are exclusive: no Shared, Slots or Reclaim")
	}
	if o.Holder == "" {
		o.Holder = newHolder()
	}
	if o.Metadata != nil {
		text, err := json.Marshal(o.Metadata)
		if err != nil {
			return o, fmt.Errorf("pgfence: Metadata has no JSON: %w", err)
		}
		o.Metadata = string(text)
	}
	return o, nil
}

// newHolder is a text that is unique for each call.
func newHolder() string {
	host, _ := os.Hostname()
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), rand.Text()[:8])
}

// process is the holder that adopts where none is named: all fences of this process are one holder.
var process = newHolder()

// Work is what is done under a lease. Its context ends with the caller's, and at a loss: use it for whatever takes one.
type Work = func(context.Context, *Lease) error

// Lease does the work under the lease, and gives it back: [Fence.Acquire], then [Lease.Do].
func (f *Fence) Lease(ctx context.Context, name string, options Options, work Work) error {
	lease, err := f.Acquire(ctx, []string{name}, options)
	if err != nil {
		return err
	}
	return lease.Do(ctx, work)
}

// Acquire takes a lease, of several names all or none, or returns an [Error] of the kind [LeaseTaken]. The context is for the
// acquire alone: where it ends first, its error is returned, and a grant that comes all the same is given back.
//
// Then [Lease.Do] the work; or look at [Lease.Lost], and defer [Lease.Release].
func (f *Fence) Acquire(ctx context.Context, names []string, options Options) (*Lease, error) {
	options, err := options.complete(names)
	if err != nil {
		return nil, err
	}
	leases, err := f.k.acquire(ctx, names, options)
	if err == nil {
		// It may have ended already.
		err = leases[0].Check()
	}
	if err != nil {
		return nil, err
	}
	return leases[0], nil
}

// Claim takes the first n of these names that are free, in their order, as a lease each. It takes a TTL and a Holder.
func (f *Fence) Claim(ctx context.Context, names []string, n int, options Options) (Leases, error) {
	if options != (Options{TTL: options.TTL, Holder: options.Holder}) {
		return nil, errors.New("pgfence: Claim takes no options but TTL and Holder")
	}
	options, err := options.complete(names)
	if err != nil {
		return nil, err
	}
	return f.k.claim(ctx, names, n, options)
}

// Lead runs the work whenever this process leads, and again after each loss: of the lease, the server, the connection, the
// transaction. It ends when the work returns nil or an error of its own, which it returns; and with the context, at which
// the work's ends, too. It waits for the work in any case, and gives the lease back after it. A ttl of 0 is 30 s.
func (f *Fence) Lead(ctx context.Context, name string, ttl time.Duration, work Work) error {
	options, err := Options{TTL: ttl}.complete([]string{name})
	// If the answer to an acquire was lost, its own holder takes the grant over.
	options.Wait, options.Reclaim = forever, true
	for goesOn := err == nil; goesOn; {
		var lease *Lease
		var told *Error
		if lease, err = f.Acquire(ctx, []string{name}, options); err == nil {
			err = lease.Do(ctx, work)
			goesOn = lease.lost() != nil || errors.As(err, &told) && (told.SQLState == "PF001" || told.SQLState == "PF004")
		} else {
			// A server that is a standby still, or has no place or time.
			state := stateOf(err)
			goesOn = state != "" && strings.Contains("25 40 53 57 58", state[:2]) || state == "55P03"
		}
		goesOn = goesOn || sessionEnded(err) || isAnyOf(err, LeaseLost, LeaseTaken, TransactionLost, NoAnswer)
		if goesOn = goesOn && err != nil && ctx.Err() == nil; goesOn {
			select {
			case <-ctx.Done():
			case <-time.After(options.TTL / 12):
			}
		}
	}
	return err
}

// Adopted is a lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under the number that it has
// there. It has no heartbeat, and nothing to close. A number is that of one holder, which is this process unless another
// holder is named: a guard is [LeaseTaken] where another holder has adopted the number.
func (f *Fence) Adopted(name string, token int64, holder ...string) *Holding {
	return &Holding{k: f.k, names: []string{name}, token: token, holder: cmp.Or(append(holder, process)...)}
}

// Close gives everything back, and ends all waits. It belongs where the process ends; then nobody waits for a ttl.
func (f *Fence) Close() { f.k.endAll() }
