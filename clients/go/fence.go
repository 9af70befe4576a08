// Package pgfence keeps leases with fencing tokens of the PostgreSQL extension pg_fence.
//
// All leases of a [Fence] are kept by one heartbeat on one connection. [Lease.Guard] and
// [Lease.GuardSQL] run the transactions that write, of pgx 5 or of database/sql with any driver,
// and put the lease's token into them. A loss is told by the deadline at the latest, whatever
// hangs: the contexts of the lease's work and of its transactions end.
package pgfence

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Fence is where leases come from: one for a process. It has a connection, and a timer, while
// leases of it are held, and none otherwise. Its methods may be called from any goroutine.
type Fence struct{ h *heartbeat }

// Source is what a fence can be made from: a connection string, as a URL or in key=value form; a
// pool, like whose connections the fence's own is, which is not taken from it; or a function that
// opens a connection.
type Source interface {
	string | *pgxpool.Pool | func(context.Context) (Conn, error)
}

// Setting is how a fence is made otherwise.
type Setting func(*heartbeat)

// InSchema names the extension's schema, where that is not on the search_path.
func InSchema(name string) Setting {
	return func(h *heartbeat) { h.schema = schema(pgx.Identifier{name}.Sanitize() + ".") }
}

// OnEvent is told what becomes of leases, in whatever goroutine it happens. It must not block.
func OnEvent(tell func(Event)) Setting { return func(h *heartbeat) { h.onEvent = tell } }

// New makes a fence. It connects when the first lease is asked for, which tells, too, what is wrong
// with the source.
func New[S Source](source S, settings ...Setting) *Fence {
	h := newHeartbeat(opener(source))
	for _, set := range settings {
		set(h)
	}
	return &Fence{h}
}

// Options are how a lease is asked for.
type Options struct {
	TTL      time.Duration // how long it is held without a renewal: 30 s unless given, 100 ms or more
	Wait     time.Duration // how long to wait for it, where somebody else has it
	Holder   string        // is shown in the view of all leases; else it is unique for each call
	Reclaim  bool          // where that Holder has it already, it gets a new grant at once
	Session  bool          // it ends with its connection, too; no pooler in transaction mode then
	Shared   bool          // others may have it shared at the same time
	Slots    int           // how many may have it at the same time; 0 is 1
	Metadata any           // is shown in the view, too, as JSON
	AtMost   time.Duration // then it is lost, whatever its heartbeat does: for work that hangs
}

// acquire looks them over, and fills in what is missing.
func (o Options) acquire(names []string) (*acquire, error) {
	o.TTL, o.Slots = cmp.Or(o.TTL, 30*time.Second), cmp.Or(o.Slots, 1)
	switch {
	case o.TTL < 100*time.Millisecond, o.Wait < 0, o.Wait > 0 && o.Wait < time.Millisecond,
		o.AtMost < 0, o.AtMost > 0 && o.AtMost < time.Millisecond:
		// To Go a number is nanoseconds.
		return nil, fmt.Errorf("pgfence: TTL %v is below 100ms, or Wait %v or AtMost %v below 1ms: "+
			"a number without its unit?", o.TTL, o.Wait, o.AtMost)
	case o.Reclaim && o.Holder == "":
		return nil, errors.New("pgfence: Reclaim takes a Holder: whose lease is it?")
	case len(names) > 1 && (o.Shared || o.Slots > 1 || o.Reclaim):
		return nil, errors.New("pgfence: several names at once are exclusive: " +
			"no Shared, Slots or Reclaim")
	}
	if o.Metadata != nil {
		text, err := json.Marshal(o.Metadata)
		if err != nil {
			return nil, fmt.Errorf("pgfence: Metadata has no JSON: %w", err)
		}
		o.Metadata = string(text)
	}
	return &acquire{names: names, options: o, acquireArgs: acquireArgs{
		Names: names, TTL: o.TTL.Milliseconds(), Wait: o.Wait.Milliseconds(),
		Holder: cmp.Or(o.Holder, newHolder()), Named: o.Holder != "", Reclaim: o.Reclaim,
		Session: o.Session, Shared: o.Shared || o.Slots > 1, AtMost: o.AtMost.Milliseconds(),
	}}, nil
}

// newHolder is a text that is unique for each call.
func newHolder() string {
	host, _ := os.Hostname()
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), rand.Text()[:8])
}

// process is the holder that adopts where none is named: all fences of this process are one holder.
var process = newHolder()

// Work is what is done under a lease. Its context ends with the caller's, and at a loss: use it for
// whatever takes one.
type Work = func(context.Context, *Lease) error

// Lease does the work under the lease, and gives it back: [Fence.Acquire], then [Lease.Do].
func (f *Fence) Lease(ctx context.Context, name string, options Options, work Work) error {
	lease, err := f.Acquire(ctx, []string{name}, options)
	if err != nil {
		return err
	}
	return lease.Do(ctx, work)
}

// Acquire takes a lease, of several names all or none, or returns an [Error] of the kind
// [LeaseTaken]. The context is for the acquire alone: where it ends first, its error is returned,
// and a grant that comes all the same is given back. A wait goes on through an outage; where that
// hides whether several names, a shared lease or a slot were granted, it ends with [NoAnswer], and
// what was is given back. Several names have no queue: they are tried each quarter of a second, and
// may starve beside waiters for each, until Wait is over.
//
// Then [Lease.Do] the work; or look at [Lease.Lost], and defer [Lease.Release].
func (f *Fence) Acquire(ctx context.Context, names []string, options Options) (*Lease, error) {
	a, err := options.acquire(names)
	if err != nil {
		return nil, err
	}
	return f.h.acquire(ctx, a)
}

// RowOptions are how a row is kept.
type RowOptions struct {
	TTL, AtMost time.Duration // as in [Options]
	Fence       string        // the column of the token: fence, unless it is given
	Deadline    string        // that of the deadline: held_until, unless it is given
}

// KeepRow keeps a row of a table whose rows are leases of their own, which a statement of yours has
// claimed: by the columns of its key and their values, under the token that the statement returned.
// It is renewed at once, for its TTL, and is [LeaseLost] if somebody else has it by now. Finish the
// row in a [Holding.Guard] with [Releasing].
//
// The table is named as in SQL, with its schema where the fence's connections, or those of guards,
// have another search_path.
func (f *Fence) KeepRow(
	ctx context.Context, table string, key map[string]any, token int64, options RowOptions,
) (*Lease, error) {
	values, of := []string{}, rowTable{
		table, slices.Sorted(maps.Keys(key)), cmp.Or(options.Fence, "fence"),
		cmp.Or(options.Deadline, "held_until"),
	}
	for _, column := range of.Columns {
		values = append(values, fmt.Sprint(key[column]))
	}
	row, _ := json.Marshal(values)
	named, _ := json.Marshal(of)
	a, err := Options{TTL: options.TTL, AtMost: options.AtMost}.acquire([]string{string(row)})
	if err != nil {
		return nil, err
	}
	a.names, a.table, a.token = []string{table, string(row)}, string(named), token
	return f.h.acquire(ctx, a)
}

// Lead runs the work whenever this process leads, and again after each loss: of the lease, the
// server, the connection, the transaction. It ends when the work returns nil or an error of its
// own, which it returns; and with the context, at which the work's ends, too. It waits for the work
// in any case, and gives the lease back after it. What it goes on after is a line of the log and an
// event, once an outage, with a growing pause. A ttl of 0 is 30 s.
func (f *Fence) Lead(ctx context.Context, name string, ttl time.Duration, work Work) error {
	a, err := Options{TTL: ttl, Wait: math.MaxInt64}.acquire([]string{name})
	if err != nil {
		return err
	}
	// If the answer to an acquire was lost, its own holder takes the grant over.
	a.Reclaim = true
	d := &leadState{ttl: a.TTL, jitter: f.h.states.jitter}
	effects := d.start()
	for {
		var pause time.Duration
		for _, e := range effects {
			switch {
			case e.Log != "":
				slog.Warn("pgfence: "+name+" "+e.Log+", and it is tried again", "reason", err)
			case e.Event != "":
				f.h.input(0, func() { f.h.tells(Event{Kind: e.Event, Names: []string{name}}) })
			case e.Lead == "pause":
				pause = span(e.Pause)
			case e.Lead == "end":
				return err
			}
		}
		select {
		case <-ctx.Done():
			return cmp.Or(err, ctx.Err())
		case <-time.After(pause):
		}
		var lease *Lease
		again := *a
		if lease, err = f.h.acquire(ctx, &again); err == nil {
			d.granted(clock())
			err = lease.Do(ctx, work)
		}
		if err == nil || ctx.Err() != nil {
			return err
		}
		effects = d.failed(clock(), causeOf(err), lease != nil && lease.lost() != nil)
	}
}

// causeOf is what a leader goes on after, or not.
func causeOf(err error) string {
	state := stateOf(err)
	var told *Error
	isTold := errors.As(err, &told)
	switch {
	case isAnyOf(err, LeaseLost, LeaseTaken, TransactionLost, NoAnswer):
		return "LeaseLost"
	case isTold && told.Kind == NoConnection &&
		(told.cause == nil || codeOfOpening(told.cause) == "connect"):
		return "NoConnection"
	case hasAnyPrefix(state, "PF001", "PF004"):
		// The next renewal tells.
		return "LeaseLost"
	case sessionEnded(err):
		return "ConnectionLost"
	case isTransient(state):
		return "transient"
	}
	return "own"
}

// Adopted is a lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under
// the number that it has there. It has no heartbeat, and nothing to close. A number is that of one
// holder, which is this process unless another holder is named: a guard is [LeaseTaken] where
// another holder has adopted the number.
func (f *Fence) Adopted(name string, token int64, holder ...string) *Holding {
	holder = append(holder, process)
	return &Holding{h: f.h, names: []string{name}, token: token, holder: cmp.Or(holder...)}
}

// Close gives everything back, and ends all waits. It belongs where the process ends; then nobody
// waits for a ttl.
func (f *Fence) Close() {
	f.h.input(0, f.h.states.close)
	<-f.h.closed
}

// Lease is one that is held, until it is released or lost, also where nobody refers to it any more.
// Its methods may be called from any goroutine.
type Lease struct {
	Holding
	key   string
	table string // of a row lease, the JSON of its rowTable
	// over is why it is: lost, or released. At a loss, loss ends; at either, ended is closed.
	over  atomic.Pointer[Error]
	loss  context.Context
	lose  context.CancelCauseFunc
	ended chan struct{}
	// The heartbeat's lock guards it: it is closed at the next renewal, where somebody waits for
	// that.
	renewed chan struct{}
}

// newLease is called at "acquired".
func (h *heartbeat) newLease(of *acquire, e effect) *Lease {
	l := &Lease{
		Holding: Holding{h: h, names: of.names, token: e.Token},
		key:     e.Key, table: of.table, ended: make(chan struct{}),
	}
	of.lease = l
	l.leases = Leases{l}
	l.loss, l.lose = context.WithCancelCause(context.Background())
	return l
}

func (l *Lease) ends(over *Error) {
	if l.over.CompareAndSwap(nil, over) {
		if over.Reason != ReasonReleased {
			l.lose(over)
		}
		close(l.ended)
	}
}

// Held tells whether it is ours at this moment, by our own clock.
func (l *Lease) Held() bool { return l.Remaining() > 0 }

// Remaining is how long it is ours if no renewal comes through any more.
func (l *Lease) Remaining() time.Duration {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	return span(l.h.states.remaining(clock(), l.key))
}

// Check is an [Error] of the kind [LeaseLost] once the lease is ours no more, whatever the
// heartbeat does: for long steps, and before each call to the outside.
func (l *Lease) Check() error {
	if l.Held() {
		return nil
	}
	l.h.input(0, func() {})
	if over := l.over.Load(); over != nil {
		return over
	}
	return lostBy(ReasonReleased, "", l.names...)
}

// Lost is closed at a loss, by the deadline at the latest.
func (l *Lease) Lost() <-chan struct{} { return l.loss.Done() }

// Do does the work, and gives the lease back. The work's context ends with ctx, and at a loss. The
// error is the work's; where that has none, or only tells the end of its context, it is [LeaseLost]
// if the lease was lost.
func (l *Lease) Do(ctx context.Context, work Work) (err error) {
	until, end := untilLoss(ctx, l.leases)
	// Also where the work panics.
	defer func() {
		end()
		loss := l.Release()
		if err == nil || errors.Is(err, context.Canceled) && ctx.Err() == nil && loss != nil {
			err = loss
		}
	}()
	return work(until, l)
}

// Release gives it back, and is an [Error] of the kind [LeaseLost] if it was lost. It takes no
// context, so that it works when yours has ended. It is no error where the server cannot be
// reached: then the lease ends at its ttl.
func (l *Lease) Release() error { return l.leases.Release() }

// lost is nil where it is not lost.
func (l *Lease) lost() error {
	if over := l.over.Load(); over != nil && over.Reason != ReasonReleased {
		return over
	}
	return nil
}

// Leases are several that are held, for [Fence.Guard].
type Leases []*Lease

// Release gives back what is left of them, and is an [Error] of the kind [LeaseLost] for the first
// that was lost.
func (l Leases) Release() (err error) {
	for _, lease := range l {
		lease.h.input(0, func() { lease.h.states.release(lease.key) })
	}
	for _, lease := range l {
		<-lease.ended
		lease.h.mu.Lock()
		delete(lease.h.leases, lease.key)
		lease.h.mu.Unlock()
		err = cmp.Or(err, lease.lost())
	}
	return err
}

func (l Leases) keys() (keys []string) {
	for _, lease := range l {
		keys = append(keys, lease.key)
	}
	return keys
}
