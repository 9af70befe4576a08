package pgfence

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"strconv"
	"sync"
	"time"
)

// Event is a change of a lease. Its Kind is "acquired", "renewed", "lost" or "released". A loss has
// a Reason; so has a release that the server has not answered ("unconfirmed"). "interrupted" is an
// event of [Fence.Lead]: this process leads no more, and will acquire again.
type Event struct {
	Kind  string
	Names []string
	Token int64
	// Remaining is how long the lease is held without another renewal.
	Remaining time.Duration
	Reason    Reason
}

// heartbeat keeps all leases of a fence. It has the clock, the timer and the connections: it gives
// the inputs to leaseStates, which decides, and carries out the effects.
type heartbeat struct {
	schema  schema
	open    func(context.Context) (Conn, error)
	onEvent func(Event)

	mu          sync.Mutex
	states      *leaseStates
	leases      map[string]*Lease
	acquires    map[string]*acquire
	connections map[int]*connection
	timer       *time.Timer
	checkedAt   time.Duration
	lastID      int
	closed      chan struct{}
	// ended has the names of the leases that the current input has ended, by the reason, for the log.
	ended map[Reason][]string
	// reports send the events, the replies and the log, in their order and without the lock.
	reports     []func()
	isReporting bool
}

// acquire is an acquire of a lease or of a row, and what its caller waits for.
type acquire struct {
	acquireArgs
	// names are those of the lease; of a row, the table and the key.
	names  []string
	answer chan effect
	lease  *Lease
	// cause is the error of the last call. After a failure, failed has an element.
	cause  error
	role   string
	failed chan struct{}
}

func newHeartbeat(open func(context.Context) (Conn, error)) *heartbeat {
	h := &heartbeat{
		open: open, states: newLeaseStates(rand.Int64N(1001)),
		leases: map[string]*Lease{}, acquires: map[string]*acquire{},
		connections: map[int]*connection{}, closed: make(chan struct{}),
		ended: map[Reason][]string{},
	}
	h.timer = time.AfterFunc(time.Hour, h.tick)
	h.timer.Stop()
	return h
}

// clock is now() in whole milliseconds.
func clock() int64 { return now().Milliseconds() }

// span converts milliseconds. A session lease may have more than a Duration can hold.
func span(ms int64) time.Duration {
	return time.Duration(min(ms, int64(1)<<62/int64(time.Millisecond))) * time.Millisecond
}

// input gives an input to the states, and carries out the effects. If the input answers a call, its
// number is answerTo, else 0.
func (h *heartbeat) input(answerTo int, decide func()) {
	h.mu.Lock()
	effects := h.states.step(clock(), answerTo, decide)
	clear(h.ended)
	for i := range effects {
		h.carryOut(&effects[i])
	}
	current := clock()
	if next := h.states.wake(current); next < never {
		h.timer.Reset(span(next - current))
	} else {
		h.timer.Stop()
	}
	if !h.isReporting {
		h.report()
	}
	h.mu.Unlock()
}

// report runs the first report in a goroutine of its own, and then the next, so that they stay in
// their order. A function of the program may block, take a lock that it holds while it calls the
// fence, or end the goroutine (runtime.Goexit, as t.FailNow does). The caller has the lock.
func (h *heartbeat) report() {
	if h.isReporting = len(h.reports) > 0; !h.isReporting {
		return
	}
	next := h.reports[0]
	h.reports = h.reports[1:]
	go func() {
		defer func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.report()
		}()
		recovered(next)
	}()
}

// recovered calls a function of the program, and logs its panic.
func recovered(call func()) {
	defer func() {
		if what := recover(); what != nil {
			// The log may be what has panicked.
			defer func() { _ = recover() }()
			slog.Error("pgfence: the function of OnEvent, or the log, has panicked", "panic", what)
		}
	}()
	call()
}

// tick is called by the timer. It also checks the idle connections, whose end nothing else shows.
func (h *heartbeat) tick() {
	h.input(0, func() {})
	h.mu.Lock()
	defer h.mu.Unlock()
	if current := now(); current-h.checkedAt >= checkInterval*time.Millisecond/2 {
		h.checkedAt = current
		// A call shows the end of its connection itself.
		for _, state := range h.states.connections {
			if c := h.connections[state.number]; c != nil && !state.isBusy {
				go h.checkConnection(c)
			}
		}
	}
}

func (h *heartbeat) checkConnection(c *connection) {
	if !c.use.TryLock() {
		return
	}
	hasEnded := c.hasEnded(0)
	c.use.Unlock()
	if hasEnded {
		h.input(0, func() {
			delete(h.connections, c.number)
			h.states.disconnected(c.number)
		})
		c.hangUp()
	}
}

func (h *heartbeat) carryOut(e *effect) {
	switch {
	case e.Call > 0:
		h.send(*e)
	case e.Cut > 0 || e.HangUp > 0:
		c := h.connections[e.Cut+e.HangUp]
		delete(h.connections, e.Cut+e.HangUp)
		if c != nil && e.Cut > 0 {
			c.cut()
		} else if c != nil {
			go c.hangUp()
		}
	case e.Event != "":
		h.applyEvent(e)
	case e.Reply != "":
		a := h.acquires[e.Reply]
		delete(h.acquires, e.Reply)
		// A copy: the next step reuses the effects.
		answer := *e
		h.reports = append(h.reports, func() { a.answer <- answer })
	case e.Log != "":
		line, reason := "leases are "+e.Log, any(cmp.Or(e.Code, string(e.Reason)))
		if a := h.acquires[e.Key]; a != nil {
			line = "no lease could be acquired"
			if a.cause != nil && e.Code != "no answer" {
				reason = a.cause
			}
		}
		if e.Code != "" {
			line += ", and it is tried again"
		}
		args := []any{"reason", reason}
		if e.Count > 0 {
			names := h.ended[cmp.Or(e.Reason, "unconfirmed")]
			args = append(args, "count", e.Count, "names", names[:min(3, len(names))])
		}
		h.warn(line, args...)
	case e.Closed:
		close(h.closed)
	}
}

func (h *heartbeat) applyEvent(e *effect) {
	l := h.leases[e.Key]
	switch e.Event {
	case "acquired":
		l = h.newLease(h.acquires[e.Key], *e)
		h.leases[e.Key] = l
	case "renewed":
		if l.renewed != nil {
			close(l.renewed)
			l.renewed = nil
		}
	case "lost":
		delete(h.leases, e.Key)
		l.end(newLeaseLost(e.Reason, e.Advice, l.names...))
	case "released":
		delete(h.leases, e.Key)
		l.end(newLeaseLost(ReasonReleased, "", l.names...))
	}
	if e.Reason != "" {
		h.ended[e.Reason] = append(h.ended[e.Reason], l.names...)
	}
	h.emit(Event{e.Event, l.names, e.Token, span(e.Remaining), e.Reason})
}

func (h *heartbeat) warn(line string, args ...any) {
	h.reports = append(h.reports, func() { slog.Warn("pgfence: "+line, args...) })
}

func (h *heartbeat) emit(event Event) {
	if h.onEvent == nil {
		return
	}
	emittedAt := span(h.states.now)
	h.reports = append(h.reports, func() {
		// An earlier event may have held up this one.
		event.Remaining = max(0, event.Remaining-(now()-emittedAt))
		h.onEvent(event)
	})
}

// send starts a goroutine that sends a call. Its statement is built here, under the lock.
func (h *heartbeat) send(e effect) {
	c := h.connections[e.Connection]
	if e.Open {
		c = &connection{number: e.Connection}
		c.open, c.end = context.WithCancel(context.Background())
		h.connections[e.Connection] = c
	}
	a := h.acquires[e.For]
	if a == nil {
		a = &acquire{}
	}
	go h.run(e, c, a, h.statement(e, a))
}

// statement returns the statement of a call.
func (h *heartbeat) statement(e effect, a *acquire) statement {
	switch {
	case e.Do == "acquire":
		return h.schema.acquire(e, a.acquireArgs)
	case e.Do == "keep":
		return h.schema.keep(e)
	case e.Do == "keep_row":
		ttls := []string{}
		for _, l := range h.states.call(e.Call).leases {
			ttls = append(ttls, interval(l.TTL))
		}
		return h.schema.keepRows(e, ttls)
	case e.Do == "undo":
		return h.schema.undo(e)
	case e.Table != "":
		return h.schema.releaseRows(e)
	}
	return h.schema.release(e)
}

// run sends a call, and gives its answer to the states.
func (h *heartbeat) run(e effect, c *connection, a *acquire, s statement) {
	c.use.Lock()
	code, result := "", answer{}
	err := func() (err error) {
		defer func() {
			if what := recover(); what != nil {
				code = "panicked"
				err = fmt.Errorf("panic: %v\n%s", what, debug.Stack())
			}
		}()
		if e.Open {
			if err := c.connect(h.open); err != nil {
				code = openingCode(err)
				return err
			}
			h.input(e.Call, func() { h.states.sent(e.Call) })
		} else if c.hasEnded(retryInterval * time.Millisecond) {
			code = "unsent"
			return nil
		}
		result, err = c.query(e, s)
		switch {
		case err == nil:
		case c.isBroken():
			code = cmp.Or(sqlStateOf(err), "ended")
		default:
			code = cmp.Or(sqlStateOf(err), "unreadable")
		}
		return err
	}()
	isBroken, role := c.isBroken(), c.role()
	c.use.Unlock()
	h.input(e.Call, func() {
		a.cause, a.role = err, role
		if code == "" {
			h.states.answered(e.Call, result)
			return
		}
		select {
		case a.failed <- struct{}{}:
		default:
		}
		h.states.failed(e.Call, code, isBroken)
	})
}

// Requests of the program

// acquire waits for a lease, or for the error. If ctx ends first, the caller does not wait for a
// call that is under way.
func (h *heartbeat) acquire(ctx context.Context, a *acquire) (*Lease, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	a.answer, a.failed = make(chan effect, 1), make(chan struct{}, 1)
	h.input(0, func() {
		h.lastID++
		a.ID = strconv.Itoa(h.lastID)
		h.acquires[a.ID] = a
		h.states.acquire(a.acquireArgs)
	})
	var e effect
	select {
	case e = <-a.answer:
	case <-ctx.Done():
	}
	if e.Error == NoConnection || e.Error == NoAnswer {
		// The call was cut. Its error tells where it hung.
		select {
		case <-a.failed:
		case <-time.After(retryInterval * time.Millisecond):
		}
	}
	switch {
	case ctx.Err() != nil:
		h.input(0, func() {
			h.states.giveUp(a.ID)
			h.states.release(a.ID)
		})
		return nil, ctx.Err()
	case e.Error != "":
		h.mu.Lock()
		defer h.mu.Unlock()
		return nil, a.replyError(e)
	}
	// The lease may have ended already.
	if err := a.lease.Check(); err != nil {
		return nil, err
	}
	return a.lease, nil
}

// isClosing reports whether the program has begun to close the fence.
func (h *heartbeat) isClosing() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.states.closedAt < never
}

// renew has the leases renewed at once, and waits for the renewals or the losses.
func (h *heartbeat) renew(ctx context.Context, leases Leases) {
	h.mu.Lock()
	renewed := []<-chan struct{}{}
	for _, l := range leases {
		if l.renewed == nil {
			l.renewed = make(chan struct{})
		}
		renewed = append(renewed, l.renewed)
	}
	h.mu.Unlock()
	h.suspect(leases)
	for i, l := range leases {
		select {
		case <-renewed[i]:
		case <-l.ended:
		case <-ctx.Done():
		case <-time.After(longestCall * time.Millisecond):
		}
	}
}

func (h *heartbeat) suspect(leases Leases) {
	h.input(0, func() { h.states.suspect(leases.keys()) })
}

// lastTransaction reports the stage of a transaction that releases the leases.
func (h *heartbeat) lastTransaction(leases Leases, stage string) {
	h.input(0, func() { h.states.lastTransaction(leases.keys(), stage) })
}
