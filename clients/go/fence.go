// Package pgfence keeps leases with fencing tokens of the PostgreSQL extension pg_fence.
//
// All leases of a [Fence] are kept by one heartbeat on one connection. [Lease.Guard] and
// [Lease.GuardSQL] run the transactions that write, of pgx 5 or of database/sql with any driver,
// and present the lease's token in them. A loss is reported by the deadline at the latest, whatever
// hangs: then the contexts of the lease's work and of its transactions end.
package pgfence

import (
	"cmp"
	"context"
	"crypto/rand"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Fence acquires leases and keeps them. A process needs one fence. It has a connection and a timer
// only while it holds leases. Its methods may be called from any goroutine.
type Fence struct{ h *heartbeat }

// Source says how a fence connects: a connection string, as a URL or in key=value form; a pool,
// whose configuration the fence takes, but none of its connections; or a function that opens a
// connection.
type Source interface {
	string | *pgxpool.Pool | func(context.Context) (Conn, error)
}

// Setting is an option of [New].
type Setting func(*heartbeat)

// InSchema names the extension's schema, which need not be on the search_path then.
func InSchema(name string) Setting {
	return func(h *heartbeat) { h.schema = schema(pgx.Identifier{name}.Sanitize() + ".") }
}

// OnEvent has a function called at each [Event] of the leases, in the order of the events and in a
// goroutine of its own. The function must not block, as the answers to acquires come after it: an
// Acquire of this fence in it lasts until its context ends.
func OnEvent(handle func(Event)) Setting { return func(h *heartbeat) { h.onEvent = handle } }

// New returns a fence. It connects when it acquires the first lease, and that acquire returns the
// error if the source is wrong.
func New[S Source](source S, settings ...Setting) *Fence {
	h := newHeartbeat(opener(source))
	for _, set := range settings {
		set(h)
	}
	return &Fence{h}
}

// Options are the options of an acquire. All of them may be left out.
type Options struct {
	// TTL is how long the lease is held without a renewal: at least 100 ms, and 30 s by default.
	TTL time.Duration
	// Wait is how long to wait for a lease that another holder has: 1 ms or more, or 0.
	Wait time.Duration
	// Holder is shown in the view of all leases. By default it is unique for each call.
	Holder string
	// Reclaim takes the lease over at once if this Holder, which must be given, has it already.
	Reclaim bool
	// Session ends the lease with its connection, too. It needs a connection without a pooler in
	// transaction mode.
	Session bool
	// Shared lets other shared holders have the lease at the same time.
	Shared bool
	// Slots is how many may have the lease at the same time; 0 is 1.
	Slots int
	// Metadata is shown in the view of all leases, as JSON.
	Metadata any
	// AtMost is how long the lease is held at most, whatever its heartbeat does, for work that
	// hangs. It is 1 ms or more, or 0 for no limit.
	AtMost time.Duration
}

// acquire checks the options, and fills in the defaults.
func (o Options) acquire(names []string) (*acquire, error) {
	o.TTL, o.Slots = cmp.Or(o.TTL, 30*time.Second), cmp.Or(o.Slots, 1)
	switch {
	case o.TTL < 100*time.Millisecond, o.Wait < 0, o.Wait > 0 && o.Wait < time.Millisecond,
		o.AtMost < 0, o.AtMost > 0 && o.AtMost < time.Millisecond:
		// A number without a unit is nanoseconds in Go.
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
	return &acquire{names: names, acquireArgs: acquireArgs{
		Names: names, TTL: o.TTL.Milliseconds(), Wait: o.Wait.Milliseconds(),
		Holder: cmp.Or(o.Holder, newHolder()), Named: o.Holder != "", Reclaim: o.Reclaim,
		Session: o.Session, Shared: o.Shared, Slots: o.Slots, AtMost: o.AtMost.Milliseconds(),
		Metadata: o.Metadata,
	}}, nil
}

// newHolder returns a holder that is unique for each call.
func newHolder() string {
	host, _ := os.Hostname()
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), rand.Text()[:8])
}

// processHolder is the default holder of adopted leases: all fences of this process are one holder.
var processHolder = newHolder()

// Work is a function that works under a lease. Its context ends with the caller's, and at a loss of
// the lease: use it for every call that takes a context.
type Work = func(context.Context, *Lease) error

// Lease acquires a lease, does the work under it, and releases it. Its errors are those of
// [Fence.Acquire] and [Lease.Do].
func (f *Fence) Lease(ctx context.Context, name string, options Options, work Work) error {
	lease, err := f.Acquire(ctx, []string{name}, options)
	if err != nil {
		return err
	}
	return lease.Do(ctx, work)
}

// Acquire acquires a lease, of several names all or none. Its errors are an [Error] of the kinds
// [LeaseTaken], [LeaseLost] (granted, and lost before the answer), [NoConnection], [NoAnswer],
// [NotGranted], [NotInstalled], [Refused] and [Closed], and an error of wrong options.
//
// The context is for the acquire alone: if it ends first, its error is returned, and a grant that
// comes all the same is released. A wait goes on through an outage. If the outage hides whether
// several names, a shared lease or a slot were granted, the wait ends with [NoAnswer], and a grant
// is released. Several names have no queue: they are tried each quarter of a second until Wait is
// over, and may starve beside waiters for each name.
//
// Then call [Lease.Do]; or watch [Lease.Lost], and defer [Lease.Release].
func (f *Fence) Acquire(ctx context.Context, names []string, options Options) (*Lease, error) {
	a, err := options.acquire(names)
	if err != nil {
		return nil, err
	}
	return f.h.acquire(ctx, a)
}

// RowOptions are the options of [Fence.KeepRow].
type RowOptions struct {
	TTL, AtMost time.Duration // as in [Options]
	Fence       string        // the column of the token: fence by default
	Deadline    string        // the column of the deadline: held_until by default
}

// KeepRow keeps a row of a table whose rows are leases. A statement of the program has claimed the
// row, and returned its token; key has the columns of the row's key and their values, as a driver
// takes them. The row is renewed at once, for its TTL; the error is [LeaseLost] if another holder has
// claimed it meanwhile. Finish the row in a [Holding.Guard] with [Releasing].
//
// The table is named as in SQL. It needs its schema if the connections of the fence, or those of
// guards, have another search_path.
func (f *Fence) KeepRow(
	ctx context.Context, table string, key map[string]any, token int64, options RowOptions,
) (*Lease, error) {
	values, described := []string{}, rowTable{
		table, slices.Sorted(maps.Keys(key)), cmp.Or(options.Fence, "fence"),
		cmp.Or(options.Deadline, "held_until"),
	}
	for _, column := range described.Columns {
		value, err := keyText(key[column])
		if err != nil {
			return nil, fmt.Errorf("pgfence: the value of %s in the key: %w", column, err)
		}
		values = append(values, value)
	}
	row, _ := json.Marshal(values)
	tableJSON, _ := json.Marshal(described)
	a, err := Options{TTL: options.TTL, AtMost: options.AtMost}.acquire([]string{string(row)})
	if err != nil {
		return nil, err
	}
	a.names, a.Table, a.Token = []string{table, string(row)}, string(tableJSON), token
	return f.h.acquire(ctx, a)
}

// keyText returns a value of a key as the server reads it.
func keyText(value any) (string, error) {
	switch v := value.(type) {
	case time.Time, *time.Time, driver.Valuer:
	case [16]byte: // a UUID
		return fmt.Sprintf("%x", v), nil
	case fmt.Stringer, uint, uint64: // a driver.Value has no large uint64
		return fmt.Sprint(v), nil
	}
	converted, err := driver.DefaultParameterConverter.ConvertValue(value)
	switch v := converted.(type) {
	case nil:
		return "", cmp.Or(err, errors.New("it is NULL"))
	case []byte:
		return fmt.Sprintf(`\x%x`, v), nil
	case time.Time:
		return v.Format(time.RFC3339Nano), nil
	}
	return fmt.Sprint(converted), nil
}

// Lead runs the work whenever this process leads, and again after each loss of the lease, of the
// server, of a connection or of a transaction. It ends when the work returns nil or an error of its
// own, or when an acquire has an error that no other attempt can mend, and returns that error. It
// also ends with the context, and the work's context ends then, too. In each case it waits for the
// work, and releases the lease after it.
//
// After a loss it pauses for a growing time, and acquires the lease again. An outage writes one
// line to the log, and emits one [Event]. A ttl of 0 is 30 s.
func (f *Fence) Lead(ctx context.Context, name string, ttl time.Duration, work Work) error {
	a, err := Options{TTL: ttl, Wait: math.MaxInt64}.acquire([]string{name})
	if err != nil {
		return err
	}
	// If the answer to an acquire was lost, the next acquire takes the grant over.
	a.Reclaim = true
	lead := &leadState{ttl: a.TTL, jitter: f.h.states.jitter}
	for ctx.Err() == nil {
		var lease *Lease
		again := *a
		if lease, err = f.h.acquire(ctx, &again); err == nil {
			lead.granted(clock())
			err = lease.Do(ctx, work)
		}
		if err == nil {
			return nil
		}
		failure := leadFailure{
			IsLost: lease != nil && lease.lossError() != nil, IsStopped: ctx.Err() != nil,
			IsClosed: f.h.isClosing(),
		}
		failure.Kind, failure.Code = typeOf(err)
		for _, e := range lead.failed(clock(), failure) {
			switch {
			case e.Log != "":
				line := name + " " + e.Log + ", and it is tried again"
				f.h.input(0, func() { f.h.warn(line, "reason", err) })
			case e.Event != "":
				f.h.input(0, func() { f.h.emit(Event{Kind: e.Event, Names: []string{name}}) })
			case e.Lead == "end":
				return err
			default:
				select {
				case <-ctx.Done():
				case <-time.After(span(e.Pause)):
				}
			}
		}
	}
	return cmp.Or(err, ctx.Err())
}

// typeOf returns the kind and the code of an error as leadState takes them.
func typeOf(err error) (Kind, string) {
	var fenceErr *Error
	switch {
	case !errors.As(err, &fenceErr):
		return "", codeOf(err)
	case fenceErr.Kind == NoConnection && fenceErr.cause != nil:
		return NoConnection, openingCode(fenceErr.cause)
	}
	return fenceErr.Kind, codeOf(err)
}

// Adopted returns a lease that another system grants (etcd, ZooKeeper, Redis, another database),
// with the number that it has there as its token. It has no heartbeat, and nothing to close. A
// number belongs to one holder, which is this process unless a holder is given: a guard returns
// [LeaseTaken] if another holder has adopted the number.
func (f *Fence) Adopted(name string, token int64, holder ...string) *Holding {
	holder = append(holder, processHolder)
	return &Holding{h: f.h, names: []string{name}, token: token, holder: cmp.Or(holder...)}
}

// Close releases all leases, and ends all waits with [Closed]. It takes 5 s at most. Call it before
// the process ends, so that nobody waits for the end of a ttl.
func (f *Fence) Close() {
	f.h.input(0, f.h.states.close)
	<-f.h.closed
}

// Lease is a lease that is held until it is released or lost, also if the program has no reference
// to it any more. Its methods may be called from any goroutine.
type Lease struct {
	Holding
	key       string
	tableJSON string // of a row lease, its rowTable
	// endError is set when the lease is lost or released. Then ended is closed; at a loss, the
	// context loss ends, too.
	endError atomic.Pointer[Error]
	loss     context.Context
	lose     context.CancelCauseFunc
	ended    chan struct{}
	// isUsed is true from the call of Do on.
	isUsed atomic.Bool
	// renewed is closed at the next renewal, or nil if nothing waits for that. The heartbeat's lock
	// guards it.
	renewed chan struct{}
}

// newLease returns the lease of an acquire, at its event acquired.
func (h *heartbeat) newLease(a *acquire, e effect) *Lease {
	l := &Lease{
		Holding: Holding{h: h, names: a.names, token: e.Token},
		key:     e.Key, tableJSON: a.Table, ended: make(chan struct{}),
	}
	a.lease = l
	l.leases = Leases{l}
	l.loss, l.lose = context.WithCancelCause(context.Background())
	return l
}

func (l *Lease) end(endError *Error) {
	if l.endError.CompareAndSwap(nil, endError) {
		if endError.Reason != ReasonReleased {
			l.lose(endError)
		}
		close(l.ended)
	}
}

// Held reports whether this process holds the lease now, by its own clock.
func (l *Lease) Held() bool { return l.Remaining() > 0 }

// Remaining returns how long this process holds the lease if no further renewal succeeds.
func (l *Lease) Remaining() time.Duration {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	return span(l.h.states.remaining(clock(), l.key))
}

// Check returns an [Error] of the kind [LeaseLost] if the lease is not held. It does not depend on
// the heartbeat. Call it in long steps, and before each call to the outside.
func (l *Lease) Check() error {
	if l.Held() {
		return nil
	}
	reason := ReasonReleased
	l.h.input(0, func() {
		if l.h.states.isOver(clock(), l.key) {
			reason = ReasonDeadline
		}
	})
	if endError := l.endError.Load(); endError != nil {
		return endError
	}
	return newLeaseLost(reason, "", l.names...)
}

// Lost returns a channel that is closed when the lease is lost, by its deadline at the latest. A
// release does not close it.
func (l *Lease) Lost() <-chan struct{} { return l.loss.Done() }

// Do does the work, and releases the lease, also if the work panics. The work's context ends with
// ctx, and at a loss. Do returns the work's error. It returns [LeaseLost] if the lease was lost and
// the work has no error, or only that its context has ended. It is called once for a lease; if the
// lease has ended already, the work does not begin.
func (l *Lease) Do(ctx context.Context, work Work) (err error) {
	if l.isUsed.Swap(true) {
		return errors.New("pgfence: Do was called for this lease already, and releases it at its end")
	}
	if err := l.Check(); err != nil {
		_ = l.Release()
		return err
	}
	until, end := untilLoss(ctx, l.leases)
	defer func() {
		end()
		loss := l.Release()
		if err == nil || errors.Is(err, context.Canceled) && ctx.Err() == nil && loss != nil {
			err = loss
		}
	}()
	return work(until, l)
}

// Release releases the lease, and returns an [Error] of the kind [LeaseLost] if it was lost. It
// takes no context, so that it works after the end of the caller's. It returns nil if the server
// cannot be reached: then the lease ends at its ttl.
func (l *Lease) Release() error { return l.leases.Release() }

// lossError returns why the lease is lost, or nil if it is not lost.
func (l *Lease) lossError() error {
	if endError := l.endError.Load(); endError != nil && endError.Reason != ReasonReleased {
		return endError
	}
	return nil
}

// Leases are several leases, as [Fence.Guard] takes them.
type Leases []*Lease

// Release releases the leases, and returns an [Error] of the kind [LeaseLost] for the first one
// that was lost.
func (l Leases) Release() (err error) {
	for _, lease := range l {
		lease.h.input(0, func() { lease.h.states.release(lease.key) })
	}
	for _, lease := range l {
		<-lease.ended
		err = cmp.Or(err, lease.lossError())
	}
	return err
}

func (l Leases) keys() (keys []string) {
	for _, lease := range l {
		keys = append(keys, lease.key)
	}
	return keys
}
